#!/usr/bin/env python3
"""A peer: the training graph of TensorFlow's CIFAR-10 tutorial on several towers, rebuilt in `tf.compat.v1`.

Its structure, not its code: 16 threads fill a queue with images distorted one by one; a queue of batches feeds the
towers; variables are on the CPU; gradients are stacked and averaged; plain gradient descent with a staircase learning
rate, weight losses and moving averages of all weights; one `session.run` per step. Summaries are left out.
Source: "Convolutional Neural Networks", a TensorFlow tutorial of 2015 to 2018.
"""

import functools
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import protocol

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from cifar_towers.cli.program import import_tensorflow

CROP_SIZE, NUM_THREADS = 24, 16  # the threads fill the queue
MIN_QUEUE_FRACTION = 0.4  # of all images that the queue holds
EXAMPLES, EPOCHS_PER_DECAY = 50_000, 350


def main() -> None:
    """Serve the steps of the tutorial's graph; needs TensorFlow."""
    parser = protocol.make_parser(__doc__)
    parser.add_argument(
        "--towers", type=int, default=2, help="number of towers on GPUs or logical CPUs, each with --batch_size images"
    )
    args = parser.parse_args()
    data = protocol.load(args.data)
    import_tensorflow()
    import tensorflow as tf

    with tf.Graph().as_default(), tf.device("/cpu:0"):
        batches = batch_queue(tf.compat.v1, data["raw"], data["labels"], args.batch_size, args.towers)
        kind = "gpu" if tf.config.get_visible_devices("GPU") else "cpu"
        train, loss = training_graph(tf.compat.v1, batches, [f"/{kind}:{tower}" for tower in range(args.towers)])
        options = tf.compat.v1.ConfigProto(allow_soft_placement=True, device_count={"CPU": args.towers})
        options.gpu_options.allow_growth = True  # other peers share the GPU
        with tf.compat.v1.Session(config=options) as session:
            session.run(tf.compat.v1.global_variables_initializer())
            coordinator = tf.train.Coordinator()
            threads = tf.compat.v1.train.start_queue_runners(session, coordinator)

            def run(steps: int) -> Iterator[float]:
                for _ in range(steps):
                    start = time.perf_counter()
                    session.run([train, loss])
                    yield time.perf_counter() - start

            trained = sum(v.shape.num_elements() for v in tf.compat.v1.trainable_variables())
            protocol.serve(run, trained)
            coordinator.request_stop()
            session.close()  # wakes the threads that wait for a queue
            coordinator.join(threads, stop_grace_period_secs=5, ignore_live_threads=True)


def batch_queue(v1, raw, labels, batch_size: int, towers: int):
    """Return a queue of batches ([B, 24, 24, 3] float32, [B] int64), kept filled by threads."""
    image, label = v1.train.slice_input_producer([raw, labels])
    image = v1.image.random_flip_left_right(v1.random_crop(v1.cast(image, v1.float32), [CROP_SIZE, CROP_SIZE, 3]))
    image = v1.image.random_contrast(v1.image.random_brightness(image, 63), 0.2, 1.8)
    image = v1.image.per_image_standardization(image)
    least = int(MIN_QUEUE_FRACTION * len(labels))
    batch = v1.train.shuffle_batch([image, label], batch_size, least + 3 * batch_size, least, num_threads=NUM_THREADS)
    queue = v1.FIFOQueue(2 * towers, [part.dtype for part in batch], [part.shape for part in batch])
    v1.train.add_queue_runner(v1.train.QueueRunner(queue, [queue.enqueue(batch)]))
    return queue


def training_graph(v1, batches, devices: list[str]):
    """Return the training operation and the last tower's loss, with a tower on each device."""
    count = v1.train.get_or_create_global_step()
    rate = v1.train.exponential_decay(
        0.1, count, EPOCHS_PER_DECAY * EXAMPLES // batches.shapes[0][0], 0.1, staircase=True
    )
    optimizer = v1.train.GradientDescentOptimizer(rate)
    tower_grads = []
    for tower, device in enumerate(devices):
        with (
            v1.device(device),
            v1.name_scope(f"tower_{tower}") as scope,
            v1.variable_scope("net", reuse=tower > 0),
        ):
            images, labels = batches.dequeue()
            loss = total_loss(v1, net(v1, images), labels, scope)
            tower_grads.append(optimizer.compute_gradients(loss))
    update = optimizer.apply_gradients(average_gradients(v1, tower_grads), count)
    averages = v1.train.ExponentialMovingAverage(0.9999, count)
    with v1.control_dependencies([update]):
        return v1.group(averages.apply(v1.trainable_variables())), loss


def net(v1, x):
    """Compute [B, 10] logits of [B, 24, 24, 3] images."""
    pool = functools.partial(v1.nn.max_pool, ksize=[1, 3, 3, 1], strides=[1, 2, 2, 1], padding="SAME")
    norm = functools.partial(v1.nn.lrn, depth_radius=4, bias=1.0, alpha=0.001 / 9, beta=0.75)
    for name, channels_in, bias in (("conv1", 3, 0.0), ("conv2", 64, 0.1)):
        with v1.variable_scope(name):
            kernel = variable(v1, "weights", [5, 5, channels_in, 64], 0.05)
            x = v1.nn.relu(v1.nn.bias_add(v1.nn.conv2d(x, kernel, [1] * 4, "SAME"), constant(v1, [64], bias)))
        for part in (pool, norm) if name == "conv1" else (norm, pool):
            x = part(x)
    x = v1.reshape(x, [x.shape[0], -1])
    for name, units in (("local3", 384), ("local4", 192)):
        with v1.variable_scope(name):
            weights = variable(v1, "weights", [x.shape[1], units], 0.04, decay=0.004)
            x = v1.nn.relu(v1.matmul(x, weights) + constant(v1, [units], 0.1))
    with v1.variable_scope("logits"):
        return v1.matmul(x, variable(v1, "weights", [192, 10], 1 / 192)) + constant(v1, [10], 0.0)


def total_loss(v1, logits, labels, scope: str):
    """Add the mean cross entropy and the weight losses of one tower."""
    cross_entropy = v1.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    return v1.add_n([v1.reduce_mean(cross_entropy), *v1.get_collection("weight_losses", scope)])


def average_gradients(v1, tower_grads: list) -> list:
    """Average K lists of N (gradient, variable) to N (mean gradient, variable), stacked along a new axis."""
    means = []
    for pairs in zip(*tower_grads, strict=True):
        stacked = v1.concat([v1.expand_dims(gradient, 0) for gradient, _ in pairs], 0)
        means.append((v1.reduce_mean(stacked, 0), pairs[0][1]))
    return means


def variable(v1, name: str, shape: list, deviation: float, decay: float = 0.0):
    """Create weights on the CPU, with their loss on the tower."""
    with v1.device("/cpu:0"):
        weights = v1.get_variable(name, shape, initializer=v1.truncated_normal_initializer(stddev=deviation))
    if decay:
        v1.add_to_collection("weight_losses", decay * v1.nn.l2_loss(weights))
    return weights


def constant(v1, shape: list, value: float):
    """Create biases on the CPU."""
    with v1.device("/cpu:0"):
        return v1.get_variable("biases", shape, initializer=v1.constant_initializer(value))


if __name__ == "__main__":
    main()

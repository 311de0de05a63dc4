"""`python -m tests.faults.backup_and_restore DIRECTORY SAVE_FREQ FLAGS`: Keras `fit` as a user would make it resume.

The net, the data, the batch and the precision are those of `train.py` with these flags. SAVE_FREQ is a number of steps,
or `epoch`. The program prints the step with which it begins, and then a line with the step and the time of each step.
"""

import sys
import time
from pathlib import Path

from cifar_towers.cli.flags import parse_command_line
from cifar_towers.cli.program import import_tensorflow
from cifar_towers.config import TrainConfig

EPOCHS = 10**6  # more than are trained


def main() -> None:
    """Train until the process is killed."""
    directory, save_freq, *flags = sys.argv[1:]
    config = parse_command_line(TrainConfig, ["", *flags], "")
    import_tensorflow()
    import keras
    import tensorflow as tf

    from cifar_towers.data import sources
    from cifar_towers.devices import resolve_precision
    from cifar_towers.models.stock_layers import to_stock_layers
    from cifar_towers.training import build

    _, dataset = build.load_data(config, sources.find(config.dataset, config.data_dir))
    precision, _ = resolve_precision(config.precision, "/CPU:0")
    keras.utils.set_random_seed(config.seed)
    model = to_stock_layers(build.make_model(config, precision, dataset.info, dataset.train))
    for layer in model.layers:
        layer.trainable = layer.name != "whitening"  # as in most of a run
    model.compile(
        keras.optimizers.SGD(0.01, momentum=0.9, nesterov=True),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    model.optimizer.build(model.trainable_variables)

    def prepare(images, labels):
        return (tf.image.random_flip_left_right(tf.cast(images, tf.float32)) - mean) / std, labels

    mean, std = tf.constant(dataset.info.mean), tf.constant(dataset.info.std)
    images, labels = dataset.train.images, dataset.train.labels
    data = tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(len(labels))
    data = data.batch(config.batch_size, drop_remainder=True).map(prepare, tf.data.AUTOTUNE).prefetch(2)
    backup = keras.callbacks.BackupAndRestore(
        str(Path(directory) / "backup"), save_freq if save_freq == "epoch" else int(save_freq), double_checkpoint=True
    )
    model.fit(data, epochs=EPOCHS, verbose=0, callbacks=[backup, log_steps(keras.callbacks.Callback)])


def log_steps(callback: type) -> object:
    """Return a callback of Keras that prints the steps."""

    class LogSteps(callback):
        def on_train_begin(self, logs=None):  # after `BackupAndRestore` has restored the model
            self.step = int(self.model.optimizer.iterations)
            print(f"begins with step {self.step}", flush=True)

        def on_train_batch_end(self, batch, logs=None):
            self.step += 1
            print(f"step {self.step} at {time.time():.3f}", flush=True)

    return LogSteps()


if __name__ == "__main__":
    main()

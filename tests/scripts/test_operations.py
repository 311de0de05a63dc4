import pytest
import tensorflow as tf

from cifar_towers.config import TrainConfig
from cifar_towers.config.schedules import RunLength
from cifar_towers.data import synthetic
from cifar_towers.data.batches import Batches
from cifar_towers.training import build
from scripts.speedrun import operations


def traced(function, *shapes, dtype=tf.float32):
    return tf.function(function, autograph=False).get_concrete_function(*(tf.TensorSpec(s, dtype) for s in shapes))


def convolution(images, kernel):
    return tf.nn.conv2d(images, kernel, 1, "SAME")


def gradients(images, kernel):
    """Return both gradients; the graph also holds the forward pass, which is pruned."""
    with tf.GradientTape() as tape:
        tape.watch([images, kernel])
        output = convolution(images, kernel)
    return tape.gradient(output, [images, kernel])


FLOPS = 2 * 4 * 10 * 10 * 3 * 3 * 5 * 7  # a SAME 3x3 convolution of 5 to 7 channels over four images of 10 x 10
SHAPES = [4, 10, 10, 5], [3, 3, 5, 7]


@pytest.mark.parametrize(
    ("function", "shapes", "expected"),
    [
        (convolution, SHAPES, {"Conv2D": FLOPS}),
        (gradients, SHAPES, {"Conv2DBackpropInput": FLOPS, "Conv2DBackpropFilter": FLOPS}),
        (lambda x, y: gradients(x, y)[1], SHAPES, {"Conv2DBackpropFilter": FLOPS}),
        (lambda x, y: tf.nn.conv2d(x, y, 2, "VALID"), SHAPES, {"Conv2D": 2 * 4 * 4 * 4 * 9 * 5 * 7}),
        (lambda x, y: tf.matmul(x, y, transpose_a=True), ([4, 3], [4, 5]), {"MatMul": 2 * 3 * 4 * 5}),
        (lambda x, y: tf.matmul(x, y, adjoint_a=True), ([6, 4, 3], [6, 4, 5]), {"BatchMatMulV2": 6 * 2 * 3 * 4 * 5}),
        (lambda x, y: tf.einsum("oh,bhc->boc", x, y), ([2, 3], [4, 3, 5]), {"Einsum": 2 * 2 * 3 * 4 * 5}),
        (
            lambda x, y: tf.nn.depthwise_conv2d(x, y, [1] * 4, "SAME"),
            ([4, 10, 10, 5], [3, 3, 5, 2]),
            {"DepthwiseConv2dNative": 2 * 4 * 100 * 5 * 2 * 9},
        ),
        (lambda x, y: tf.nn.gelu(x + y), ([4], [4]), {}),
    ],
)
def test_counts_equal_those_by_hand(function, shapes, expected):
    assert operations.count(traced(function, *shapes)) == expected


def test_every_call_and_the_larger_branch_count():
    compiled = tf.function(tf.matmul, jit_compile=True, autograph=False)

    def calls(x, y):
        return compiled(compiled(x, y), y)

    def chooses(x, y):
        return tf.cond(x[0, 0] > 0, lambda: tf.matmul(x, y), lambda: tf.matmul(tf.matmul(x, y), y))

    assert operations.count(traced(calls, [4, 4], [4, 4])) == {"MatMul": 2 * 2 * 4**3}
    assert operations.count(traced(chooses, [4, 4], [4, 4])) == {"MatMul": 2 * 2 * 4**3}


def test_errors_name_the_uncountable_operation():
    with pytest.raises(ValueError, match=r"Conv2D .*\(None, 10, 10, 7\)"):
        operations.count(traced(convolution, [None, 10, 10, 5], SHAPES[1]))

    def loop(x, y):
        return tf.while_loop(lambda x: x[0, 0] < 1, lambda x: [tf.matmul(x, y)], [x])

    with pytest.raises(ValueError, match="loop while"):
        operations.count(traced(loop, [4, 4], [4, 4]))


def test_speednet_step_counts_equal_for_tower_counts_and_precisions(monkeypatch, towers):
    """An image takes 105 million multiply-adds forward and for the gradients to the kernels, 118 to the images.

    The gradients to the images have the row and column that pooling discards. In bfloat16 some are matrix products, and
    in float32 with AVX2 Winograd's algorithm takes less than half as many.
    """
    monkeypatch.setattr("cifar_towers.models.convolution.processor_features", lambda: {"sse2"})
    examples, totals = 8, {}
    train = synthetic.make(100, seed=0, stream=0)
    for count, precision in ((1, "float32"), (2, "float32"), (1, "bfloat16")):
        on_towers = {"num_gpus": count, "variable_placement": "cpu"}
        config = TrainConfig(model="speednet94", optimizer="momentum", batch_size=examples, **on_towers)
        batches = Batches(train, examples, seed=0)
        state, train_step, _ = build.make_training(
            config, towers(count), precision, train, RunLength(batches.steps_per_epoch, 10, 10)
        )
        rates = {name: tf.TensorSpec([], tf.float32) for name in state.optimizer.learning_rates(0)}
        function = train_step.get_concrete_function(batches.stream(0, 1).element_spec, rates, 32)
        totals[count, precision] = sum(operations.count(function).values())
    assert totals[1, "float32"] / examples == pytest.approx(2 * (105e6 + 105e6 + 118e6), rel=0.01)
    assert len(set(totals.values())) == 1

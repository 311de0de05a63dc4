import time

import pytest
import tensorflow as tf

from cifar_towers.reporting.profile import PARTS, part_of, profiled, seconds_by_kind, shares_of_step
from cifar_towers.towers import average_gradients, run_on_towers, split_batch


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("tower_0/conv1/Conv2D", "forward"),
        ("gradient_tape/tower_1/conv1/Conv2D/Conv2DBackpropFilter", "backward"),
        ("tower_0/backward/PartitionedCall", "backward"),
        ("train_step/gradient_tape/tower_0/MatMul", "backward"),
        ("tower_0/part_1/average_gradients/AddN", "average"),
        ("all_reduce/AddN", "average"),
        ("apply/Mul", "apply"),
        ("weight_averages/sub", "apply"),
        ("split_batch/split", "other"),
    ],
)
def test_parts_of_the_step(name, part):
    assert part_of(name) == part


def test_a_profile_knows_the_work(towers):
    w = tf.Variable(tf.random.normal([800, 800]))

    def on_tower(tower, shard):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(shard @ w)
        return loss, [(tape.gradient(loss, w), w)]

    @tf.function
    def step(x):
        losses, tower_grads = zip(*run_on_towers(on_tower, towers(2), split_batch(x, towers(2))), strict=True)
        for gradient, variable in average_gradients(tower_grads):
            with tf.name_scope("apply"):
                variable.assign_sub(gradient)
        return losses

    x = tf.ones([1600, 800])
    step(x)
    start = time.perf_counter()
    step(x)
    took = time.perf_counter() - start
    products = [work for work in profiled(lambda: step(x)) if work.kind == "MatMul"]
    assert len(products) == 4  # two towers, forward and backward
    assert 0 < sum(work.seconds for work in products) < 20 * took
    assert seconds_by_kind(products)["MatMul"] == sum(work.seconds for work in products)
    shares = shares_of_step(lambda: step(x))
    assert tuple(shares) == PARTS and sum(shares.values()) == pytest.approx(1)
    assert shares["forward"] > 0.05 and shares["backward"] > 0.05 and shares["average"] > 0 and shares["apply"] > 0

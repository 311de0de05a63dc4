import functools
import itertools
import random

import keras
import numpy as np
import pytest
import tensorflow as tf

from cifar_towers.errors import UsageError
from cifar_towers.models import MODELS
from cifar_towers.towers import pipeline
from cifar_towers.towers.keras_parallel import variable_values
from cifar_towers.towers.pipeline import cheapest_cuts, cut_in_stages, staged_call

DEVICES = ["/CPU:1", "/CPU:2", "/CPU:3", "/CPU:4"]


def net(name, **options):
    """Make a model with random whitening filters, so that no gradient is zero by accident."""
    keras.utils.set_random_seed(1)
    whitening = np.random.default_rng(0).normal(size=(2, 2, 3, 24)).astype("f4")
    return MODELS[name](
        **({"whitening": whitening} if "speednet" in name else {"image_size": 20}), **options
    )


def with_gradients(model, images, stages=None, in_graph=True):
    """Return (logits, new statistics, gradients), and whether each statistic is the same tensor as
    before.
    """
    same = []
    call = (
        staged_call(stages, model)
        if stages
        else functools.partial(model.stateless_call, training=True)
    )
    upstream = tf.random.stateless_normal([images.shape[0], 10], [1, 3])

    def run(weights, statistics, images):
        with tf.GradientTape() as tape:
            tape.watch(weights)
            logits, new = call(weights, statistics, images)[:2]
            loss = tf.reduce_sum(tf.cast(logits, upstream.dtype) * upstream)
        same[:] = [value is old for value, old in zip(new, statistics, strict=True)]
        return logits, new, tape.gradient(loss, weights)

    run = tf.function(run, autograph=False) if in_graph else run
    return run(*variable_values(model), images), same


def assert_close(results, expected, rtol):
    for value, witness in zip(tf.nest.flatten(results), tf.nest.flatten(expected), strict=True):
        assert np.any(witness) and np.all(np.isfinite(witness))
        assert np.linalg.norm(np.subtract(value, witness)) <= rtol * np.linalg.norm(witness)


def branching_model():
    """Operations that are not layers, a nested model, dropout, and an input that the last stage
    needs again.
    """
    inner = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(8)], name="inner"
    )
    images = keras.Input((8,))
    left = keras.layers.Dropout(0.5, seed=3)(keras.layers.Dense(8, "relu", name="left")(images))
    right = keras.ops.tanh(left) * 2 + images
    x = inner(keras.layers.BatchNormalization()(right)) + left
    x = keras.layers.Dropout(0.3, seed=4)(keras.layers.Concatenate(name="join")([x, images, right]))
    return keras.Model(images, keras.layers.Dense(10, name="out")(x), name="branching")


@pytest.mark.parametrize(
    ("make", "in_graph", "counts", "rtol"),
    [
        pytest.param(lambda: net("resnet20"), True, (4,), 1e-5, marks=pytest.mark.slow),
        (lambda: net("resnet20", dtype="mixed_bfloat16"), True, (4,), 1e-2),
        (lambda: net("speednet94"), True, (2,), 1e-5),
        (branching_model, True, (1, 4), 1e-5),
        (branching_model, False, (3,), 1e-5),
    ],
    ids=["resnet20", "bfloat16", "speednet94", "branching", "branching, eagerly"],
)
def test_stages_equal_one_device(make, in_graph, counts, rtol):
    model = make()
    shape = [size or 20 for size in model.input.shape[1:]]
    images = tf.random.stateless_normal([16 if shape == [8] else 4, *shape], [1, 2])
    expected, same = with_gradients(model, images, in_graph=in_graph)
    for count in counts:
        stages = cut_in_stages(model, DEVICES[:count])
        results, same_in_stages = with_gradients(model, images, stages, in_graph)
        assert_close(results, expected, rtol)
        assert same_in_stages == same
        assert sum(same) == (
            "whitening" in [layer.name for layer in model.layers]
        )  # the frozen filters
        exchanged = {tensor.dtype for stage in stages[1:] for tensor in stage.model.inputs}
        assert exchanged <= {"bfloat16" if rtol > 1e-5 else "float32"}


def test_each_variable_has_one_stage_and_no_tensor_is_passed_on_that_none_needs():
    model = net("speednet96")
    stages = cut_in_stages(model, DEVICES)
    assert stages[0].inputs == ("images",) and stages[-1].outputs == ("logits:0",)
    for index, stage in enumerate(stages[:-1]):
        assert set(stage.outputs) <= {
            name for later in stages[index + 1 :] for name in later.inputs
        }
    devices = {
        variable.path: stage.device for stage in stages for variable in stage.model.variables
    }
    order = [
        DEVICES.index(devices[variable.path])
        for layer in model.layers
        for variable in layer.variables
    ]
    assert order == sorted(order) and {*order} == {0, 1, 2, 3}
    assert len(order) == sum(len(stage.model.variables) for stage in stages)


def test_cutting_does_not_change_the_model():
    model = net("resnet20")
    config, outputs = model.get_config(), [layer.output for layer in model.layers]
    assert len(cut_in_stages(model, ["/CPU:0"] * (len(outputs) - 1))) == len(outputs) - 1
    assert model.get_config() == config
    assert all(layer.output is output for layer, output in zip(model.layers, outputs, strict=True))


def graph_of_parts(model, stages, parts):
    """Trace the gradients of `parts` micro-batches, each in scope `part_<m>`, and return the
    operations.
    """
    call = staged_call(stages, model)

    @tf.function(autograph=False)
    def step(images):
        weights, statistics = variable_values(model)
        results = []
        for part, shard in enumerate(tf.split(images, parts)):
            with tf.device("/CPU:0"), tf.name_scope(f"part_{part}"):
                with tf.GradientTape() as tape:
                    tape.watch(weights)
                    logits, new = call(weights, statistics, shard)[:2]
                    loss = tf.reduce_sum(logits)
                results.append((tape.gradient(loss, weights), new))
        return results

    return step.get_concrete_function(
        tf.TensorSpec([4, *model.input.shape[1:]])
    ).graph.get_operations()


def test_forward_and_backward_are_on_the_stage_device():
    model = net("resnet20")
    stages = cut_in_stages(model, DEVICES[:3])
    operations = graph_of_parts(model, stages, 1)
    for index, stage in enumerate(stages):
        in_stage = [op for op in operations if f"/stage_{index}/" in op.name]
        assert {op.device[-5:] for op in in_stage} == {stage.device[1:]}
        convolutions = sum(type(layer).__name__ == "Conv2D" for layer in stage.model.layers)
        for kind in ("Conv2D", "Conv2DBackpropInput"):
            assert sum(op.type == kind for op in in_stage) == convolutions > 0
    assert not [
        op for op in operations if op.type.startswith("Conv2D") and "/stage_" not in op.name
    ]
    # inputs and outputs of a stage are not copied by way of the caller's device
    copies = [op for op in operations if op.type == "IdentityN" and "/stage_" not in op.name]
    assert [op.device[-5:] for op in copies] == [stage.device[1:] for stage in stages]


def ancestors(operations):
    """Return all operations that these depend on, by data or by control."""
    pending, found = list(operations), set()
    while pending:
        op = pending.pop()
        earlier = {*(tensor.op for tensor in op.inputs), *op.control_inputs} - found
        found |= earlier
        pending += earlier
    return found


def test_micro_batches_are_ordered_by_data_only():
    model = branching_model()
    operations = graph_of_parts(model, cut_in_stages(model, DEVICES[:3]), 2)

    def depends_on(scope, earlier):
        later = [op for op in operations if scope in op.name]
        assert later
        return any(earlier in op.name for op in ancestors(later))

    assert depends_on("part_1/stage_1/", "part_1/stage_0/")
    assert depends_on("gradient_tape/part_1/stage_0/", "gradient_tape/part_1/stage_2/")
    assert not depends_on("part_1/", "part_0/")
    assert not depends_on("part_0/", "part_1/")


def test_cheapest_cuts_against_brute_force():
    draw = random.Random(0)
    for _ in range(60):
        costs = [draw.choice([0, 1, draw.randint(1, 50)]) for _ in range(draw.randint(1, 9))]
        for count in range(1, len(costs) + 1):
            starts = cheapest_cuts(costs, count)
            assert starts[0] == 0 and len(starts) == count and starts == sorted(set(starts))

            def largest(starts, costs=costs):
                return max(sum(costs[a:b]) for a, b in itertools.pairwise([*starts, len(costs)]))

            all_cuts = itertools.combinations(range(1, len(costs)), count - 1)
            assert largest(starts) == min(largest([0, *cuts]) for cuts in all_cuts)


@pytest.fixture
def costs(monkeypatch):
    """Return a list that gets the costs of all layers when a model is cut."""
    seen = []
    monkeypatch.setattr(
        pipeline, "cheapest_cuts", lambda of_layers, stages: seen.extend(of_layers) or range(stages)
    )
    return seen


def test_multiply_adds_of_resnet20(monkeypatch, costs):
    monkeypatch.setattr(pipeline, "ELEMENT_COST", 0)
    first = 27 * 16 * 32**2 + 6 * 9 * 16 * 16 * 32**2
    others = sum(9 * c * (c // 2 + 5 * c) * size**2 for c, size in ((32, 16), (64, 8)))
    cut_in_stages(MODELS["resnet20"](), DEVICES[:1])
    assert sum(costs) == first + others + 640 == 40_551_040


def test_output_elements_have_a_cost(costs):
    images = keras.Input((None, None, 3))
    model = keras.Model(
        images, keras.layers.ReLU()(keras.layers.Conv2D(5, 3, padding="same")(images))
    )
    conv, _ = cut_in_stages(model, DEVICES[:2], open_size=4)
    assert costs == [27 * 5 * 16 + 100 * 5 * 16, 100 * 5 * 16]
    assert conv.model.inputs[0].shape == (None, None, None, 3)


def called_twice():
    images, shared = keras.Input((4,)), keras.layers.Dense(4)
    return keras.Model(images, shared(shared(images)), name="twice")


@pytest.mark.parametrize(
    ("make", "stages", "mentions"),
    [(branching_model, 12, "12 .* branching"), (called_twice, 2, "twice")],
)
def test_models_that_cannot_be_cut_are_refused(make, stages, mentions):
    with pytest.raises(UsageError, match=mentions):
        cut_in_stages(make(), ["/CPU:1"] * stages)

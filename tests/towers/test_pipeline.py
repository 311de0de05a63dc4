import functools
import itertools
import random

import keras
import numpy as np
import pytest
import tensorflow as tf

from cifar_towers.models import MODELS
from cifar_towers.towers import pipeline
from cifar_towers.towers.keras_parallel import variable_values
from cifar_towers.towers.pipeline import cheapest_cuts, cut_in_stages, staged_call

DEVICES = ["/CPU:1", "/CPU:2", "/CPU:3", "/CPU:4"]


def net(name):
    """Make a model with random whitening filters, so that no gradient is zero by accident."""
    keras.utils.set_random_seed(1)
    whitening = np.random.default_rng(0).normal(size=(2, 2, 3, 24)).astype("f4")
    return MODELS[name](**({"whitening": whitening} if "speednet" in name else {"image_size": 20}))


def to_float64(model):
    """Copy the model in float64, with Keras's batch norm, as TensorFlow's fused one has no float64."""

    def wide(layer):
        options = {"name": layer.name, "dtype": "float64"}
        if "norm" in layer.name:
            return keras.layers.BatchNormalization(-1, layer.momentum, layer.epsilon, scale=layer.scale, **options)
        initializer = {"kernel_initializer": "zeros"} if layer.name == "head" else {}
        return type(layer).from_config(layer.get_config() | initializer | options)

    copy = keras.models.clone_model(model, keras.Input(model.input.shape[1:], dtype="float64"), wide)
    values = {variable.path: variable for variable in model.variables}
    for variable in copy.variables:
        variable.assign(values[variable.path])
    return copy


def with_gradients(model, images, stages=None, in_graph=True):
    """Return (logits, new statistics, gradients), and whether each statistic is the same tensor as before."""
    same = []
    call = staged_call(stages, model) if stages else functools.partial(model.stateless_call, training=True)
    upstream = tf.random.stateless_normal([images.shape[0], 10], [1, 3], dtype=images.dtype)

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
    """Operations that are not layers, a nested model, dropout, and an input that the last stage needs again."""
    inner = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(8)], name="inner")
    images = keras.Input((8,))
    left = keras.layers.Dropout(0.5, seed=3)(keras.layers.Dense(8, "relu", name="left")(images))
    right = keras.ops.tanh(left) * 2 + images
    x = inner(keras.layers.BatchNormalization()(right)) + left
    x = keras.layers.Dropout(0.3, seed=4)(keras.layers.Concatenate(name="join")([x, images, right]))
    return keras.Model(images, keras.layers.Dense(10, name="out")(x), name="branching")


@pytest.mark.parametrize(
    ("make", "in_graph", "counts", "rtol"),
    [
        (lambda: to_float64(net("resnet20")), True, (4,), 1e-12),
        (lambda: to_float64(net("speednet94")), True, (2,), 1e-12),
        pytest.param(lambda: to_float64(net("speednet96")), True, (2, 4), 1e-12, marks=pytest.mark.slow),
        (branching_model, True, (1, 2, 3, 4), 1e-5),
        (branching_model, False, (3,), 1e-5),
    ],
    ids=["resnet20", "speednet94", "speednet96", "branching", "branching, eagerly"],
)
def test_stages_equal_one_device(make, in_graph, counts, rtol):
    model = make()
    shape = [size or 20 for size in model.input.shape[1:]]
    images = tf.random.stateless_normal([16 if shape == [8] else 4, *shape], [1, 2], dtype=model.input.dtype)
    expected, same = with_gradients(model, images, in_graph=in_graph)
    for count in counts:
        results, same_in_stages = with_gradients(model, images, cut_in_stages(model, DEVICES[:count]), in_graph)
        assert_close(results, expected, rtol)
        assert same_in_stages == same
        assert sum(same) == ("whitening" in [layer.name for layer in model.layers])  # the frozen filters


def test_layers_of_unknown_shape_cost_nothing(costs):
    """A reshape whose number of rows Keras cannot know, as in its vision transformer."""

    class Patches(keras.layers.Layer):
        def call(self, x):
            return keras.ops.reshape(x, (keras.ops.shape(x)[0], -1, 12))

        def compute_output_spec(self, x):
            return keras.KerasTensor((None, None, 12), x.dtype)

    pixels, dense = keras.Input([8, 8, 3]), keras.layers.Dense(5)
    model = keras.Model(pixels, keras.layers.GlobalAveragePooling1D()(dense(Patches()(pixels))))
    assert len(cut_in_stages(model, DEVICES[:3])) == 3 and costs == [0, 0, 5 * pipeline.ELEMENT_COST]


def test_stages_exchange_bfloat16():
    model = MODELS["resnet20"](image_size=16, dtype="mixed_bfloat16")
    images = tf.random.stateless_normal([4, 16, 16, 3], [1, 2])
    stages = cut_in_stages(model, DEVICES)
    assert {tensor.dtype for stage in stages[1:] for tensor in stage.model.inputs} == {"bfloat16"}
    (expected, _, _), _ = with_gradients(model, images)
    (results, _, _), _ = with_gradients(model, images, stages)
    assert_close(results, expected, 1e-2)


def test_layers_variables_inputs_and_outputs_of_stages():
    model = net("speednet96")
    stages = cut_in_stages(model, DEVICES)
    assert stages[0].inputs == ("images",) and stages[-1].outputs == ("logits:0",)
    for index, stage in enumerate(stages[:-1]):  # no output that no later stage needs
        assert set(stage.outputs) <= {name for later in stages[index + 1 :] for name in later.inputs}
    names = [layer.name for stage in stages for layer in stage.model.layers if type(layer).__name__ == "Conv2D"]
    assert names == [f"group{group}_conv{conv}" for group in (1, 2, 3) for conv in (1, 2, 3)]
    devices = {variable.path: stage.device for stage in stages for variable in stage.model.variables}
    assert set(devices) == {variable.path for variable in model.variables}
    assert devices["whitening/kernel"] == "/CPU:1" and devices["head/kernel"] == "/CPU:4"
    order = [DEVICES.index(devices[variable.path]) for layer in model.layers for variable in layer.variables]
    assert order == sorted(order)


def test_cutting_does_not_change_the_model():
    model = net("resnet20")
    config, outputs = model.get_config(), [layer.output for layer in model.layers]
    first, second = [cut_in_stages(model, DEVICES) for _ in range(2)]
    assert [stage.inputs for stage in first] == [stage.inputs for stage in second]
    assert len(cut_in_stages(model, ["/CPU:0"] * (len(outputs) - 1))) == len(outputs) - 1
    assert model.get_config() == config
    assert all(layer.output is output for layer, output in zip(model.layers, outputs, strict=True))


def graph_of_parts(model, stages, parts):
    """Trace the gradients of `parts` micro-batches, each in scope `part_<m>`, and return the operations."""
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

    return step.get_concrete_function(tf.TensorSpec([4, 20, 20, 3])).graph.get_operations()


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
    assert not [op for op in operations if op.type.startswith("Conv2D") and "/stage_" not in op.name]
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


@pytest.mark.parametrize("name", ["resnet20", pytest.param("speednet96", marks=pytest.mark.slow)])
def test_micro_batches_are_ordered_by_data_only(name):
    model = net(name)
    operations = graph_of_parts(model, cut_in_stages(model, DEVICES[:3]), 2)

    def depends_on(scope, earlier):
        later = [op for op in operations if op.name.startswith(scope)]
        assert later
        return any(op.name.startswith(earlier) for op in ancestors(later))

    assert depends_on("part_1/stage_1/", "part_1/stage_0/")
    assert depends_on("part_1/stage_0/gradient/", "part_1/stage_2/gradient/")
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
    monkeypatch.setattr(pipeline, "cheapest_cuts", lambda of_layers, stages: seen.extend(of_layers) or range(stages))
    return seen


def test_multiply_adds_of_resnet20(monkeypatch, costs):
    monkeypatch.setattr(pipeline, "ELEMENT_COST", 0)
    first = 27 * 16 * 32**2 + 6 * 9 * 16 * 16 * 32**2
    others = sum(9 * c * (c // 2 + 5 * c) * size**2 for c, size in ((32, 16), (64, 8)))
    cut_in_stages(MODELS["resnet20"](), DEVICES[:1])
    assert sum(costs) == first + others + 640 == 40_551_040


def test_output_elements_have_a_cost(costs):
    images = keras.Input((None, None, 3))
    model = keras.Model(images, keras.layers.ReLU()(keras.layers.Conv2D(5, 3, padding="same")(images)))
    conv, _ = cut_in_stages(model, DEVICES[:2], open_size=4)
    assert costs == [27 * 5 * 16 + 100 * 5 * 16, 100 * 5 * 16]
    assert conv.model.inputs[0].shape == (None, None, None, 3)


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ValueError, match="11 stages need at least 11 layers; cifarnet has 10"):
        cut_in_stages(MODELS["cifarnet"](), ["/CPU:1"] * 11)


def test_a_layer_that_is_called_twice_is_refused():
    images, shared = keras.Input((4,)), keras.layers.Dense(4)
    with pytest.raises(ValueError, match="twice calls a layer twice; stages need layers of their own"):
        cut_in_stages(keras.Model(images, shared(shared(images)), name="twice"), DEVICES[:2])

import itertools
from collections import Counter
from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf

from cifar_towers.towers import make_parallel, make_parallel_model, map_on_towers
from cifar_towers.towers.placement import tower_devices

L = keras.layers


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def assert_close(results, expected, rtol, atol=1e-5):
    for value, witness in zip(tf.nest.flatten(results), tf.nest.flatten(expected), strict=True):
        np.testing.assert_allclose(value, witness, rtol=rtol, atol=atol)


# ---- make_parallel


def with_gradients(function, *sources):
    """Return the outputs, and the gradients of the sum of their squares with respect to the
    sources.
    """
    with tf.GradientTape() as tape:
        tape.watch(sources)
        outputs = function()
        squares = [tf.abs(tf.cast(output, "complex64")) ** 2 for output in tf.nest.flatten(outputs)]
        loss = sum(map(tf.reduce_sum, squares))
    return outputs, tape.gradient(loss, sources)


def test_outputs_and_gradients_equal_one_device(towers):
    w = tf.Variable(numbers(3, 5))
    b = tf.Variable(numbers(5, seed=1))
    batch = {
        "x": tf.constant(numbers(11, 3, seed=2)),
        "more": (
            np.arange(11, dtype="f4"),
            tf.complex(numbers(11, 5, seed=3), numbers(11, 5, seed=4)),
        ),
    }
    sources = (w, b, batch["x"], batch["more"][1])
    sizes = []

    def fn(batch):
        sizes.append(batch["x"].shape[0])
        hidden = tf.tanh(batch["x"] @ w + b)
        index, z = batch["more"]
        waves = tf.signal.fft(tf.cast(hidden, "complex64") * z) * [1, 2, 3, 4, 5]
        return {"hidden": hidden, "more": (tf.reduce_sum(hidden, 1) + index, index > 4, waves)}

    expected = with_gradients(lambda: fn(batch), *sources)
    sizes.clear()
    eagerly = with_gradients(lambda: make_parallel(fn, towers(4), batch=batch), *sources)

    assert sizes == [3, 3, 3, 2]

    graph = tf.function(lambda: with_gradients(lambda: make_parallel(fn, 4, batch=batch), *sources))
    for result in (eagerly, graph()):
        tf.nest.assert_same_structure(expected, result)
        assert_close(result, expected, 2e-5, 1e-4)


def test_batches_have_any_length_also_less_than_the_towers_or_unknown(towers):
    w = tf.Variable(numbers(3, 2))

    def parallel(x):
        return with_gradients(
            lambda: make_parallel(lambda x: tf.square(x @ w), towers(4), x=x), x, w
        )

    graph = tf.function(parallel, [tf.TensorSpec([None, 3])])
    for examples in (1, 3, 9):
        x = tf.constant(numbers(examples, 3, seed=examples))
        expected = with_gradients(lambda x=x: tf.square(x @ w), x, w)
        for run in (parallel, graph):
            assert_close(run(x), expected, 1e-4)

    assert graph.experimental_get_tracing_count() == 1


@pytest.mark.parametrize(
    ("length", "fn", "error"),
    [
        (4, lambda x: (x, {"loss": x[0]}), ValueError),
        (4, lambda x: [x, x[:1]], ValueError),
        (None, lambda x: tf.reduce_sum(x, keepdims=True), ValueError),
        (None, lambda x: {"twice": tf.concat([x, x], 0)}, tf.errors.InvalidArgumentError),
    ],
)
def test_an_output_without_a_row_for_each_example_is_refused(towers, length, fn, error):
    """At once, or by the graph if only the graph knows the rows."""
    graph = tf.function(lambda x: make_parallel(fn, towers(2), x=x), [tf.TensorSpec([length])])
    with pytest.raises(error, match=r"output \d of tower_\d"):
        graph(tf.ones(4))


def test_tensors_of_different_lengths_are_refused(towers):
    add = tf.function(
        lambda x, y: make_parallel(tf.add, towers(2), x=x, y=y), [tf.TensorSpec([None])] * 2
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match="axis 0"):
        add(tf.ones(4), tf.ones(3))


def test_a_keras_model_is_for_the_other_function(towers):
    with pytest.raises(ValueError, match="make_parallel_model"):
        make_parallel(mlp(), towers(2), x=numbers(6, 8))


def test_a_scalar_has_no_rows_to_split(towers):
    with pytest.raises(ValueError, match="^s has no rows .*functools.partial"):
        make_parallel(lambda x, s: x * s, towers(2), x=tf.ones([4]), s=2.0)


@pytest.mark.parametrize("num_towers", [0, -1, []])
def test_no_towers_are_refused(num_towers):
    with pytest.raises(ValueError, match="towers"):
        make_parallel(tf.abs, num_towers, x=tf.ones(2))


# ---- make_parallel_model

X = numbers(10, 8)  # batches of 4, 4 and 2
Y = np.sin(X).sum(1, keepdims=True)
LABELS = np.arange(10) % 3
# 0 at the end: masked
WORDS = np.minimum(np.arange(40).reshape(10, 4) % 7, 4) * (np.arange(4) <= LABELS[:, None])
HEADS = {  # name: activation and loss
    "softmax_of_labels": ("softmax", "sparse_categorical_crossentropy"),
    "sigmoid": ("sigmoid", "binary_crossentropy"),
    "tensorflow_softmax": (tf.nn.softmax, "categorical_crossentropy"),
    "tensorflow_sigmoid": (tf.nn.sigmoid, "binary_crossentropy"),
    "softmax_as_sigmoid": (tf.nn.softmax, "binary_crossentropy"),  # Keras takes no logits here
    "none": (None, "mae"),
}


def mlp(*extra, **options):
    first = L.Dense(6, "relu", **options)
    second = L.Dense(4, "relu", **options)
    return keras.Sequential([keras.Input((8,)), first, *extra, second, L.Dense(1)])


def partly_frozen():
    model = mlp(kernel_regularizer="l2", activity_regularizer="l2")
    model.layers[0].trainable = False
    return model


def structured():
    inputs = {"a": keras.Input((8,), name="a"), "b": keras.Input((3,), name="b")}
    hidden = L.Concatenate()(list(inputs.values()))
    outputs = {"sum": L.Dense(1, name="sum")(hidden), "kind": L.Dense(3, name="kind")(hidden)}
    return keras.Model(inputs, outputs)


def tagger():
    words = keras.Input((4,), dtype="int32")
    hidden = L.Embedding(5, 3, mask_zero=True)(words)
    logits = L.Dense(2, name="tags0")(hidden)
    probabilities = L.Dense(2, tf.nn.softmax, name="tags1")(hidden)
    return keras.Model(words, [logits, probabilities])


def case_of_heads(*names):
    """Return a case whose probabilities are 0 in float32: its gradient needs the logits of the
    heads.
    """

    def make():
        inputs = keras.Input((8,))
        wide = keras.initializers.RandomNormal(stddev=30, seed=1)
        outputs = [
            L.Dense(3, HEADS[name][0], kernel_initializer=wide, name=name)(inputs) for name in names
        ]
        return keras.Model(inputs, only(outputs))

    def only(values):
        return values if len(values) > 1 else values[0]

    y = only([LABELS if name == "softmax_of_labels" else np.eye(3)[LABELS] for name in names])
    return make, {"x": 30 * X, "y": y}, {"loss": only([HEADS[name][1] for name in names])}, 1e-4


MSE = {"loss": "mse"}
LOSSES = {"kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "sum": "mse"}
STRUCTURES = {"x": {"a": X, "b": numbers(10, 3)}, "y": {"sum": Y, "kind": LABELS}}
WEIGHTED = {"x": X, "y": Y, "sample_weight": np.arange(10.0)}
TAGS = {"x": WORDS, "y": [numbers(10, 4, 2), numbers(10, 4, 2, seed=1)]}
CASES = {  # a function that makes a model, data, options of compile, relative error
    "plain": (mlp, {"x": X, "y": Y}, MSE, 1e-5),
    "regularizers, a frozen layer, weights": (
        partly_frozen,
        WEIGHTED,
        {**MSE, "weighted_metrics": ["mae"]},
        1e-5,
    ),
    "mixed_bfloat16": (partial(mlp, dtype="mixed_bfloat16"), {"x": X, "y": Y}, MSE, 1e-2),
    "structures": (
        structured,
        STRUCTURES,
        {"loss": LOSSES, "metrics": {"kind": ["accuracy"]}},
        1e-5,
    ),
    "masks": (tagger, TAGS, {"loss": ["mse", "mse"]}, 1e-5),
    "all heads": case_of_heads(*HEADS),
    "one head": case_of_heads("tensorflow_softmax"),
}


@pytest.mark.parametrize(
    ("name", "count", "eager"),
    [
        ("plain", 1, False),
        ("regularizers, a frozen layer, weights", 2, True),
        ("regularizers, a frozen layer, weights", 3, False),
        ("mixed_bfloat16", 2, False),
        ("structures", 3, False),
        ("masks", 2, False),
        ("all heads", 2, True),
        ("all heads", 2, False),
        ("one head", 2, False),
    ],
)
def test_fit_evaluate_and_predict_equal_the_original(towers, name, count, eager):
    make, data, options, rtol = CASES[name]
    results = []
    for wrap in (lambda model: model, lambda model: make_parallel_model(model, towers(count))):
        keras.utils.set_random_seed(7)
        original = make()
        before = original.get_weights()
        model = wrap(original)
        model.compile(keras.optimizers.SGD(0.01), **options, run_eagerly=eager)
        history = model.fit(**data, batch_size=4, shuffle=False, verbose=0).history
        model.run_eagerly = name != "structures"  # most of the time of a case is that of tracing
        scores = model.evaluate(**data, batch_size=4, verbose=0, return_dict=True)
        predictions = model.predict(data["x"], batch_size=4, verbose=0)
        pairs = zip(original.weights, before, strict=True)
        moved = [variable for variable, value in pairs if not np.array_equal(variable, value)]
        assert moved
        assert all(variable.trainable for variable in moved)
        assert (original.layers[0].compute_dtype == "bfloat16") == (name == "mixed_bfloat16")
        if "head" in name:
            assert (tf.nest.flatten(predictions)[0] == 0).mean() > 0.2
        results.append([history, scores, predictions, original.get_weights()])
    tf.nest.assert_same_structure(*results)

    assert_close(results[1], results[0], rtol, rtol)


def test_variables_are_those_of_the_original_and_stay_frozen(towers):
    """Keras trains no layer of a model with trainable=False, even if the layer's own is true."""
    model = mlp(L.Dropout(0.5), L.BatchNormalization())
    parallel = make_parallel_model(model, towers(2))
    for kind in ("weights", "trainable_variables", "non_trainable_variables"):
        assert [id(v) for v in getattr(parallel, kind)] == [id(v) for v in getattr(model, kind)]
    model.trainable = False
    model.layers[-1].trainable = True

    assert parallel.trainable_variables == parallel.trainable_weights == []


def test_train_step_is_on_the_tower_devices(towers):
    parallel = make_parallel_model(mlp(), towers(3))
    parallel.compile("sgd", "mse")
    step = tf.function(parallel.train_step)
    function = step.get_concrete_function((tf.TensorSpec([None, 8]), tf.TensorSpec([None, 1])))
    for tower in towers(3):  # three layers: forward, and backward to weights and inputs
        assert tower_devices(function, tower, "MatMul") == Counter({tower.device: 9})
    assert sum(op.type == "MatMul" for op in function.graph.get_operations()) == 27


class Coder(keras.Model):
    """A subclassed model, whose layers are attributes."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.encoder = L.Dense(3)
        self.decoder = [L.Dense(1)]

    def call(self, x):
        return self.decoder[0](self.encoder(x))


def subclassed():
    model = Coder()
    model(np.zeros((1, 8), "f4"))
    return model


@pytest.mark.parametrize("make", [mlp, subclassed])
def test_files_are_those_of_the_original_which_trains_further(towers, tmp_path, make):
    parallel = make_parallel_model(make(), towers(2))
    parallel.compile("adam", "mse")
    parallel.fit(X, Y, batch_size=5, verbose=0)
    parallel.save(tmp_path / "a.keras")
    keras.saving.save_model(parallel, tmp_path / "b.keras")
    parallel.save_weights(tmp_path / "a.weights.h5")
    keras.saving.save_weights(parallel, tmp_path / "b.weights.h5")
    original = type(parallel.model)
    expected = parallel.model.get_weights()
    for path in (tmp_path / "a.keras", tmp_path / "b.keras"):
        loaded = keras.saving.load_model(path, {"Coder": Coder})
        assert type(loaded) is type(keras.models.clone_model(parallel)) is original
        assert int(loaded.optimizer.iterations) == 2
        assert_close(loaded.get_weights(), expected, 0, 0)
    for name, load in (
        ("a", lambda model, path: model.load_weights(path)),
        ("b", keras.saving.load_weights),
    ):
        for wrap in (lambda model: model, lambda model: make_parallel_model(model, towers(2))):
            fresh = make()
            load(wrap(fresh), tmp_path / f"{name}.weights.h5")
            assert_close(fresh.get_weights(), expected, 0, 0)
    again = [
        model.fit(X, Y, shuffle=False, verbose=0).history["loss"] for model in (loaded, parallel)
    ]

    np.testing.assert_allclose(again[0], again[1], rtol=1e-5)


def test_moving_statistics_are_the_mean_over_the_towers(towers):
    # a batch of 7 as 3 + 2 + 2, then one of 1, which two towers have no example of
    x = numbers(8, 2)
    norm = L.BatchNormalization(momentum=0.9)
    parallel = make_parallel_model(keras.Sequential([keras.Input((2,)), norm]), towers(3))
    parallel.compile("sgd", "mse")
    parallel.fit(x, x, batch_size=7, shuffle=False, verbose=0)
    mean = np.zeros(2)
    variance = np.ones(2)
    for shards in ([x[:3], x[3:5], x[5:7]], [x[7:]]):
        examples = sum(map(len, shards))
        means = sum(len(shard) / examples * shard.mean(0) for shard in shards)
        variances = sum(len(shard) / examples * shard.var(0) for shard in shards)
        mean = 0.9 * mean + 0.1 * means
        variance = 0.9 * variance + 0.1 * variances
    parallel.predict(x, verbose=0)  # which changes none

    np.testing.assert_allclose(norm.moving_mean.numpy(), mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(norm.moving_variance.numpy(), variance, rtol=1e-5)
    assert np.isfinite(norm.get_weights()).all()


def test_towers_draw_different_dropout_and_the_seed_advances_once_a_step(towers):
    def dropout(count):
        model = keras.Sequential([keras.Input((64,)), L.Dropout(0.5, seed=3)])
        return make_parallel_model(model, towers(count))

    ones = tf.ones([6, 64])
    parallel = dropout(2)
    single = dropout(1)
    step = tf.function(lambda: parallel(ones, training=True))
    halves = np.concatenate([step(), step()]).reshape(4, 3, 64)

    assert all(0.25 < (half == 0).mean() < 0.75 for half in halves)
    assert all((one != other).any() for one, other in itertools.combinations(halves, 2))
    np.testing.assert_array_equal(parallel.layers[0].seed_generator.state.numpy(), [3, 2])
    expected = dropout(1).model(ones, training=True)
    np.testing.assert_array_equal(single(ones, training=True), expected)


class Counts(L.Layer):
    """A layer that counts its calls."""

    def build(self, shape):
        self.calls = self.add_weight(
            shape=(), dtype="int32", trainable=False, name="calls", initializer="zeros"
        )

    def call(self, x):
        self.calls.assign_add(1)
        return x


class Applies(L.Layer):
    """A layer that returns a function of its input."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, x):
        return self.function(x)


def two_outputs(function):
    x = keras.Input((8,))
    return keras.Model(x, {"y": L.Dense(3)(x), "extra": Applies(function)(x)})


def overrides(name, value=lambda self, *args, **kwargs: {}):
    """Return a model whose class overrides a method or property of Keras."""
    kind = type("Own", (keras.Sequential,), {name: value})
    return kind([keras.Input((2,)), L.Dense(1)])


def overrides_on_the_instance():
    model = mlp()
    model.compute_loss = lambda **arrays: 0.0
    return model


@pytest.mark.parametrize(
    ("make", "mentions"),
    [
        (partial(overrides, "train_step"), "own.*train_step"),
        (partial(overrides, "compute_metrics"), "own.*compute_metrics"),
        (partial(overrides, "losses", property(lambda self: [])), "own.*losses"),
        (overrides_on_the_instance, "sequential.*compute_loss"),
        (lambda: mlp(L.BatchNormalization(synchronized=True, name="norm")), "norm"),
    ],
)
def test_models_that_towers_would_train_otherwise_are_refused(towers, make, mentions):
    with pytest.raises(ValueError, match=mentions):
        make_parallel_model(make(), towers(2))


@pytest.mark.parametrize(
    ("make", "mentions"),
    [
        (lambda: mlp(Counts()), "/calls"),
        (lambda: mlp(Applies(lambda x: x + keras.random.normal((1,)))), "random generator"),
        (lambda: mlp(L.SpectralNormalization(L.Dense(4))), "kernel"),
        (lambda: two_outputs(lambda x: tf.ones([5, 4])), "output 0 of tower_0"),
        (lambda: two_outputs(tf.reduce_sum), "output 0 of tower_0"),
    ],
)
def test_models_that_towers_cannot_share_are_refused_in_their_first_step(towers, make, mentions):
    """In a graph and eagerly."""
    model = make()
    x = numbers(6, 8)
    model(x)
    parallel = make_parallel_model(model, towers(2))
    before = model.get_weights()
    parallel.compile("sgd")
    for use in (lambda: parallel.fit(x, verbose=0), lambda: parallel(x, training=True)):
        with pytest.raises(ValueError, match=mentions):
            use()

    assert_close(model.get_weights(), before, 0, 0)


def test_xla_cannot_span_towers(towers):
    """Keras asks `supports_jit` of every layer before it compiles for a GPU by itself; without a
    GPU it never does.
    """
    parallel = make_parallel_model(mlp(), towers(2))
    with pytest.warns(UserWarning, match="jit_compile"):
        parallel.compile("sgd", "mse", jit_compile=True)

    assert not parallel.supports_jit
    assert not parallel.jit_compile


# ---- map_on_towers


@pytest.mark.parametrize(("examples", "devices"), [(23, [0, 1, 2]), (15, [0, 1, 2, 0]), (3, [0])])
def test_map_on_towers_keeps_order_with_a_short_last_batch(towers, examples, devices):
    traced_on = []

    def fn(batch):
        x, ids = batch
        traced_on.append(int(tf.identity(x).op.device[-1]))
        return {"norms": tf.norm(x, axis=1), "ids": ids}

    x = numbers(examples, 4)
    dataset = tf.data.Dataset.from_tensor_slices((x, np.arange(examples))).batch(4)
    results = list(map_on_towers(fn, dataset, towers(3)))

    np.testing.assert_array_equal(np.concatenate([r["ids"] for r in results]), np.arange(examples))

    norms = np.concatenate([r["norms"] for r in results])
    np.testing.assert_allclose(norms, np.linalg.norm(x, axis=1), rtol=1e-6)
    assert traced_on == devices


def test_map_on_towers_reads_lazily(towers):
    read = []

    def batches():
        for i in range(1000):
            read.append(i)
            yield np.full([2], i, np.int64)

    dataset = tf.data.Dataset.from_generator(batches, output_signature=tf.TensorSpec([2], tf.int64))
    results = map_on_towers(tf.square, dataset, 4)

    assert [int(next(results)[0]) for _ in range(5)] == [0, 1, 4, 9, 16]
    assert len(read) < 20

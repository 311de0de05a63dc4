from collections import Counter

import keras
import numpy as np
import pytest
import tensorflow as tf

from cifar_towers.towers import make_parallel, make_parallel_model, map_on_towers
from cifar_towers.towers.placement import tower_devices


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def assert_close(results, expected, rtol, atol=1e-5):
    for value, witness in zip(tf.nest.flatten(results), tf.nest.flatten(expected), strict=True):
        np.testing.assert_allclose(value, witness, rtol=rtol, atol=atol)


# ---- make_parallel


def with_gradients(function, *sources):
    """Return the outputs, and the gradients of the sum of their squares with respect to the sources."""
    with tf.GradientTape() as tape:
        tape.watch(sources)
        outputs = function()
        loss = sum(tf.reduce_sum(tf.cast(output, "float32") ** 2) for output in tf.nest.flatten(outputs))
    return outputs, tape.gradient(loss, sources)


def test_outputs_and_gradients_equal_one_device(towers):
    w, b = tf.Variable(numbers(3, 5)), tf.Variable(numbers(5, seed=1))
    batch = {
        "x": tf.constant(numbers(11, 3, seed=2)),
        "more": (np.arange(11, dtype="f4"), tf.constant(numbers(11, seed=3))),
    }
    sources, sizes = (w, b, batch["x"], batch["more"][1]), []

    def fn(batch):
        sizes.append(batch["x"].shape[0])
        hidden = tf.tanh(batch["x"] @ w + b)
        index, scale = batch["more"]
        return {"hidden": hidden, "sums": (tf.reduce_sum(hidden, 1) * scale + index, scale > 0)}

    expected = with_gradients(lambda: fn(batch), *sources)
    sizes.clear()
    eagerly = with_gradients(lambda: make_parallel(fn, towers(4), batch=batch), *sources)
    assert sizes == [3, 3, 3, 2]
    graph = tf.function(lambda: with_gradients(lambda: make_parallel(fn, 4, batch=batch), *sources))
    for result in (eagerly, graph()):
        tf.nest.assert_same_structure(expected, result)
        assert_close(result, expected, 2e-5)


def test_batch_size_unknown_until_the_graph_runs(towers):
    w, traces = tf.Variable(numbers(3, 2)), []

    @tf.function(input_signature=[tf.TensorSpec([None, 3])])
    def parallel(x):
        traces.append(None)
        return with_gradients(lambda: make_parallel(lambda x: tf.square(x @ w), towers(4), x=x), x, w)

    for examples in range(1, 10):
        x = tf.constant(numbers(examples, 3, seed=examples))
        expected, gradients = with_gradients(lambda x=x: tf.square(x @ w), x, w)
        result, parallel_gradients = parallel(x)
        np.testing.assert_allclose(result, expected, rtol=1e-5)
        assert_close(parallel_gradients, gradients, 1e-4)
    assert len(traces) == 1


def test_gradients_of_complex_tensors_equal_one_device(towers):
    w, x = tf.Variable(numbers(3, 4)), tf.constant(numbers(5, 3, seed=1))
    z = tf.complex(numbers(5, 4, seed=2), numbers(5, 4, seed=3))

    def fn(x, z):
        return tf.signal.fft(tf.cast(x @ w, "complex64") * z)

    def loss_gradients(run):
        with tf.GradientTape() as tape:
            tape.watch((x, z))
            loss = tf.reduce_sum(tf.abs(run()) ** 2 * [1.0, 2.0, 3.0, 4.0])
        return tape.gradient(loss, (w, x, z))

    expected = loss_gradients(lambda: fn(x, z))
    assert_close(loss_gradients(lambda: make_parallel(fn, towers(2), x=x, z=z)), expected, 1e-5)
    graph = tf.function(lambda: loss_gradients(lambda: make_parallel(fn, towers(2), x=x, z=z)))
    assert_close(graph(), expected, 1e-5)


@pytest.mark.parametrize("fn", [lambda x: (x, {"loss": x[0]}), lambda x: [x, x[:1]]])
def test_an_output_without_a_row_for_each_example_is_refused(towers, fn):
    with pytest.raises(ValueError, match=r"^output 1 of tower_0 has the shape .* each example of \(2,\)$"):
        make_parallel(fn, towers(2), x=tf.ones(4))


def test_towers_may_be_more_than_examples(towers):
    for x in ([-1.0, 2, -3], [-1.0]):
        np.testing.assert_array_equal(make_parallel(tf.abs, 2, x=tf.constant(x)), np.abs(x))


def test_batches_of_unknown_size_are_checked_when_the_graph_runs(towers):
    def graph(fn):
        return tf.function(lambda x: make_parallel(fn, towers(2), x=x), input_signature=[tf.TensorSpec([None])])

    with pytest.raises(ValueError, match="output 0 of tower_0 has the shape"):
        graph(lambda x: tf.reduce_sum(x, keepdims=True)).get_concrete_function()
    twice = graph(lambda x: {"twice": tf.concat([x, x], 0)})
    with pytest.raises(tf.errors.InvalidArgumentError, match="of tower_. has not one row per example"):
        twice(tf.ones(4))
    add = tf.function(lambda x, y: make_parallel(tf.add, towers(2), x=x, y=y), [tf.TensorSpec([None])] * 2)
    np.testing.assert_array_equal(add(tf.ones(3), tf.ones(3)), [2, 2, 2])
    with pytest.raises(tf.errors.InvalidArgumentError, match="axis 0"):
        add(tf.ones(4), tf.ones(3))


# ---- make_parallel_model


def mlp(*extra, **options):
    keras.utils.set_random_seed(7)
    first, second = (keras.layers.Dense(width, "relu", **options) for width in (6, 4))
    return keras.Sequential([keras.Input((8,)), first, *extra, second, keras.layers.Dense(1)])


def trained(model, x, y, epochs=2):
    """Train the model and return the loss of each step."""
    losses = []
    model.compile(keras.optimizers.Adam(0.01), "mse")
    record = keras.callbacks.LambdaCallback(on_train_batch_end=lambda _, logs: losses.append(logs["loss"]))
    model.fit(x, y, batch_size=4, epochs=epochs, shuffle=False, verbose=0, callbacks=[record])
    return losses


@pytest.fixture
def data():
    x = numbers(10, 8)  # batches of 4, 4 and 2
    return x, np.sin(x).sum(1, keepdims=True)


@pytest.mark.parametrize(
    ("count", "frozen", "options", "rtol"),
    [
        (1, 0, {}, 1e-5),
        (3, 1, {"kernel_regularizer": "l2", "activity_regularizer": "l2"}, 1e-5),
        (2, 0, {"dtype": "mixed_bfloat16"}, 1e-2),
    ],
    ids=["one tower", "regularizers and a frozen layer", "mixed_bfloat16"],
)
def test_fit_evaluate_and_predict_equal_the_original(towers, data, count, frozen, options, rtol):
    original, wrapped = mlp(**options), mlp(**options)
    assert wrapped.layers[0].compute_dtype == ("bfloat16" if "dtype" in options else "float32")
    for layer in original.layers[:frozen] + wrapped.layers[:frozen]:
        layer.trainable = False
    parallel, before = make_parallel_model(wrapped, towers(count)), wrapped.layers[0].kernel.numpy()
    np.testing.assert_allclose(trained(parallel, *data), trained(original, *data), rtol=rtol)
    assert np.array_equal(wrapped.layers[0].kernel.numpy(), before) == bool(frozen)
    losses = [model.evaluate(*data, 4, verbose=0) for model in (parallel, original)]
    np.testing.assert_allclose(*losses, rtol=rtol)
    for x in (data[0], data[0][:1]):
        assert_close(parallel.predict(x, batch_size=4, verbose=0), original.predict(x, verbose=0), 10 * rtol, rtol)
        assert_close(parallel(x), original(x), 10 * rtol, rtol)
    assert_close(wrapped.get_weights(), original.get_weights(), 10 * rtol, rtol)


def test_variables_are_shared_with_the_original(towers, capsys):
    model = mlp(keras.layers.Dropout(0.5), keras.layers.BatchNormalization())
    parallel = make_parallel_model(model, towers(2))
    assert parallel.count_params() == model.count_params()
    for kind in ("weights", "trainable_variables", "non_trainable_variables"):
        assert [id(v) for v in getattr(parallel, kind)] == [id(v) for v in getattr(model, kind)]
    parallel.summary(print_fn=print)
    assert "batch_normalization" in capsys.readouterr().out


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
        self.encoder, self.decoder = keras.layers.Dense(3), [keras.layers.Dense(1)]

    def call(self, x):
        return self.decoder[0](self.encoder(x))


def functional():
    x = keras.Input((8,))
    return keras.Model(x, keras.layers.Dense(1)(keras.layers.BatchNormalization()(x)))


def subclassed():
    model = Coder()
    model(np.zeros((1, 8), "f4"))
    return model


@pytest.mark.parametrize("make", [mlp, functional, subclassed])
def test_files_are_those_of_the_original_which_trains_further(towers, data, tmp_path, make):
    parallel, last = make_parallel_model(make(), towers(2)), tmp_path / "last.keras"
    parallel.compile("adam", "mse")
    parallel.fit(*data, batch_size=5, verbose=0, callbacks=[keras.callbacks.ModelCheckpoint(last)])
    parallel.save(tmp_path / "a.keras")
    keras.saving.save_model(parallel, tmp_path / "b.keras")
    parallel.save_weights(tmp_path / "a.weights.h5")
    keras.saving.save_weights(parallel, tmp_path / "b.weights.h5")
    original, expected = type(parallel.model), parallel.model.get_weights()
    for path in (last, tmp_path / "a.keras", tmp_path / "b.keras"):
        loaded = keras.saving.load_model(path, {"Coder": Coder})
        assert type(loaded) is original
        assert int(loaded.optimizer.iterations) == 2
        assert_close(loaded.get_weights(), expected, 0, 0)
    for name, load in (("a", lambda model, path: model.load_weights(path)), ("b", keras.saving.load_weights)):
        for wrap in (lambda model: model, lambda model: make_parallel_model(model, towers(2))):
            fresh = make()
            load(wrap(fresh), tmp_path / f"{name}.weights.h5")
            assert_close(fresh.get_weights(), expected, 0, 0)
    clone = keras.models.clone_model(parallel)
    assert type(clone) is original
    if make is not functional:  # its batch norm normalizes by shard
        again = [m.fit(*data, batch_size=4, shuffle=False, verbose=0).history["loss"] for m in (loaded, parallel)]
        np.testing.assert_allclose(again[0], again[1], rtol=1e-5)


def test_structured_inputs_and_outputs(towers, data):
    x = {"a": data[0], "b": numbers(10, 3)}
    y = {"sum": data[1], "kind": np.arange(10) % 2}
    losses = {"kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "sum": "mse"}
    histories = []
    for wrap in (lambda model: model, lambda model: make_parallel_model(model, towers(3))):
        keras.utils.set_random_seed(7)
        inputs = {"a": keras.Input((8,), name="a"), "b": keras.Input((3,), name="b")}
        hidden = keras.layers.Concatenate()(list(inputs.values()))
        outputs = {name: keras.layers.Dense(size, name=name)(hidden) for name, size in (("sum", 1), ("kind", 2))}
        model = wrap(keras.Model(inputs, outputs))
        model.compile("sgd", losses, metrics={"kind": ["accuracy"]})
        histories.append(model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0).history)
    assert histories[0].keys() == histories[1].keys()
    assert_close(histories[1], histories[0], 1e-5, atol=0)


HEADS = {  # name: activation and loss
    "softmax_of_labels": ("softmax", "sparse_categorical_crossentropy"),
    "softmax": ("softmax", "categorical_crossentropy"),
    "sigmoid": ("sigmoid", "binary_crossentropy"),
    "tensorflow_softmax": (tf.nn.softmax, "categorical_crossentropy"),
    "tensorflow_sigmoid": (tf.nn.sigmoid, "binary_crossentropy"),
    "softmax_as_sigmoid": (tf.nn.softmax, "binary_crossentropy"),  # Keras takes no logits here
    "none": (None, "mse"),
}


@pytest.mark.parametrize(
    ("count", "names", "eager"),
    [
        (1, ["softmax_of_labels"], False),
        (2, ["sigmoid"], True),
        (3, ["tensorflow_softmax"], False),
        (1, list(HEADS), False),
        (3, list(HEADS), False),
        (2, list(HEADS), True),
    ],
)
def test_probabilities_of_zero_are_trained_like_the_original(towers, count, names, eager):
    """Keras's cross entropies take the logits of such heads, so that the gradient is not lost."""
    x, labels = 1000 * numbers(10, 8), np.arange(10) % 3
    y = [labels if name == "softmax_of_labels" else np.eye(3)[labels] for name in names]
    losses = [HEADS[name][1] for name in names]
    results = []
    for wrap in (lambda model: model, lambda model: make_parallel_model(model, towers(count))):
        keras.utils.set_random_seed(7)
        inputs = keras.Input((8,))
        outputs = [keras.layers.Dense(3, HEADS[name][0], name=name)(inputs) for name in names]
        model = wrap(keras.Model(inputs, outputs if len(names) > 1 else outputs[0]))
        model.compile(keras.optimizers.SGD(1e-6), losses if len(names) > 1 else losses[0], run_eagerly=eager)
        history = model.fit(x, y if len(names) > 1 else y[0], batch_size=4, epochs=2, shuffle=False, verbose=0).history
        results.append([history, model.predict(x, verbose=0), model.get_weights()])
    assert results[1][0].keys() == results[0][0].keys()  # with several outputs, a loss of each
    assert_close(results[1], results[0], 1e-4)
    assert (tf.nest.flatten(results[0][1])[0] == 0).mean() > 0.2


@pytest.mark.parametrize("activation", [None, tf.nn.softmax])
def test_masks_reach_the_loss_and_gradients_of_an_embedding_its_rows(towers, activation):
    def tagger():
        keras.utils.set_random_seed(7)
        embedding = keras.layers.Embedding(5, 3, mask_zero=True)
        return keras.Sequential([keras.Input((4,), dtype="int32"), embedding, keras.layers.Dense(2, activation)])

    ids, y = np.array([[1, 2, 0, 0], [3, 0, 0, 0], [4, 4, 4, 4], [1, 0, 0, 0], [2, 2, 2, 0]]), numbers(5, 4, 2)
    original = trained(tagger(), ids, y)
    np.testing.assert_allclose(trained(make_parallel_model(tagger(), towers(2)), ids, y), original, rtol=1e-5)


def test_moving_statistics_are_the_mean_over_the_towers(towers):
    x = numbers(8, 2)  # a batch of 7 as 3 + 2 + 2, then one of 1, which two towers have no example of
    norm = keras.layers.BatchNormalization(momentum=0.9)
    parallel = make_parallel_model(keras.Sequential([keras.Input((2,)), norm]), towers(3))
    parallel.compile("sgd", "mse")
    parallel.fit(x, x, batch_size=7, shuffle=False, verbose=0)
    mean, variance = np.zeros(2), np.ones(2)
    for shards in ([x[:3], x[3:5], x[5:7]], [x[7:]]):
        weights = [len(shard) / sum(map(len, shards)) for shard in shards]
        mean = 0.9 * mean + 0.1 * sum(w * shard.mean(0) for w, shard in zip(weights, shards, strict=True))
        variance = 0.9 * variance + 0.1 * sum(w * shard.var(0) for w, shard in zip(weights, shards, strict=True))
    np.testing.assert_allclose(norm.moving_mean.numpy(), mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(norm.moving_variance.numpy(), variance, rtol=1e-5)
    assert np.isfinite(norm.get_weights()).all()
    before = norm.moving_mean.numpy()
    parallel.predict(x, verbose=0)
    np.testing.assert_array_equal(norm.moving_mean.numpy(), before)


def test_towers_draw_different_dropout_and_the_seed_advances_once_a_step(towers):
    def dropout():
        return keras.Sequential([keras.Input((64,)), keras.layers.Dropout(0.5, seed=3)])

    ones = tf.ones([6, 64])
    model = dropout()
    parallel = make_parallel_model(model, towers(2))
    step = tf.function(lambda: parallel(ones, training=True))
    first, second = step().numpy(), step().numpy()
    halves = [first[:3], first[3:], second[:3], second[3:]]
    assert all(0.25 < (half == 0).mean() < 0.75 for half in halves)
    assert all((a != b).any() for i, a in enumerate(halves) for b in halves[:i])
    np.testing.assert_array_equal(model.layers[0].seed_generator.state.numpy(), [3, 2])
    single, original = make_parallel_model(dropout(), towers(1)), dropout()
    np.testing.assert_array_equal(single(ones, training=True), original(ones, training=True))


class WritesState(keras.layers.Layer):
    """A layer that writes a variable in its call: an `integer`, a `trained` or a `foreign` one."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def build(self, shape):
        self.integer = self.add_weight(shape=(), dtype="int32", trainable=False, name="calls", initializer="zeros")
        self.trained = self.add_weight(shape=(), name="scale", initializer="ones")

    def call(self, x):
        if self.kind == "integer":
            self.integer.assign_add(1)
        if self.kind == "trained":
            self.trained.assign(self.trained / 2)
        return x + keras.random.normal((1,)) if self.kind == "foreign" else x


class Applies(keras.layers.Layer):
    """A layer that returns a function of its input."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, x):
        return self.function(x)


def two_outputs(function):
    x = keras.Input((6, 4))
    return keras.Model(x, {"y": keras.layers.Dense(3)(x), "extra": Applies(function)(x)})


class Counts(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.mean = keras.metrics.Mean()

    def call(self, x):
        self.mean.update_state(x)
        return x


class WithTable(keras.Model):
    """A subclassed model, which returns a table of as many rows as a shard of its test."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        return {"y": self.dense(x), "table": tf.ones([2, 4])}


def overrides(name, value=None):
    """Return a model whose class overrides a method or property of Keras."""
    kind = type("Own", (keras.Sequential,), {name: value or (lambda self, *args, **kwargs: {})})
    return kind([keras.Input((2,)), keras.layers.Dense(1)])


def compute_loss_of_instance():
    model = mlp()
    model.compute_loss = lambda **arrays: 0.0
    return model


class CustomStep(keras.Sequential):
    def train_step(self, data):
        return {}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CustomStep([keras.Input((2,)), keras.layers.Dense(1)]), "model 'custom_step.*' overrides train_step"),
        (lambda: mlp(keras.layers.BatchNormalization(synchronized=True, name="norm")), "layer 'norm' is synchronized"),
        (lambda: overrides("compute_metrics"), "model 'own.*' overrides compute_metrics"),
        (lambda: overrides("losses", property(lambda self: [])), "model 'own.*' overrides losses"),
        (compute_loss_of_instance, "model 'sequential.*' overrides compute_loss"),
    ],
)
def test_make_parallel_model_rejects(towers, make, message):
    with pytest.raises(ValueError, match=message):
        make_parallel_model(make(), towers(2))


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(
    ("make", "shape", "message"),
    [
        (lambda: mlp(WritesState("integer")), (8,), "call writes .*/calls"),
        (lambda: mlp(WritesState("trained")), (8,), "call writes .*/scale"),
        (lambda: mlp(WritesState("foreign")), (8,), "not its own.* random generator"),
        (lambda: mlp(keras.layers.SpectralNormalization(keras.layers.Dense(4))), (8,), "call writes .*kernel"),
        (lambda: mlp(Counts()), (8,), "not its own, such as a metric"),
        (lambda: two_outputs(lambda x: tf.ones([5, 4])), (6, 4), "output 0 of tower_0 has the shape"),
        (lambda: two_outputs(lambda x: tf.reshape(tf.reduce_sum(x), [1])), (6, 4), "output 0 of tower_0 has the shape"),
        (lambda: two_outputs(tf.reduce_sum), (6, 4), "output 0 of tower_0 has the shape"),
        (WithTable, (8,), r"output 0 of tower_0 has the shape \(2, 4\)"),
    ],
)
def test_models_that_towers_cannot_share_are_refused_in_their_first_step(towers, make, shape, message, eager):
    model, x = make(), numbers(6, *shape)
    model(x)
    parallel, before = make_parallel_model(model, towers(2)), model.get_weights()
    parallel.compile("sgd", run_eagerly=eager)
    for use in (lambda: parallel.fit(x, verbose=0), lambda: parallel(x, training=True)):
        with pytest.raises(ValueError, match=message):
            use()
    assert_close(model.get_weights(), before, 0, 0)


def test_rows_that_only_the_graph_knows_are_counted_there(towers):
    layers = keras.layers.Dense(3), Applies(lambda x: tf.reshape(x, [-1, 3]))
    model = keras.Sequential([keras.Input((6, 4)), *layers])
    graph = tf.function(make_parallel_model(model, towers(2)), [tf.TensorSpec([None, 6, 4])])
    with pytest.raises(tf.errors.InvalidArgumentError, match="of tower_. has not one row per example"):
        graph(numbers(7, 6, 4))


def test_options_of_compile_and_fit_equal_the_original(towers, data):
    x, y = data
    weights = np.arange(10.0)
    for compile_options, fit_options in (
        ({"steps_per_execution": 2, "weighted_metrics": ["mae"]}, {"sample_weight": weights, "y": y}),
        ({"run_eagerly": True, "metrics": ["mae"]}, {"class_weight": {0: 1.0, 1: 3.0}, "y": (y > 0).astype("i4")}),
    ):
        results = []
        for wrap in (lambda model: model, lambda model: make_parallel_model(model, towers(2))):
            model = wrap(mlp(kernel_constraint="unit_norm"))
            optimizer = keras.optimizers.SGD(0.01, gradient_accumulation_steps=2)
            model.compile(keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=64), "mse", **compile_options)
            history = model.fit(x, batch_size=4, shuffle=False, verbose=0, **fit_options).history
            results.append([history, model.evaluate(x, y, 4, verbose=0)])
        assert len(results[0][0]) == 2
        assert_close(results[1], results[0], 1e-5, 0)


def test_strings_and_numbers_as_inputs(towers):
    inputs = {"word": keras.Input((1,), dtype="string", name="word"), "x": keras.Input((1,), name="x")}
    rows = keras.layers.StringLookup(vocabulary=["a", "b"], output_mode="one_hot")(inputs["word"])
    model = keras.Model(inputs, keras.layers.Concatenate()([rows, inputs["x"]]))
    batch = {"word": tf.constant([["b"], ["?"], ["a"]]), "x": tf.constant([[5.0], [6.0], [7.0]])}
    result = make_parallel_model(model, towers(2)).predict(batch, verbose=0)
    np.testing.assert_array_equal(result, [[0, 0, 1, 5], [1, 0, 0, 6], [0, 1, 0, 7]])


def test_a_frozen_model_stays_frozen(towers, data):
    """Keras trains no layer of a model with trainable=False, even if the layer's own is true."""
    for model in (frozen := mlp(), make_parallel_model(frozen, towers(2))):
        frozen.trainable = False
        frozen.layers[-1].trainable = True
        assert model.trainable_variables == model.trainable_weights == []


def test_xla_cannot_span_towers(towers):
    """Keras asks `supports_jit` of every layer before it compiles for a GPU by itself; without a GPU it never does."""
    parallel = make_parallel_model(mlp(), towers(2))
    with pytest.warns(UserWarning, match="doesn't support `jit_compile=True`"):
        parallel.compile("sgd", "mse", jit_compile=True)
    assert not parallel.supports_jit and not parallel.jit_compile


# ---- map_on_towers


def test_map_on_towers_keeps_order_with_a_short_last_batch(towers):
    traced = []

    def fn(batch):
        x, ids = batch
        traced.append(tf.identity(x).op.device[-5:])
        return {"norms": tf.norm(x, axis=1), "ids": ids}

    x = numbers(23, 4)  # batches of 4, 4, 4 | 4, 4, 3 on three towers
    for examples, tail in ((23, []), (15, ["CPU:0"]), (3, ["CPU:0"])):
        traced.clear()
        dataset = tf.data.Dataset.from_tensor_slices((x[:examples], np.arange(examples))).batch(4)
        results = list(map_on_towers(fn, dataset, towers(3)))
        assert [len(r["ids"]) for r in results] == [4] * (examples // 4) + [3]
        np.testing.assert_array_equal(np.concatenate([r["ids"] for r in results]), np.arange(examples))
        norms = np.concatenate([r["norms"] for r in results])
        np.testing.assert_allclose(norms, np.linalg.norm(x[:examples], axis=1), rtol=1e-6)
        full = ["CPU:0", "CPU:1", "CPU:2"] if examples > 8 else []
        assert traced == full + tail


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


def test_map_on_towers_raises_errors_of_the_function(towers):
    def fn(x):
        with tf.control_dependencies([tf.debugging.assert_less(x, np.int64(5), "too large a number")]):
            return tf.identity(x)

    results = map_on_towers(fn, tf.data.Dataset.range(8).batch(2), towers(2))
    assert [list(next(results).numpy()) for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(tf.errors.InvalidArgumentError, match="too large a number"):
        next(results)


@pytest.mark.parametrize("num_towers", [0, -1, []])
def test_no_towers_are_refused(towers, num_towers):
    with pytest.raises(ValueError, match="no number of towers to run on"):
        make_parallel(tf.abs, num_towers, x=tf.ones(2))

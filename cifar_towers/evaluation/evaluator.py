"""One pass over a split, every example exactly once, shared by the towers."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from cifar_towers.data.augment import Augmentation, tta_views
from cifar_towers.data.dataset import Split, chunks
from cifar_towers.models.user_model import graph_node
from cifar_towers.multi_worker.coordination import Coordinator, single_worker
from cifar_towers.towers import Tower, run_on_towers, split_batch
from cifar_towers.towers.placement import HOST

AT_ONCE = 2000 * 32 * 32  # pixels of a batch
MOST_MISTAKES = 32
EMBEDDED = 1000  # examples whose features are kept


class Mistakes(NamedTuple):
    """The wrong predictions that were most sure of themselves, the surest first: m of them, at most 32."""

    examples: np.ndarray  # [m] their places in the split
    predicted: np.ndarray  # [m] the classes they were taken for
    confidence: np.ndarray  # [m] the probabilities of these


class Score(NamedTuple):
    """What a pass says at one level of test-time augmentation."""

    count: int
    correct: int
    loss: float  # mean cross entropy, without label smoothing
    confusion: np.ndarray  # [C, C] examples of class (row) taken for class (column)
    mistakes: Mistakes
    probabilities: np.ndarray  # [n, C] float32
    features: np.ndarray | None = None  # [at most 1,000, d] what the last layer makes of the first examples' own view

    @property
    def accuracy(self) -> float:
        """correct / count."""
        return self.correct / self.count

    def interval(self) -> tuple[float, float]:
        """95 % interval of the accuracy, by Wilson's score (E. B. Wilson, JASA 1927)."""
        z, n, p = 1.959964, self.count, self.accuracy
        centre, spread = p + z * z / (2 * n), z * (p * (1 - p) / n + z * z / (4 * n * n)) ** 0.5
        return (centre - spread) / (1 + z * z / n), (centre + spread) / (1 + z * z / n)

    def per_class(self) -> np.ndarray:
        """[C] accuracy on each class; not a number for a class without examples."""
        with np.errstate(invalid="ignore"):
            return np.diag(self.confusion) / self.confusion.sum(1)


def make_classifier(
    model: keras.Model, towers: Sequence[Tower], augmentation: Augmentation, team: Coordinator | None = None
) -> Callable:
    """A function (images, weights, statistics, tta) -> (plain logits [n, C], those of test-time augmentation, features
    [at most 1,000, d] of the first images' own view, d = 0 where the net gives none) for [n, S, S, 3] uint8 images.

    weights and statistics are the model's trainable and other variables, or averages of them. The workers of a `team`
    call it together; each classifies its share, and all have the whole.
    """
    team = team or single_worker()
    call = _with_features(model)

    def on_tower(tta, weights, statistics, tower, shard):
        images = augmentation.evaluate(shard[0])
        plain, features, augmented = None, None, 0.0
        for share, view in tta_views(images, tta):
            logits, own = call(weights, statistics, view)
            if plain is None:  # the first view is the image itself
                plain, features = logits, own
            augmented += share * logits
        return plain, augmented, features

    @tf.function(autograph=False)
    def on_towers(images, weights, statistics, tta: int):
        shards = split_batch([images], towers)
        results = run_on_towers(lambda *args: on_tower(tta, weights, statistics, *args), towers, shards)
        return [tf.concat(level, 0) for level in zip(*results, strict=True)]

    def classify(images: np.ndarray, weights, statistics, tta: int = 0) -> list[np.ndarray]:
        shares = team.size if len(images) >= team.size else 1
        share = team.index if shares > 1 else 0
        mine = images[len(images) * share // shares : len(images) * (share + 1) // shares]
        # a traced function takes one mirrored variable for another of its shape, so it is given values
        weights, statistics = ([tf.convert_to_tensor(v) for v in values] for values in (weights, statistics))
        found, wanted = [], EMBEDDED
        for batch in _even_batches(mine, len(towers)):
            plain, augmented, features = on_towers(batch, weights, statistics, tta)
            found.append((plain, augmented, features[:wanted]))  # whose other features are let go
            wanted = max(0, wanted - len(batch))
        found = [np.concatenate(part)[: len(mine)] for part in zip(*found, strict=True)]
        plain, augmented, features = (np.concatenate(p) for p in zip(*team.gather(found)[:shares], strict=True))
        return [plain, augmented, features[:EMBEDDED]]

    return classify


def make_evaluator(
    model: keras.Model, towers: Sequence[Tower], augmentation: Augmentation, team: Coordinator | None = None
) -> Callable:
    """A function (split, weights, statistics, tta) -> {0: score, tta: score}, from one pass of the largest tta, shared
    by the workers of a `team`."""
    classify = make_classifier(model, towers, augmentation, team)

    def evaluate(split: Split, weights, statistics, tta: int = 0) -> dict[int, Score]:
        plain, augmented, features = classify(split.images, weights, statistics, tta)
        scores = {0: score(split.labels, plain), tta: score(split.labels, augmented)}
        features = features if features.shape[1] else None
        return {level: one._replace(features=features) for level, one in scores.items()}

    return evaluate


def _with_features(model: keras.Model) -> Callable:
    """A function (weights, statistics, images) -> (logits, what enters the last layer that has weights [B, d]), whose
    second part has d = 0 where that layer is itself a model."""
    head = [layer for layer in model.layers if layer.weights][-1]
    whole = None
    if not isinstance(head, keras.Model):
        features = keras.layers.Flatten(name="features_before_last_layer")(graph_node(model, head).input_tensors[0])
        whole = keras.Model(model.input, [model.output, features])

    def call(weights, statistics, images):
        found, _ = (whole or model).stateless_call(weights, statistics, images, training=False)
        logits, features = found if whole else (found, tf.zeros([tf.shape(found)[0], 0]))
        return tf.cast(logits, tf.float32), tf.cast(features, tf.float32)

    return call


def softmax(logits: np.ndarray) -> np.ndarray:
    """[n, C] logits -> [n, C] probabilities, float64."""
    shares = np.exp(logits.astype(np.float64) - logits.max(1, keepdims=True))
    return shares / shares.sum(1, keepdims=True)


def score(labels: np.ndarray, logits: np.ndarray) -> Score:
    """Counts labels [n] against logits [n, C]."""
    predicted, classes = logits.argmax(1), logits.shape[1]
    confusion = np.bincount(labels * classes + predicted, minlength=classes**2)
    probabilities = softmax(logits)
    sure = probabilities.max(1)
    behind = logits.max(1).astype(np.float64) - logits[np.arange(len(labels)), labels]
    losses = behind - np.log(sure)  # finite also where the probability of the label is 0 in float64
    right = int((predicted == labels).sum())
    wrong = np.flatnonzero(predicted != labels)
    surest = wrong[np.argsort(-sure[wrong], kind="stable")][:MOST_MISTAKES]
    mistakes = Mistakes(surest, predicted[surest], sure[surest])
    confusion = confusion.reshape(classes, classes)
    return Score(len(labels), right, float(losses.mean()), confusion, mistakes, probabilities.astype(np.float32))


def _even_batches(images: np.ndarray, towers: int):
    """Batches of one size that all towers share evenly; the last is filled up with images whose logits are dropped."""
    size = len(next(chunks(images, AT_ONCE)))
    size = -(-size // towers) * towers
    for start in range(0, len(images), size):
        batch = images[start : start + size]
        filler = np.zeros((size - len(batch), *batch.shape[1:]), batch.dtype)
        with tf.device(HOST):
            yield tf.constant(np.concatenate([batch, filler]) if len(filler) else batch)

"""The result of a pass over a split: accuracy, loss, calibration, confusion, and the most confident mistakes."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cifar_towers.errors import count

MAX_MISTAKES = 32
NUM_BINS = 15  # equal bins of the confidence, the highest probability of an image (arXiv 1706.04599)
MAX_NEWTON_STEPS = 100  # about 5 are taken
NO_TEMPERATURE = "none of the predictions is wrong, or the logits tell nothing about the classes"


class Score:
    """The scores of logits [n, C] against labels [n]: of one split, with one set of weights, at one level of TTA.

    Args:
      logits: with test-time augmentation (TTA), the means over the views.
    """

    def __init__(self, labels: np.ndarray, logits: np.ndarray):
        self.labels, self.logits = labels, logits
        probabilities, predicted, num_classes = softmax(logits), logits.argmax(1), logits.shape[1]
        self.probabilities = probabilities.astype(np.float32)  # [n, C]
        self.count, self.correct = len(labels), int((predicted == labels).sum())
        self.accuracy = self.correct / self.count
        counts = np.bincount(labels * num_classes + predicted, minlength=num_classes**2)
        self.confusion = counts.reshape(num_classes, num_classes)  # examples of class (row) predicted as class (column)
        confidence = probabilities.max(1)
        margin = logits.max(1).astype(np.float64) - logits[np.arange(len(labels)), labels]
        losses = margin - np.log(confidence)  # finite even where the label's probability is 0 in float64
        self.loss = float(losses.mean())  # cross entropy without label smoothing: the negative log likelihood (NLL)
        wrong = np.flatnonzero(predicted != labels)
        self.mistakes = wrong[np.argsort(-confidence[wrong], kind="stable")][:MAX_MISTAKES]  # the most confident first
        bins = np.digitize(confidence, np.arange(1, NUM_BINS) / NUM_BINS, right=True)  # each has its upper edge
        sums = [np.bincount(bins, weights, NUM_BINS) for weights in (None, predicted == labels, confidence)]
        self.reliability = np.stack(sums)  # [3, 15] images, correct predictions and sum of the confidences in each bin
        # The expected calibration error is the mean over the images of |accuracy - mean confidence| of their bins.
        self.ece = float(np.abs(sums[1] - sums[2]).sum()) / self.count

    def record(self, held_out: "Score | None" = None) -> dict[str, Any]:
        """Return accuracy, loss and calibration as in result.json. For `held_out` see `scale_temperature`."""
        values = {"count": self.count, "accuracy": self.accuracy, "loss": self.loss, "ece": self.ece}
        values["reliability"] = self.reliability.tolist()
        return values | {"temperature_scaling": scale_temperature(self, held_out)}

    def per_class(self) -> np.ndarray:
        """Return [C], the accuracy on each class; NaN for a class without examples."""
        with np.errstate(invalid="ignore"):
            return np.diag(self.confusion) / self.confusion.sum(1)


class Evaluation(NamedTuple):
    """One score of a run, on a split, with `raw` or `ema` weights, at a level of test-time augmentation."""

    split: str
    weights: str
    tta: int
    score: Score


def softmax(logits: np.ndarray) -> np.ndarray:
    """Return the probabilities of [n, C] logits, as [n, C] float64."""
    exponentials = np.exp(logits.astype(np.float64) - logits.max(1, keepdims=True))
    return exponentials / exponentials.sum(1, keepdims=True)


def scale_temperature(score: Score, held_out: Score | None = None) -> dict[str, Any]:
    """Return the temperature, and loss (NLL) and ECE of logits divided by it; None where there is no temperature.

    The temperature is fitted on `held_out`, the score of other images with the same weights and views. Without it, the
    images are halved at random, always in the same way, and each half has the temperature of the other half. Source:
    C. Guo et al., arXiv 1706.04599.
    """
    labels, logits, part = score.labels, score.logits, np.zeros(score.count, int)
    if held_out:
        fitted_on, temperatures = "validation images", [fit_temperature(held_out.labels, held_out.logits)]
    else:
        fitted_on = "the other half of the images"
        part = np.random.Generator(np.random.Philox(key=0)).permutation(score.count) % 2
        temperatures = [fit_temperature(labels[part != half], logits[part != half]) for half in (0, 1)]
    record = {"temperatures": temperatures, "fitted_on": fitted_on}
    if not all(temperatures):
        return record | {"loss": None, "ece": None}
    scaled = Score(labels, logits / np.array(temperatures)[part, None])
    return record | {"loss": scaled.loss, "ece": scaled.ece}


def fit_temperature(labels: np.ndarray, logits: np.ndarray) -> float | None:
    """Return the temperature T that minimizes the loss of the logits [n, C] / T, which is convex in 1 / T.

    Return None if there is no minimum: all predictions are correct (the lower T, the better), the logits tell nothing
    about the labels (the higher, the better), or a logit is not finite.
    """
    margins = logits.astype(np.float64) - logits[np.arange(len(labels)), labels][:, None]
    slopes = margins.mean(1).sum(), margins.max(1).sum()  # where 1 / T is zero and infinity
    if not (np.isfinite(slopes).all() and slopes[0] < 0 < slopes[1]):
        return None
    low, high, inverse = 0.0, np.inf, 1.0
    for _ in range(MAX_NEWTON_STEPS):
        probabilities = softmax(inverse * margins)
        means = (probabilities * margins).sum(1)
        slope, curvature = means.sum(), ((probabilities * margins**2).sum(1) - means**2).sum()
        low, high = (low, inverse) if slope > 0 else (inverse, high)
        newton = inverse - slope / max(curvature, 1e-100)
        if abs(newton - inverse) <= 1e-10 * inverse:
            break
        inverse = newton if low < newton < high else min((low + high) / 2, 2 * inverse)
    return float(1 / inverse)


def wilson_interval(share: float, count: int) -> tuple[float, float]:
    """Return the 95 % confidence interval, inside [0, 1], of a share of `count` examples (E. B. Wilson, JASA 1927)."""
    z = 1.959964
    center, half_width = share + z * z / (2 * count), z * (share * (1 - share) / count + (z / (2 * count)) ** 2) ** 0.5
    low, high = (center - half_width) / (1 + z * z / count), (center + half_width) / (1 + z * z / count)
    return max(low, 0.0), min(high, 1.0)  # against rounding


def reported_score(records: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the record that a run reports, of one evaluation's records as in result.json; None if there are none.

    The record is that of the test set if it was evaluated, of the averaged weights if the run keeps an average, and of
    the highest level of test-time augmentation. The accuracy has no influence on the choice.
    """
    return max(records, key=lambda r: (r["split"] == "test", r["weights"] == "ema", r["tta"] or 0), default=None)


def score_name(record: Mapping[str, Any]) -> str:
    """Return the split, weights and level of test-time augmentation of a score, as `test, raw weights, TTA 2`."""
    return f"{record['split']}, {record['weights']} weights, " + (f"TTA {record['tta']}" if record["tta"] else "no TTA")


def score_tag(split: str, weights: str, tta: int, **_) -> str:
    """Return the end of the tags of a score in TensorBoard, as `test/ema_tta2`."""
    return f"{split}/{weights}" + (f"_tta{tta}" if tta else "")


def describe_score(record: Mapping[str, Any]) -> str:
    """Return a score as `test 93.21 % (ema weights, TTA 2, 10,000 images)`."""
    kind = f"{record['weights']} weights, TTA {record['tta']}"
    return f"{record['split']} {100 * record['accuracy']:.2f} % ({kind}, {count(record['count'], 'image')})"

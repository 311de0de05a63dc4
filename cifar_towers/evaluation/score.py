"""The result of a pass over a split: accuracy, loss, calibration, confusion, and the most confident
mistakes.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cifar_towers.errors import count

MAX_MISTAKES = 32
# equal bins of the confidence, the highest probability of an image (arXiv 1706.04599)
NUM_BINS = 15


class Score:
    """The scores of logits [n, C] against labels [n]: of one split, with one set of weights.

    Args:
      logits: with test-time augmentation (TTA), the weighted means over the views.
    """

    def __init__(self, labels: np.ndarray, logits: np.ndarray):
        probabilities = softmax(logits)
        predicted = logits.argmax(1)
        is_correct = predicted == labels
        self.probabilities = probabilities.astype(np.float32)  # [n, C]

        self.count = len(labels)
        self.correct = int(is_correct.sum())
        self.accuracy = self.correct / self.count

        # examples of class (row) predicted as class (column)
        num_classes = logits.shape[1]
        pairs = np.bincount(labels * num_classes + predicted, minlength=num_classes**2)
        self.confusion = pairs.reshape(num_classes, num_classes)

        # Cross entropy without label smoothing: the negative log likelihood (NLL). By the margin it
        # is finite even where the label's probability is 0 in float64.
        confidence = probabilities.max(1)
        logits_of_labels = logits[np.arange(len(labels)), labels]
        margin = logits.max(1).astype(np.float64) - logits_of_labels
        losses = margin - np.log(confidence)
        self.loss = float(losses.mean())

        # the most confident first
        wrong = np.flatnonzero(~is_correct)
        order = np.argsort(-confidence[wrong], kind="stable")
        self.mistakes = wrong[order][:MAX_MISTAKES]

        # [3, 15] images, correct predictions and sum of the confidences in each bin; a bin has its
        # upper edge
        upper_edges = np.arange(1, NUM_BINS) / NUM_BINS
        bins = np.digitize(confidence, upper_edges, right=True)
        images = np.bincount(bins, None, NUM_BINS)
        correct = np.bincount(bins, is_correct, NUM_BINS)
        confidences = np.bincount(bins, confidence, NUM_BINS)
        self.reliability = np.stack([images, correct, confidences])

        # The expected calibration error is the mean over the images of |accuracy - mean confidence|
        # of their bins.
        self.ece = float(np.abs(correct - confidences).sum()) / self.count

    def record(self) -> dict[str, Any]:
        """Return accuracy, loss and calibration as in result.json."""
        values = {
            "count": self.count,
            "accuracy": self.accuracy,
            "loss": self.loss,
            "ece": self.ece,
        }
        return values | {"reliability": self.reliability.tolist()}

    def per_class(self) -> np.ndarray:
        """Return [C], the accuracy on each class; NaN for a class without examples."""
        with np.errstate(invalid="ignore"):
            return np.diag(self.confusion) / self.confusion.sum(1)


class Evaluation(NamedTuple):
    """One score of a run, on a split, with `raw` or `ema` weights, with or without test-time
    augmentation.
    """

    split: str
    weights: str
    tta: bool
    score: Score


def softmax(logits: np.ndarray) -> np.ndarray:
    """Return the probabilities of [n, C] logits, as [n, C] float64."""
    exponentials = np.exp(logits.astype(np.float64) - logits.max(1, keepdims=True))
    return exponentials / exponentials.sum(1, keepdims=True)


def wilson_interval(share: float, count: int) -> tuple[float, float]:
    """Return the 95 % confidence interval, inside [0, 1], of a share of `count` examples (E. B.
    Wilson, JASA 1927).
    """
    z = 1.959964
    center = share + z * z / (2 * count)
    half_width = z * (share * (1 - share) / count + (z / (2 * count)) ** 2) ** 0.5
    low = (center - half_width) / (1 + z * z / count)
    high = (center + half_width) / (1 + z * z / count)
    return max(low, 0.0), min(high, 1.0)  # against rounding


def reported_score(records: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the record that a run reports, of one evaluation's records as in result.json; None if
    there are none.

    The test set comes before the validation set, and test-time augmentation comes before none. The
    accuracy has no influence on the choice.
    """
    return max(records, key=lambda r: (r["split"] == "test", r["tta"]), default=None)


def score_name(record: Mapping[str, Any]) -> str:
    """Return the name of a score in tables, files and tags: its split and TTA, e.g. `test_tta`."""
    suffix = "_tta" if record["tta"] else ""
    return f"{record['split']}{suffix}"


def describe_tta(tta: bool) -> str:
    """Return how texts name test-time augmentation."""
    return "with TTA" if tta else "without TTA"


def describe_score(record: Mapping[str, Any]) -> str:
    """Return a score as `test 93.21 % (ema weights, with TTA, 10,000 images)`."""
    images = count(record["count"], "image")
    details = f"{record['weights']} weights, {describe_tta(record['tta'])}, {images}"
    return f"{record['split']} {100 * record['accuracy']:.2f} % ({details})"

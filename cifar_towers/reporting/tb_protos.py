"""What TensorBoard's plugins are given: every function returns one `Summary.Value`, for an event of some step.

Tensors are laid out as `tensorboard/plugins/*/summary_v2.py` has them, and TensorFlow is not needed for them.
"""

import time
from collections.abc import Mapping, Sequence

import numpy as np
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar import metadata as layouts
from tensorboard.plugins.histogram import metadata as histograms
from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2
from tensorboard.plugins.hparams import metadata as sessions
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.image import metadata as images_metadata
from tensorboard.plugins.pr_curve import metadata as pr_curves
from tensorboard.plugins.scalar.summary_v2 import scalar_pb
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.util.tensor_util import make_tensor_proto

from cifar_towers.reporting import figures

THRESHOLDS = 127  # of a precision-recall curve
LEAST = 1e-7  # what TensorBoard divides by instead of less


def scalar(tag: str, value: float) -> Summary.Value:
    """A number, kept as float32."""
    return scalar_pb(tag, value).value[0]


def text(tag: str, markdown: str) -> Summary.Value:
    """A text in Markdown."""
    return text_pb(tag, markdown).value[0]


def image(tag: str, shown: np.ndarray) -> Summary.Value:
    """An image [height, width, 3] of uint8."""
    height, width = shown.shape[:2]
    content = [str(width).encode(), str(height).encode(), figures.png(shown)]
    return _value(tag, images_metadata.create_summary_metadata(None, None), np.array(content, object))


def histogram(tag: str, low: float, high: float, counts: np.ndarray) -> Summary.Value:
    """How many of some numbers lie in each of b equal buckets from low to high: counts [b].

    If low is high, the last bucket holds them all; without counts everything is zero, as TensorBoard has it.

    Raises:
      ValueError: low to high is no range.
    """
    counts = np.asarray(counts, np.float64)
    if not counts.any():
        low = high = 0.0
    if not 0 <= high - low < np.inf:
        raise ValueError(f"{tag}: a histogram from {low} to {high}")
    edges = np.linspace(low, high, len(counts) + 1)
    if low == high:
        counts = np.append(np.zeros(len(counts) - 1), counts.sum())
    buckets = np.stack([edges[:-1], edges[1:], counts], 1)
    return _value(tag, histograms.create_summary_metadata(None, None), buckets)


def pr_curve(tag: str, right: np.ndarray, probability: np.ndarray) -> Summary.Value:
    """Precision and recall of one class at 127 thresholds, even from 0 to 1; see `tensorboard.plugins.pr_curve`.

    Args:
      right: [n] bool, whether an example is of the class.
      probability: [n] from 0 to 1, given to the class; the example is taken for it at thresholds up to this.

    Raises:
      ValueError: a probability is not from 0 to 1.
    """
    right, probability = np.asarray(right, bool), np.asarray(probability)
    reached = np.floor(probability * (THRESHOLDS - 1))
    if not ((reached >= 0) & (reached < THRESHOLDS)).all():
        raise ValueError(f"{tag}: probabilities from {probability.min()} to {probability.max()}")
    reached = reached.astype(int)
    ends = [np.bincount(reached[which], minlength=THRESHOLDS) for which in (right, ~right)]
    true_positives, false_positives = (np.cumsum(end[::-1])[::-1] for end in ends)
    true_negatives, false_negatives = (taken[0] - taken for taken in (false_positives, true_positives))
    precision = true_positives / np.maximum(LEAST, true_positives + false_positives)
    recall = true_positives / np.maximum(LEAST, true_positives + false_negatives)
    curve = [true_positives, false_positives, true_negatives, false_negatives, precision, recall]
    return _value(tag, pr_curves.create_summary_metadata(tag, "", THRESHOLDS), np.array(curve, np.float32))


def hparams(settings: Mapping[str, bool | int | float | str]) -> Summary.Value:
    """That a run with these settings starts now: a row under HPARAMS, called as the run that it is written to.

    The row's metrics are the scalars of that run, and of runs below it unless it is the logdir itself. TensorBoard
    keeps the first that a run has, so a run that is resumed need not repeat it.

    Raises:
      TypeError: a value is of another type.
    """
    return hparams_pb(settings, trial_id="").value[0]


def hparams_end() -> Summary.Value:
    """That the run ends now, for good and well: TensorBoard keeps the first that a run has."""
    ended = plugin_data_pb2.SessionEndInfo(status=api_pb2.STATUS_SUCCESS, end_time_secs=time.time())
    data = plugin_data_pb2.HParamsPluginData(session_end_info=ended)
    return Summary.Value(
        tag=sessions.SESSION_END_INFO_TAG, metadata=sessions.create_summary_metadata(data), tensor=sessions.NULL_TENSOR
    )


def layout(categories: Mapping[str, Mapping[str, Sequence[str]]]) -> Summary.Value:
    """Charts of several scalars for CUSTOM SCALARS: {category: {title: [regular expressions that tags begin with]}}."""
    content = layout_pb2.Layout()
    for category, charts in categories.items():
        added = content.category.add(title=category)
        for title, tags in charts.items():
            added.chart.add(title=title, multiline=layout_pb2.MultilineChartContent(tag=tags))
    serialised = np.array(content.SerializeToString(), object)
    return _value(layouts.CONFIG_SUMMARY_TAG, layouts.create_summary_metadata(), serialised)


def _value(tag: str, metadata: SummaryMetadata, content: np.ndarray) -> Summary.Value:
    return Summary.Value(tag=tag, metadata=metadata, tensor=make_tensor_proto(content))

"""`Summary.Value` protos for TensorBoard's plugins, by TensorBoard's own builders where it has one.

It has none for an image that is encoded already, nor for a histogram that is counted already: these are laid out as
in `tensorboard/plugins/{image,histogram}/summary_v2.py`.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar import summary as custom_scalar_summary
from tensorboard.plugins.histogram import metadata as histogram_metadata
from tensorboard.plugins.hparams import api_pb2
from tensorboard.plugins.hparams import summary as hparams_summary
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.image import metadata as image_metadata
from tensorboard.plugins.pr_curve import summary as pr_curve_summary
from tensorboard.plugins.scalar.summary_v2 import scalar_pb
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.util.tensor_util import make_tensor_proto

from cifar_towers.reporting import figures

NUM_THRESHOLDS = 127  # of a precision-recall curve


def scalar(tag: str, value: float) -> Summary.Value:
    """A number, stored as float32."""
    return scalar_pb(tag, value).value[0]


def text(tag: str, markdown: str) -> Summary.Value:
    """A text in Markdown."""
    return text_pb(tag, markdown).value[0]


def image(tag: str, pixels: np.ndarray) -> Summary.Value:
    """An image [height, width, 3] of uint8."""
    height, width = pixels.shape[:2]
    content = [str(width).encode(), str(height).encode(), figures.png(pixels)]
    return _value(tag, image_metadata.create_summary_metadata(None, None), np.array(content, object))


def histogram(tag: str, low: float, high: float, counts: np.ndarray) -> Summary.Value:
    """A histogram from the counts [b] of equal buckets between low and high.

    If low equals high, the last bucket holds all counts; without counts everything is zero, as in TensorBoard's own.

    Raises:
      ValueError: low to high is no finite range.
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
    return _value(tag, histogram_metadata.create_summary_metadata(None, None), buckets)


def pr_curve(tag: str, labels: np.ndarray, probabilities: np.ndarray) -> Summary.Value:
    """Precision and recall of one class at 127 thresholds, from labels [n] of bool and predicted probabilities [n].

    Raises:
      ValueError: a probability is not from 0 to 1.
    """
    labels, probabilities = np.asarray(labels, bool), np.asarray(probabilities)
    if not ((probabilities >= 0) & (probabilities < 1 + 1 / NUM_THRESHOLDS)).all():  # 1 may be exceeded by rounding
        raise ValueError(f"{tag}: probabilities from {probabilities.min()} to {probabilities.max()}")
    value = _converted(pr_curve_summary.pb(tag, labels, probabilities, num_thresholds=NUM_THRESHOLDS))
    value.tag = tag  # the builder adds `/pr_curves`
    return value


def hparams(settings: Mapping[str, bool | int | float | str]) -> Summary.Value:
    """The settings of a run that starts now: a row under HPARAMS, named after the run that it is written to.

    The row's metrics are the scalars of that run. TensorBoard takes the first value in a run.

    Raises:
      TypeError: a value is of another type.
    """
    return hparams_pb(settings, trial_id="").value[0]


def hparams_end() -> Summary.Value:
    """The successful end of a run, now. TensorBoard takes the first value in a run."""
    return _converted(hparams_summary.session_end_pb(api_pb2.STATUS_SUCCESS))


def custom_scalars(categories: Mapping[str, Mapping[str, Sequence[str]]]) -> Summary.Value:
    """Charts of several scalars under CUSTOM SCALARS: {category: {title: [regular expressions of tags]}}."""
    layout = layout_pb2.Layout()
    for category, charts in categories.items():
        added = layout.category.add(title=category)
        for title, tags in charts.items():
            added.chart.add(title=title, multiline=layout_pb2.MultilineChartContent(tag=tags))
    return _converted(custom_scalar_summary.pb(layout))


def _value(tag: str, metadata: SummaryMetadata, content: np.ndarray) -> Summary.Value:
    return Summary.Value(tag=tag, metadata=metadata, tensor=make_tensor_proto(content))


def _converted(summary) -> Summary.Value:
    """The value of a `Summary` proto of TensorFlow's, which some builders return, as TensorBoard's."""
    return Summary.FromString(summary.SerializeToString()).value[0]

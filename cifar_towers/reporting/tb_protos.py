"""`Summary` protos for TensorBoard's plugins where TensorBoard has no builder, or one that needs preparation.

It has no builder for an image that is encoded already, nor for a histogram that is counted already: these are laid out
as in `tensorboard/plugins/{image,histogram}/summary_v2.py`.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar import summary as custom_scalar_summary
from tensorboard.plugins.histogram import metadata as histogram_metadata
from tensorboard.plugins.image import metadata as image_metadata
from tensorboard.plugins.pr_curve import summary as pr_curve_summary
from tensorboard.util.tensor_util import make_tensor_proto

from cifar_towers.reporting import figures

NUM_THRESHOLDS = 127  # of a precision-recall curve


def image(tag: str, pixels: np.ndarray) -> Summary:
    """An image [height, width, 3] of uint8."""
    height, width = pixels.shape[:2]
    content = [str(width).encode(), str(height).encode(), figures.png(pixels)]
    return _summary(tag, image_metadata.create_summary_metadata(None, None), np.array(content, object))


def histogram(tag: str, low: float, high: float, counts: np.ndarray) -> Summary:
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
    return _summary(tag, histogram_metadata.create_summary_metadata(None, None), buckets)


def pr_curve(tag: str, labels: np.ndarray, probabilities: np.ndarray):
    """Precision and recall of one class at 127 thresholds, from labels [n] of bool and predicted probabilities [n].

    Raises:
      ValueError: a probability is not from 0 to 1.
    """
    labels, probabilities = np.asarray(labels, bool), np.asarray(probabilities)
    if not ((probabilities >= 0) & (probabilities < 1 + 1 / NUM_THRESHOLDS)).all():  # 1 may be exceeded by rounding
        raise ValueError(f"{tag}: probabilities from {probabilities.min()} to {probabilities.max()}")
    summary = pr_curve_summary.pb(tag, labels, probabilities, num_thresholds=NUM_THRESHOLDS)
    summary.value[0].tag = tag  # the builder adds `/pr_curves`
    return summary


def custom_scalars(categories: Mapping[str, Mapping[str, Sequence[str]]]):
    """Charts of several scalars under CUSTOM SCALARS: {category: {title: [regular expressions of tags]}}."""
    layout = layout_pb2.Layout()
    for category, charts in categories.items():
        added = layout.category.add(title=category)
        for title, tags in charts.items():
            added.chart.add(title=title, multiline=layout_pb2.MultilineChartContent(tag=tags))
    return custom_scalar_summary.pb(layout)


def margin_charts(categories: Mapping[str, Mapping[str, Sequence[str]]], *prefixes: str):
    """Charts of a line and its band under CUSTOM SCALARS: {category: {title: [tags]}}; `prefixes` make of a tag those
    of the line, of the lower and of the upper edge."""
    layout = layout_pb2.Layout()
    for category, charts in categories.items():
        added = layout.category.add(title=category)
        for title, tags in charts.items():
            series = [[prefix + tag for prefix in prefixes] for tag in tags]
            margin = [layout_pb2.MarginChartContent.Series(value=v, lower=low, upper=high) for v, low, high in series]
            added.chart.add(title=title, margin=layout_pb2.MarginChartContent(series=margin))
    return custom_scalar_summary.pb(layout)


def _summary(tag: str, metadata: SummaryMetadata, content: np.ndarray) -> Summary:
    return Summary(value=[Summary.Value(tag=tag, metadata=metadata, tensor=make_tensor_proto(content))])

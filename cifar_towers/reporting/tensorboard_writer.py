"""The event files of a run: training, evaluations, one directory per tower, and the result."""

import functools
import re
import shlex
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar import summary as custom_scalar_summary
from tensorboard.plugins.histogram import metadata as histogram_metadata
from tensorboard.plugins.hparams import api_pb2
from tensorboard.plugins.hparams.summary import session_end_pb
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.image import metadata as image_metadata
from tensorboard.plugins.pr_curve import summary as pr_curve_summary
from tensorboard.plugins.scalar.summary_v2 import scalar_pb
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.util.tensor_util import make_tensor_proto
from tensorflow.core.framework.graph_pb2 import GraphDef

from cifar_towers import files
from cifar_towers.data.dataset import DatasetInfo, Split
from cifar_towers.evaluation.score import Score
from cifar_towers.reporting import figures, projector, tags
from cifar_towers.reporting.event_files import EventWriter
from cifar_towers.training.results import StepDiagnostics, StepMetrics, TensorStats

TRAIN, EVAL, RESULT, PROJECTOR = "train", "eval", "result", "projector"  # beside one directory per tower
NUM_THRESHOLDS = 127  # of a precision-recall curve


class TensorBoardWriter:
    """The event files of a run's directory."""

    def __init__(self, train_dir: Path):
        self._train_dir = train_dir
        self._events = functools.cache(lambda name: EventWriter(train_dir / name))

    def write_run(self, step: int, hparams: Mapping, settings: Mapping, environment: Mapping) -> None:
        """Write what does not change in a run that starts at `step`: texts, charts, and its row under HPARAMS.

        TensorBoard takes the first settings that a run has, so only a run from step 0 writes `hparams`.

        Args:
          settings: the content of config.json.
          environment: the content of environment.json.
        """
        texts = run_texts(settings, environment)
        self._events(TRAIN).write(step, [charts_summary(tags.CHARTS), *(text_pb(*text) for text in texts.items())])
        if step == 0:
            self._events(RESULT).write(0, [hparams_pb(hparams, trial_id="")])

    def write_graph(self, function) -> None:
        """Draw a traced step (`ConcreteFunction`), its towers as boxes."""
        handles = {id(variable.handle): variable.name.removesuffix(":0") for variable in function.variables}
        captured = function.graph.captures
        variables = {inner.op.name: handles[id(outer)] for outer, inner in captured if id(outer) in handles}
        graph = relabel_graph(function.graph.as_graph_def(add_shapes=True), variables)
        self._events(TRAIN).write(0, graph_def=graph.SerializeToString())

    def write_step(
        self, step: int, metrics: StepMetrics, rates: Mapping[str, float], others: Mapping[str, float | None]
    ) -> None:
        """Write the scalars of a step.

        Args:
          rates: the learning rate of each parameter group.
          others: more scalars by tag; None is left out.
        """
        scalars = {tags.LOSS: metrics.loss, tags.ACCURACY: metrics.accuracy, tags.GRADIENT_NORM: metrics.gradient_norm}
        scalars |= {tags.raw_loss(term): loss for term, loss in metrics.losses.items()}
        scalars |= {tags.smoothed_loss(term): loss for term, loss in metrics.smoothed_losses.items()}
        scalars |= {f"{tags.LEARNING_RATE}/{group}": rate for group, rate in rates.items()}
        if metrics.hard_examples:
            proxy = metrics.hard_examples.proxy
            scalars |= {f"{tags.PROXY}/{tags.LOSS}": proxy.loss, f"{tags.PROXY}/{tags.ACCURACY}": proxy.accuracy}
        scalars |= {tag: value for tag, value in others.items() if value is not None}
        self._write_scalars(TRAIN, step, scalars)

    def write_tower_scalars(self, step: int, scalars: Mapping[str, Sequence[float]]) -> None:
        """Write the scalars of each tower: {tag: [K]}."""
        for index, values in enumerate(zip(*scalars.values(), strict=True)):
            self._write_scalars(f"tower_{index}", step, dict(zip(scalars, values, strict=True)))

    def write_input_images(
        self, step: int, images: np.ndarray, labels: Sequence[str], info: DatasetInfo | None
    ) -> None:
        """Write images [n, size, size, 3] as the model sees them, above their labels; see `denormalize`."""
        grid = figures.image_grid(denormalize(images, info), labels, columns=4)
        self._events(TRAIN).write(step, [image(tags.INPUT_IMAGES, grid)])

    def write_activations(self, step: int, layers: Sequence[str], stats: TensorStats) -> None:
        """Write histogram and sparsity of each layer's output."""
        outputs = {layer: stats.at(index) for index, layer in enumerate(layers)}
        sparsities = {f"{tags.SPARSITY}/{layer}": output.zero_fraction for layer, output in outputs.items()}
        self._write_scalars(TRAIN, step, sparsities, _histograms(tags.ACTIVATIONS, outputs))

    def write_update(self, step: int, weights: Sequence[str], diagnostics: StepDiagnostics) -> None:
        """Write histogram and norm of each weight and its mean gradient, and the update-to-weight ratio."""
        values = {name: diagnostics.weights.at(index) for index, name in enumerate(weights)}
        gradients = {name: diagnostics.gradients.at(index) for index, name in enumerate(weights)}
        scalars = {f"{tags.WEIGHT_NORM}/{name}": value.norm for name, value in values.items()}
        scalars |= {f"{tags.WEIGHT_GRADIENT_NORM}/{name}": gradient.norm for name, gradient in gradients.items()}
        for name, update_norm in zip(weights, diagnostics.update_norm, strict=True):
            if values[name].norm:
                scalars[f"{tags.UPDATE_RATIO}/{name}"] = update_norm / values[name].norm
        histograms = _histograms(tags.WEIGHTS, values) + _histograms(tags.GRADIENTS, gradients)
        self._write_scalars(TRAIN, step, scalars, histograms)

    def write_score(self, step: int, name: str, score: Score) -> None:
        """Write accuracy and loss of an evaluation called `name`, as from `run_info.score_tag`."""
        values = {f"{tags.ACCURACY}/{name}": score.accuracy, f"{tags.LOSS}/{name}": score.loss}
        self._write_scalars(EVAL, step, values)

    def write_class_scores(self, step: int, name: str, score: Score, split: Split, class_names: Sequence[str]) -> None:
        """Write accuracy and precision-recall curve of each class; no curves of more than `figures.MAX_CLASSES`.

        Tags have the split alone, so that the final evaluation, with test-time augmentation, continues the others.
        """
        split_name, curves = name.partition("/")[0], []
        if len(class_names) <= figures.MAX_CLASSES and np.isfinite(score.probabilities).all():
            for index, (class_name, probabilities) in enumerate(zip(class_names, score.probabilities.T, strict=True)):
                tag = f"{tags.PRECISION_RECALL}/{split_name}/{class_name}"
                curves.append(pr_curve(tag, split.labels == index, probabilities))
        class_tags = [f"{tags.CLASS_ACCURACY}/{split_name}/{class_name}" for class_name in class_names]
        self._write_scalars(EVAL, step, dict(zip(class_tags, score.per_class(), strict=True)), curves)

    def write_pictures(self, step: int, split_name: str, pictures: Mapping[str, np.ndarray]) -> None:
        """Write pictures of an evaluation by tag: the mistakes, and the confusion matrix if it can be drawn."""
        self._events(EVAL).write(step, [image(f"{tag}/{split_name}", pixels) for tag, pixels in pictures.items()])

    def write_embedding(self, step: int, score: Score, split: Split, class_names: Sequence[str]) -> None:
        """Write the projector's files into a new directory, as TensorBoard reads each once; remove earlier ones."""
        if score.features is None or not (np.isfinite(score.features).all() and np.isfinite(score.probabilities).all()):
            return
        count, directory = len(score.features), self._train_dir / f"{PROJECTOR}_{step:08}"
        columns = projector.metadata_columns(split.labels[:count], score.probabilities[:count], class_names)
        with files.BestEffortWrites(directory):
            projector.write(directory, score.features, split.images[:count], columns)
            for other in self._train_dir.glob(files.PROJECTOR):
                if other != directory:
                    shutil.rmtree(other)

    def write_result(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write the run's metrics under HPARAMS, and its successful end, of which TensorBoard takes the first."""
        metrics = {f"{tags.FINAL}/{tag}": value for tag, value in scalars.items()}
        self._write_scalars(RESULT, step, metrics, [session_end_pb(api_pb2.STATUS_SUCCESS)])

    def truncate_after(self, train_step: int, eval_step: int) -> None:
        """Remove what was written of training after `train_step`, and of evaluations after `eval_step`."""
        towers = (path.name for path in self._train_dir.glob("tower_*"))  # there may have been more towers
        for name in (TRAIN, *towers):
            self._events(name).truncate_after(train_step)
        self._events(EVAL).truncate_after(eval_step)
        self._events(RESULT).truncate_after(0)

    def _write_scalars(self, name: str, step: int, scalars: Mapping[str, float], others: Iterable = ()) -> None:
        """Write one event into the directory `name`: scalars by tag, and other summaries."""
        self._events(name).write(step, [*(scalar_pb(tag, value) for tag, value in scalars.items()), *others])


def denormalize(images: np.ndarray, info: DatasetInfo | None) -> np.ndarray:
    """Return images [n, size, size, 3] as the model sees them as levels 0..255 of uint8.

    Without `info`, where each image is normalized by itself, its range is stretched.
    """
    if info:
        levels = images * info.std + info.mean
    else:
        levels = images - images.min((1, 2, 3), keepdims=True)
        levels *= 255 / np.maximum(levels.max((1, 2, 3), keepdims=True), 1e-6)
    return np.clip(np.round(levels), 0, 255).astype(np.uint8)


def image(tag: str, pixels: np.ndarray) -> Summary:
    """Make the summary of an image [height, width, 3] of uint8.

    TensorBoard's own builder would open a TensorFlow session to encode it; the layout is that of its `summary_v2`.
    """
    height, width = pixels.shape[:2]
    content = np.array([str(width).encode(), str(height).encode(), figures.png(pixels)], object)
    return _summary(tag, image_metadata.create_summary_metadata(None, None), content)


def pr_curve(tag: str, labels: np.ndarray, probabilities: np.ndarray):
    """Make the summary of precision and recall of one class at 127 thresholds.

    Args:
      labels: [n] of bool.
      probabilities: [n], as predicted.

    Raises:
      ValueError: a probability is not from 0 to 1.
    """
    labels, probabilities = np.asarray(labels, bool), np.asarray(probabilities)
    if not ((probabilities >= 0) & (probabilities < 1 + 1 / NUM_THRESHOLDS)).all():  # 1 may be exceeded by rounding
        raise ValueError(f"{tag}: probabilities from {probabilities.min()} to {probabilities.max()}")
    summary = pr_curve_summary.pb(tag, labels, probabilities, num_thresholds=NUM_THRESHOLDS)
    summary.value[0].tag = tag  # the builder adds `/pr_curves`
    return summary


def histogram(tag: str, low: float, high: float, counts: np.ndarray) -> Summary:
    """Make the summary of a histogram from the counts [b] of equal buckets between low and high.

    TensorBoard's own builder takes values that are not counted yet; the layout is that of its `summary_v2`. If low
    equals high, the last bucket holds all counts. Without counts everything is zero.

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


def _summary(tag: str, metadata: SummaryMetadata, content: np.ndarray) -> Summary:
    return Summary(value=[Summary.Value(tag=tag, metadata=metadata, tensor=make_tensor_proto(content))])


def _histograms(prefix: str, tensors: Mapping[str, TensorStats]) -> list[Summary]:
    return [histogram(f"{prefix}/{name}", stats.min, stats.max, stats.counts) for name, stats in tensors.items()]


def charts_summary(categories: Mapping[str, Mapping[str, Sequence[str]]], band: Sequence[str] = ()):
    """Make the summary of charts of several scalars under CUSTOM SCALARS.

    Args:
      categories: {category: {title: [regular expressions of tags]}}; with a band {category: {title: [tags]}}.
      band: prefixes that make of a tag the tags of a line, of the lower and of the upper edge of its band.
    """

    def chart(title: str, found: Sequence[str]) -> layout_pb2.Chart:
        if not band:
            return layout_pb2.Chart(title=title, multiline=layout_pb2.MultilineChartContent(tag=found))
        edges = ("value", "lower", "upper")
        series = [{edge: prefix + tag for edge, prefix in zip(edges, band, strict=True)} for tag in found]
        return layout_pb2.Chart(title=title, margin=layout_pb2.MarginChartContent(series=series))

    layout = layout_pb2.Layout()
    for category, charts in categories.items():
        layout.category.add(title=category, chart=[chart(*each) for each in charts.items()])
    return custom_scalar_summary.pb(layout)


def run_texts(settings: Mapping[str, Any], environment: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of a run in Markdown by tag, from the contents of config.json and environment.json."""
    short = [
        (name, _one_line(value))
        for name, value in environment.items()
        if value and name not in ("variables", "model", "command")
    ]
    variables = (variable.values() for variable in environment["variables"])
    texts = {
        "run/recipe": _markdown_table(("setting", "value"), settings.items()),
        "run/command": f"```\n{shlex.join(environment['command'])}\n```",
        "run/environment": _markdown_table(("property", "value"), short),
        "run/model": _model_table(environment["model"]),
        "run/variables": _markdown_table(("variable", "shape", "bytes", "device"), variables),
    }
    if environment["synthetic_data"]:
        texts["run/data"] = environment["synthetic_data"]
    return texts


def _model_table(layers: Sequence[Mapping[str, Any]]) -> str:
    if not layers:
        return "the model is not a graph of layers"
    rows: list[tuple] = [
        (
            each["name"],
            each["kind"],
            " x ".join(map(str, each["output"])),
            f"{each['parameters']:,}",
            f"{each['flops']:,}",
        )
        for each in layers
    ]
    totals = (f"**{sum(layer[key] for layer in layers):,}**" for key in ("parameters", "flops"))
    rows.append(("**total**", "", "", *totals))
    return _markdown_table(("layer", "kind", "output", "parameters", "FLOPs per image, forward"), rows)


def _one_line(value: Any) -> str:
    """Return an entry of environment.json as the text of a table's cell."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(" on ".join(item.values()) if isinstance(item, dict) else str(item) for item in value)
    return str(value)


def _markdown_table(headings: Sequence[str], rows: Iterable[Iterable]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


# Names of operations -> names to draw in GRAPHS: towers side by side between the batch and the mean gradient. A tower's
# backward pass is drawn in the tower. Operations outside any scope are gathered, as TensorBoard moves boxes aside when
# there are many.
GRAPH_SCOPES = (
    (r"gradient_tape/((?:proxy/)?tower_\d+)/(.+)", r"\1/gradients/\2"),
    (r"((?:batch|rates|learning_rates|look|collect_diagnostics|stop_signal)(?:_\d+)?)", r"inputs/\1"),
    (r"((?:Identity|NoOp)(?:_\d+)?)", r"results/\1"),
    (r"([^/]+)", r"step/\1"),
)


def relabel_graph(graph: GraphDef, variables: Mapping[str, str]) -> GraphDef:
    """Return the graph with its operations renamed, without its function library, which would be drawn beside it.

    Variables are drawn in one box. Inside the scope of the first read, which is tower 0, all other towers would seem to
    read from tower 0.

    Args:
      variables: {placeholder name: variable name}.
    """
    unscoped = {node.name for node in graph.node if "/" not in node.name}
    names = {node.name: _name_to_draw(node.name, unscoped, variables) for node in graph.node}
    relabeled = GraphDef(versions=graph.versions)
    for node in graph.node:
        copy = relabeled.node.add()
        copy.CopyFrom(node)
        copy.name = names[node.name]
        copy.attr.pop("_class", None)
        for index, source in enumerate(node.input):
            name = source.lstrip("^").partition(":")[0]
            copy.input[index] = source.replace(name, names[name], 1)
    return relabeled


def _name_to_draw(name: str, unscoped: set[str], variables: Mapping[str, str]) -> str:
    if name in variables:
        return f"variables/{variables[name]}"
    head, slash, rest = name.partition("/")
    prefix = head if head in unscoped else name  # a scope may have the name of an operation
    for pattern, replacement in GRAPH_SCOPES:
        if match := re.fullmatch(pattern, prefix):
            return match.expand(replacement) + (slash + rest if prefix == head else "")
    return name

"""The event files of a run: training, evaluations, one directory per tower, and the result."""

import functools
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from tensorboard.plugins.hparams import api_pb2
from tensorboard.plugins.hparams.summary import session_end_pb
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.scalar.summary_v2 import scalar_pb
from tensorboard.plugins.text.summary_v2 import text_pb

from cifar_towers import files
from cifar_towers.data.dataset import DatasetInfo, Split
from cifar_towers.evaluation.score import Score
from cifar_towers.reporting import charts, figures, graph_layout, projector, tags, tb_protos
from cifar_towers.reporting.event_files import EventWriter
from cifar_towers.training.results import StepMetrics, TensorStats, UpdateDiagnostics

TRAIN, EVAL, RESULT, PROJECTOR = "train", "eval", "result", "projector"  # beside one directory per tower


class TensorBoardWriter:
    """Writes the event files of a run's directory."""

    def __init__(self, train_dir: Path):
        self._train_dir = train_dir
        self._events = functools.cache(lambda name: EventWriter(train_dir / name))

    def write_run(self, step: int, settings: Mapping, texts: Mapping[str, str]) -> None:
        """What does not change in a run that starts at `step`: settings for HPARAMS, of which TensorBoard takes the
        first that a run has; texts in Markdown by tag; and the charts of CUSTOM SCALARS."""
        custom_scalars = tb_protos.custom_scalars(charts.CUSTOM_SCALARS)
        self._events(TRAIN).write(step, [custom_scalars, *(text_pb(*text) for text in texts.items())])
        if step == 0:
            self._events(RESULT).write(0, [hparams_pb(settings, trial_id="")])

    def write_graph(self, function) -> None:
        """Draw a traced step (`ConcreteFunction`), its towers as boxes."""
        handles = {id(variable.handle): variable.name.removesuffix(":0") for variable in function.variables}
        captured = function.graph.captures
        variables = {inner.op.name: handles[id(outer)] for outer, inner in captured if id(outer) in handles}
        graph = graph_layout.relabel(function.graph.as_graph_def(add_shapes=True), variables)
        self._events(TRAIN).write(0, graph_def=graph.SerializeToString())

    def write_step(
        self, step: int, metrics: StepMetrics, rates: Mapping[str, float], others: Mapping[str, float | None]
    ) -> None:
        """Scalars of a step: its metrics, the learning rate of each parameter group, and `others` by tag, without
        those that are None."""
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
        """Scalars of each tower: {tag: [K]}."""
        for index, values in enumerate(zip(*scalars.values(), strict=True)):
            self._write_scalars(f"tower_{index}", step, dict(zip(scalars, values, strict=True)))

    def write_input_images(
        self, step: int, images: np.ndarray, labels: Sequence[str], info: DatasetInfo | None
    ) -> None:
        """Images [n, side, side, 3] as the model sees them, above their labels; see `denormalize`."""
        grid = figures.image_grid(denormalize(images, info), labels, columns=4)
        self._events(TRAIN).write(step, [tb_protos.image(tags.INPUT_IMAGES, grid)])

    def write_activations(self, step: int, layers: Sequence[str], stats: TensorStats) -> None:
        """Histogram and sparsity of each layer's output."""
        outputs = {layer: stats.at(index) for index, layer in enumerate(layers)}
        sparsities = {f"{tags.SPARSITY}/{layer}": output.zero_fraction for layer, output in outputs.items()}
        self._write_scalars(TRAIN, step, sparsities, _histograms(tags.ACTIVATIONS, outputs))

    def write_update(self, step: int, weights: Sequence[str], update: UpdateDiagnostics) -> None:
        """Histogram and norm of each weight and its mean gradient, and the update-to-weight ratio."""
        values = {name: update.weights.at(index) for index, name in enumerate(weights)}
        gradients = {name: update.gradients.at(index) for index, name in enumerate(weights)}
        scalars = {f"{tags.WEIGHT_NORM}/{name}": value.norm for name, value in values.items()}
        scalars |= {f"{tags.WEIGHT_GRADIENT_NORM}/{name}": gradient.norm for name, gradient in gradients.items()}
        for name, update_norm in zip(weights, update.update_norm, strict=True):
            if values[name].norm:
                scalars[f"{tags.UPDATE_RATIO}/{name}"] = update_norm / values[name].norm
        histograms = _histograms(tags.WEIGHTS, values) + _histograms(tags.GRADIENTS, gradients)
        self._write_scalars(TRAIN, step, scalars, histograms)

    def write_score(self, step: int, name: str, score: Score) -> None:
        """Accuracy and loss of an evaluation called `name`, as from `run_info.score_tag`."""
        values = {f"{tags.ACCURACY}/{name}": score.accuracy, f"{tags.LOSS}/{name}": score.loss}
        self._write_scalars(EVAL, step, values)

    def write_class_scores(self, step: int, name: str, score: Score, split: Split, class_names: Sequence[str]) -> None:
        """Accuracy and precision-recall curve of each class; no curves of more than `figures.MAX_CLASSES`.

        Tags have the split alone, so that the final evaluation, with test-time augmentation, continues the others.
        """
        split_name, curves = name.partition("/")[0], []
        if len(class_names) <= figures.MAX_CLASSES and np.isfinite(score.probabilities).all():
            for index, (class_name, probabilities) in enumerate(zip(class_names, score.probabilities.T, strict=True)):
                tag = f"{tags.PRECISION_RECALL}/{split_name}/{class_name}"
                curves.append(tb_protos.pr_curve(tag, split.labels == index, probabilities))
        class_tags = [f"{tags.CLASS_ACCURACY}/{split_name}/{class_name}" for class_name in class_names]
        self._write_scalars(EVAL, step, dict(zip(class_tags, score.per_class(), strict=True)), curves)

    def write_mistakes(
        self, step: int, name: str, score: Score, split: Split, class_names: Sequence[str], mistakes: np.ndarray
    ) -> None:
        """Images of the mistakes and, where it can be drawn, of the confusion matrix; the projector's embedding."""
        split_name = name.partition("/")[0]
        images = [tb_protos.image(f"{tags.MISTAKES}/{split_name}", mistakes)]
        if len(class_names) <= figures.MAX_CLASSES:
            matrix = figures.confusion_matrix(score.confusion, class_names, f"{name}, step {step}")
            images.append(tb_protos.image(f"{tags.CONFUSION}/{split_name}", matrix))
        if score.features is not None and np.isfinite(score.features).all() and np.isfinite(score.probabilities).all():
            self._write_embedding(step, score, split, class_names)
        self._events(EVAL).write(step, images)

    def write_result(self, step: int, scalars: Mapping[str, float]) -> None:
        """The run's metrics under HPARAMS, and its successful end, of which TensorBoard takes the first."""
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
        """One event in the directory `name`: scalars by tag, and other summaries."""
        self._events(name).write(step, [*(scalar_pb(tag, value) for tag, value in scalars.items()), *others])

    def _write_embedding(self, step: int, score: Score, split: Split, class_names: Sequence[str]) -> None:
        """The projector's files, in a new directory as TensorBoard reads each only once; earlier ones are removed."""
        count, directory = len(score.features), self._train_dir / f"{PROJECTOR}_{step:08}"
        columns = projector.metadata_columns(split.labels[:count], score.probabilities[:count], class_names)
        with files.best_effort_writes(directory):
            projector.write(directory, score.features, split.images[:count], columns)
            for other in self._train_dir.glob(f"{PROJECTOR}_*"):
                if other != directory:
                    shutil.rmtree(other)


def _histograms(prefix: str, tensors: Mapping[str, TensorStats]) -> list:
    return [
        tb_protos.histogram(f"{prefix}/{name}", stats.min, stats.max, stats.counts) for name, stats in tensors.items()
    ]


def denormalize(images: np.ndarray, info: DatasetInfo | None) -> np.ndarray:
    """Images [n, side, side, 3] as the model sees them -> levels 0..255 of uint8; without `info`, where each image is
    normalized by itself, its range is stretched."""
    if info:
        levels = images * info.std + info.mean
    else:
        levels = images - images.min((1, 2, 3), keepdims=True)
        levels *= 255 / np.maximum(levels.max((1, 2, 3), keepdims=True), 1e-6)
    return np.clip(np.round(levels), 0, 255).astype(np.uint8)

"""The event files of a run: training, evaluations, one directory per tower, and the result."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from cifar_towers.data.dataset import DatasetInfo, Split
from cifar_towers.evaluation.score import Score
from cifar_towers.files import best_effort
from cifar_towers.reporting import charts, figures, graph_layout, projector, tags, tb_protos
from cifar_towers.reporting.event_files import EventWriter
from cifar_towers.towers import Tower
from cifar_towers.training.results import StepMetrics, TensorStats, UpdateDiagnostics

TRAIN, EVAL, RESULT, PROJECTOR = "train", "eval", "result", "projector"  # beside one directory per tower


class TensorBoardWriter:
    """Writes the event files of a run's directory."""

    def __init__(self, train_dir: Path, towers: Sequence[Tower]):
        self._train_dir = train_dir
        self._train, self._eval, self._result = (EventWriter(train_dir / name) for name in (TRAIN, EVAL, RESULT))
        self._towers = [EventWriter(train_dir / tower.name) for tower in towers]

    def write_run(self, step: int, settings: Mapping, texts: Mapping[str, str]) -> None:
        """What does not change in a run that starts at `step`: settings for HPARAMS, texts in Markdown by tag, and the
        charts of CUSTOM SCALARS."""
        custom_scalars = tb_protos.custom_scalars(charts.CUSTOM_SCALARS)
        self._train.write(step, [custom_scalars, *(tb_protos.text(*text) for text in texts.items())])
        if step == 0:
            self._result.write(0, [tb_protos.hparams(settings)])

    def write_graph(self, function) -> None:
        """Draw a traced step (`ConcreteFunction`), its towers as boxes."""
        handles = {id(variable.handle): variable.name.removesuffix(":0") for variable in function.variables}
        captured = function.graph.captures
        variables = {inner.op.name: handles[id(outer)] for outer, inner in captured if id(outer) in handles}
        graph = graph_layout.relabel(function.graph.as_graph_def(add_shapes=True), variables)
        self._train.write(0, graph_def=graph.SerializeToString())

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
        self._train.write(step, [tb_protos.scalar(tag, value) for tag, value in scalars.items()])

    def write_tower_scalars(self, step: int, scalars: Mapping[str, Sequence[float]]) -> None:
        """Scalars of each tower: {tag: [K]}."""
        for index, events in enumerate(self._towers):
            events.write(step, [tb_protos.scalar(tag, values[index]) for tag, values in scalars.items()])

    def write_input_images(self, step: int, images: np.ndarray, labels: Sequence[str]) -> None:
        """Images [n, height, width, 3] of uint8 above their labels."""
        self._train.write(step, [tb_protos.image(tags.INPUT_IMAGES, figures.image_grid(images, labels, columns=4))])

    def write_activations(self, step: int, layers: Sequence[str], stats: TensorStats) -> None:
        """Histogram and sparsity of each layer's output."""
        values = []
        for index, layer in enumerate(layers):
            output = stats.at(index)
            values.append(_histogram(f"{tags.ACTIVATIONS}/{layer}", output))
            values.append(tb_protos.scalar(f"{tags.SPARSITY}/{layer}", output.zero_fraction))
        self._train.write(step, values)

    def write_update(self, step: int, weights: Sequence[str], update: UpdateDiagnostics) -> None:
        """Histogram and norm of each weight and its mean gradient, and the update-to-weight ratio."""
        values = []
        for index, name in enumerate(weights):
            weight, gradient = update.weights.at(index), update.gradients.at(index)
            values += [
                _histogram(f"{tags.WEIGHTS}/{name}", weight),
                _histogram(f"{tags.GRADIENTS}/{name}", gradient),
                tb_protos.scalar(f"{tags.WEIGHT_NORM}/{name}", weight.norm),
                tb_protos.scalar(f"{tags.WEIGHT_GRADIENT_NORM}/{name}", gradient.norm),
            ]
            if weight.norm:
                ratio = update.update_norm[index] / weight.norm
                values.append(tb_protos.scalar(f"{tags.UPDATE_RATIO}/{name}", ratio))
        self._train.write(step, values)

    def write_score(self, step: int, name: str, score: Score) -> None:
        """Accuracy and loss of an evaluation called `name`, as from `tags.score_tag`."""
        values = {f"{tags.ACCURACY}/{name}": score.accuracy, f"{tags.LOSS}/{name}": score.loss}
        self._eval.write(step, [tb_protos.scalar(*value) for value in values.items()])

    def write_class_scores(self, step: int, name: str, score: Score, split: Split, class_names: Sequence[str]) -> None:
        """Accuracy and precision-recall curve of each class; no curves of more than `figures.MAX_CLASSES`.

        Tags have the split alone, so that the final evaluation, with test-time augmentation, continues the others.
        """
        split_name, values = name.partition("/")[0], []
        for class_name, accuracy in zip(class_names, score.per_class(), strict=True):
            values.append(tb_protos.scalar(f"{tags.CLASS_ACCURACY}/{split_name}/{class_name}", accuracy))
        if len(class_names) <= figures.MAX_CLASSES and np.isfinite(score.probabilities).all():
            for index, (class_name, probabilities) in enumerate(zip(class_names, score.probabilities.T, strict=True)):
                tag = f"{tags.PRECISION_RECALL}/{split_name}/{class_name}"
                values.append(tb_protos.pr_curve(tag, split.labels == index, probabilities))
        self._eval.write(step, values)
        self._eval.flush()

    def write_mistakes(
        self, step: int, name: str, score: Score, split: Split, class_names: Sequence[str], mistakes: np.ndarray
    ) -> None:
        """Images of the mistakes and, where it can be drawn, of the confusion matrix; the projector's embedding."""
        split_name = name.partition("/")[0]
        values = [tb_protos.image(f"{tags.MISTAKES}/{split_name}", mistakes)]
        if len(class_names) <= figures.MAX_CLASSES:
            matrix = figures.confusion_matrix(score.confusion, class_names, f"{name}, step {step}")
            values.append(tb_protos.image(f"{tags.CONFUSION}/{split_name}", matrix))
        if score.features is not None and np.isfinite(score.features).all() and np.isfinite(score.probabilities).all():
            self._write_embedding(step, score, split, class_names)
        self._eval.write(step, values)
        self._eval.flush()

    def write_result(self, step: int, scalars: Mapping[str, float]) -> None:
        """The run's metrics under HPARAMS, and its end."""
        self._result.write(step, [tb_protos.scalar(f"{tags.FINAL}/{tag}", value) for tag, value in scalars.items()])
        self._result.write(step, [tb_protos.hparams_end()])

    def truncate_after(self, train_step: int, eval_step: int) -> None:
        """Remove what was written of training after `train_step`, and of evaluations after `eval_step`."""
        for events in self._towers:
            events.close()  # its file is replaced
        for path in self._train_dir.glob("tower_*"):  # there may have been more towers
            EventWriter(path).truncate_after(train_step)
        self._train.truncate_after(train_step)
        self._eval.truncate_after(eval_step)
        self._result.truncate_after(0)

    def flush(self) -> None:
        """Hand all events to the operating system."""
        for events in (self._train, self._eval, self._result, *self._towers):
            events.flush()

    def _write_embedding(self, step: int, score: Score, split: Split, class_names: Sequence[str]) -> None:
        """The projector's files, in a new directory as TensorBoard reads each only once; earlier ones are removed."""
        count, directory = len(score.features), self._train_dir / f"{PROJECTOR}_{step:08}"
        columns = projector.metadata_columns(split.labels[:count], score.probabilities[:count], class_names)
        with best_effort.best_effort_writes(directory):
            projector.write(directory, score.features, split.images[:count], columns)
            for other in self._train_dir.glob(f"{PROJECTOR}_*"):
                if other != directory:
                    shutil.rmtree(other)


def _histogram(tag: str, stats: TensorStats):
    return tb_protos.histogram(tag, stats.min, stats.max, stats.counts)


def denormalize(images: np.ndarray, info: DatasetInfo | None) -> np.ndarray:
    """Images [n, side, side, 3] as the model sees them -> levels 0..255 of uint8; without `info`, where each image is
    normalized by itself, its range is stretched."""
    if info:
        levels = images * info.std + np.array(info.mean)
    else:
        low, high = (reduce(images, axis=(1, 2, 3), keepdims=True) for reduce in (np.min, np.max))
        levels = 255 * (images - low) / np.maximum(high - low, 1e-6)
    return np.clip(np.round(levels), 0, 255).astype(np.uint8)

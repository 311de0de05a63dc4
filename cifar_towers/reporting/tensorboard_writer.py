"""What TensorBoard shows of a run: its training, its evaluations, each tower, what it came to.

Tags never hold a tower's prefix, so they are the same for any number of towers: what is said of each tower has one tag
and a directory for every tower, which TensorBoard lays over each other in one chart.
"""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from cifar_towers.data.dataset import Split
from cifar_towers.evaluation.score import Score
from cifar_towers.reporting import figures, graph_layout, jsonl, projector, tb_protos
from cifar_towers.reporting.event_files import Events
from cifar_towers.towers import Tower
from cifar_towers.training.results import TensorStats, UpdateDiagnostics

TRAIN, EVAL, RESULT, PROJECTOR = "train", "eval", "result", "projector"  # beside one directory a tower
LAYOUT = {
    "learning": {
        "training loss, raw and smoothed": ["loss$", "losses/total_loss$", "losses/cross_entropy$"],
        "evaluation accuracy": ["accuracy/.*"],
        "training accuracy (batch)": ["accuracy$"],
        "evaluation loss": ["loss/.*"],
    },
    "health": {
        "gradient norm": ["health/gradient_norm"],
        "update-to-weight ratio": ["update_ratio/.*kernel"],
        "activation sparsity": ["sparsity/.*"],
        "bad steps and rollbacks": ["health/bad_steps", "health/rollbacks"],
        "learning rates": ["learning_rate/.*"],
    },
    "tower agreement": {
        "loss of each tower": ["towers/loss"],
        "gradient norm of each tower": ["towers/gradient_norm"],
        "cosine similarity to the mean gradient": ["towers/cosine"],
        "gradient noise scale, examples": ["towers/gradient_noise_scale"],
    },
    "speed": {
        "throughput, images/s": ["speed/images_per_sec"],
        "share of the time waiting for input": ["speed/input_wait"],
        "memory, MB": ["memory/.*"],
        "GPU utilization, %": ["gpu_utilisation/.*"],
    },
    "errors by class": {"accuracy of each class": ["class_accuracy/.*"]},
}


class Summaries:
    """The event files of a run's directory."""

    def __init__(self, train_dir: Path, towers: Sequence[Tower]):
        self._train_dir = train_dir
        self._train, self._eval, self._result = (Events(train_dir / name) for name in (TRAIN, EVAL, RESULT))
        self._towers = [Events(train_dir / tower.name) for tower in towers]

    def begin(self, step: int, settings: Mapping, texts: Mapping[str, str]) -> None:
        """A start of the run at `step`: its settings for the table of runs, texts in Markdown by title, the charts."""
        self._train.write(step, [tb_protos.layout(LAYOUT), *(tb_protos.text(*text) for text in texts.items())])
        if step == 0:
            self._result.write(0, [tb_protos.hparams(settings)])

    def graph(self, function) -> None:
        """Draws a traced step (`ConcreteFunction`), its towers as boxes."""
        handles = {id(variable.handle): variable.name.removesuffix(":0") for variable in function.variables}
        captured = function.graph.captures
        variables = {inner.op.name: handles[id(outer)] for outer, inner in captured if id(outer) in handles}
        graph = graph_layout.drawn(function.graph.as_graph_def(add_shapes=True), variables)
        self._train.write(0, graph_def=graph.SerializeToString())

    def training(self, step: int, scalars: Mapping[str, float]) -> None:
        """Scalars of one step by tag; those that are None are left out."""
        self._train.write(step, [tb_protos.scalar(tag, value) for tag, value in scalars.items() if value is not None])

    def towers(self, step: int, scalars: Mapping[str, Sequence[float]]) -> None:
        """Scalars of each tower, tag -> [K]."""
        for index, events in enumerate(self._towers):
            events.write(step, [tb_protos.scalar(f"towers/{tag}", each[index]) for tag, each in scalars.items()])

    def images(self, step: int, tag: str, images: np.ndarray, labels: Sequence[str]) -> None:
        """A row of images [n, height, width, 3] of uint8 over their labels."""
        self._train.write(step, [tb_protos.image(tag, figures.image_grid(images, labels, columns=4))])

    def activations(self, step: int, layers: Sequence[str], stats: TensorStats) -> None:
        """Histogram and sparsity of each layer's output."""
        shown = []
        for index, layer in enumerate(layers):
            output = stats.at(index)
            shown.append(_histogram(f"activations/{layer}", output))
            shown.append(tb_protos.scalar(f"sparsity/{layer}", output.zero_fraction))
        self._train.write(step, shown)

    def update(self, step: int, weights: Sequence[str], update: UpdateDiagnostics) -> None:
        """Histogram and norm of each weight and its mean gradient, and the update-to-weight ratio."""
        shown = []
        for index, name in enumerate(weights):
            weight, gradient = update.weights.at(index), update.gradients.at(index)
            shown += [
                _histogram(f"weights/{name}", weight),
                _histogram(f"gradients/{name}", gradient),
                tb_protos.scalar(f"weight_norm/{name}", weight.norm),
                tb_protos.scalar(f"gradient_norm/{name}", gradient.norm),
            ]
            if weight.norm:
                shown.append(tb_protos.scalar(f"update_ratio/{name}", update.update_norm[index] / weight.norm))
        self._train.write(step, shown)

    def evaluation(self, step: int, which: str, score: Score) -> None:
        """Accuracy and loss of one score; `which` names split, weights and test-time augmentation."""
        told = {"accuracy": score.accuracy, "loss": score.loss}
        self._eval.write(step, [tb_protos.scalar(f"{name}/{which}", value) for name, value in told.items()])

    def classes(self, step: int, which: str, score: Score, split: Split, class_names: Sequence[str]) -> None:
        """Each class's accuracy in a score over `split`, and of up to `figures.MAX_CLASSES` their precision-recall
        curves.

        Tags have the split alone, so that the last evaluation, with test-time augmentation, goes on where others ended.
        """
        name_of_split, shown = which.partition("/")[0], []
        for name, accuracy in zip(class_names, score.per_class(), strict=True):
            shown.append(tb_protos.scalar(f"class_accuracy/{name_of_split}/{name}", accuracy))
        if len(class_names) <= figures.MAX_CLASSES and np.isfinite(score.probabilities).all():
            for index, (name, probability) in enumerate(zip(class_names, score.probabilities.T, strict=True)):
                shown.append(
                    tb_protos.pr_curve(f"precision_recall/{name_of_split}/{name}", split.labels == index, probability)
                )
        self._eval.write(step, shown)
        self._eval.flush()

    def failures(
        self, step: int, which: str, score: Score, split: Split, class_names: Sequence[str], mistakes: np.ndarray
    ) -> None:
        """Pictures of where a score over `split` fails: the confusion matrix where it can be drawn, the mistakes, and
        how the examples lie to each other before the last layer. Tags as those of `classes`."""
        name_of_split = which.partition("/")[0]
        shown = [tb_protos.image(f"mistakes/{name_of_split}", mistakes)]
        if len(class_names) <= figures.MAX_CLASSES:
            matrix = figures.confusion_matrix(score.confusion, class_names, f"{which}, step {step}")
            shown.append(tb_protos.image(f"confusion/{name_of_split}", matrix))
        if score.features is not None and np.isfinite(score.features).all() and np.isfinite(score.probabilities).all():
            self._embedding(step, score, split, class_names)
        self._eval.write(step, shown)
        self._eval.flush()

    def end(self, step: int, scalars: Mapping[str, float]) -> None:
        """What the run came to, for the table of runs."""
        self._result.write(step, [tb_protos.scalar(f"final/{tag}", value) for tag, value in scalars.items()])
        self._result.write(step, [tb_protos.hparams_end()])

    def keep(self, trained: int, evaluated: int) -> None:
        """Drops what was written of later steps, as a run does that goes back: of training, and of evaluations."""
        for events in self._towers:
            events.close()  # its file is replaced
        for path in self._train_dir.glob("tower_*"):  # there may have been more of them
            Events(path).keep(trained)
        self._train.keep(trained)
        self._eval.keep(evaluated)
        self._result.keep(0)

    def flush(self) -> None:
        """Hands everything to the operating system."""
        for events in (self._train, self._eval, self._result, *self._towers):
            events.flush()

    def _embedding(self, step: int, score: Score, split: Split, class_names: Sequence[str]) -> None:
        """A directory a step, as TensorBoard reads each only once; the one before goes when the new one stands."""
        count, place = len(score.features), self._train_dir / f"{PROJECTOR}_{step:08}"
        predicted, confidence = score.probabilities[:count].argmax(1), score.probabilities[:count].max(1)
        facts = projector.describe(split.labels[:count], predicted, confidence, np.arange(count), class_names)
        with jsonl.best_effort_writes(place):
            projector.write(place, score.features, split.images[:count], facts)
            for other in self._train_dir.glob(f"{PROJECTOR}_*"):
                if other != place:
                    shutil.rmtree(other)


def _histogram(tag: str, stats: TensorStats):
    return tb_protos.histogram(tag, stats.min, stats.max, stats.counts)

"""What TensorBoard shows: scalars of the training and of each evaluation, the graph, and notes.

Tags never hold a tower's prefix, so they are the same for any number of towers.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import tensorflow as tf

from cifar_towers.data.dataset import Split
from cifar_towers.evaluation import Score
from cifar_towers.reporting import pictures, records


class Summaries:
    """Event files in `train/` and `eval/` of a run's directory."""

    def __init__(self, train_dir: Path):
        self._going_on = records.GoingOn(train_dir / "{train,eval}", (OSError, tf.errors.OpError))
        self._train = self._eval = tf.summary.create_noop_writer()
        with self._going_on():
            self._train = tf.summary.create_file_writer(str(train_dir / "train"))
            self._eval = tf.summary.create_file_writer(str(train_dir / "eval"))

    def graph(self, function) -> None:
        """Draws a traced step (`ConcreteFunction`), its towers as boxes."""
        with self._going_on(), self._train.as_default():
            tf.summary.graph(function.graph)

    def note(self, title: str, text: str) -> None:
        """A text in Markdown."""
        with self._going_on(), self._train.as_default():
            tf.summary.text(title, text, step=0)

    def training(self, step: int, scalars: Mapping[str, float], losses: Mapping, averages: Mapping) -> None:
        """Scalars of one step; the final tower's loss terms, raw and as moving averages."""
        with self._going_on(), self._train.as_default(step):
            for name, value in scalars.items():
                tf.summary.scalar(name, value)
            for term in losses:
                tf.summary.scalar(f"losses/{term} (raw)", losses[term])
                tf.summary.scalar(f"losses/{term}", averages[term])

    def evaluation(self, step: int, which: str, score: Score) -> None:
        """Accuracy and loss of one score; `which` names split, weights and test-time augmentation."""
        with self._going_on(), self._eval.as_default(step):
            tf.summary.scalar(f"accuracy/{which}", score.accuracy)
            tf.summary.scalar(f"loss/{which}", score.loss)

    def failures(self, step: int, which: str, score: Score, split: Split, class_names: Sequence[str]) -> None:
        """Where a score over `split` fails: each class's accuracy, the confusion matrix, and the surest mistakes."""
        captions = [
            f"{class_names[predicted]} {100 * confidence:.0f} %\nis {class_names[split.labels[example]]}"
            for example, predicted, confidence in zip(*score.mistakes, strict=True)
        ]
        images = split.images[score.mistakes.examples]
        sheet = pictures.contact_sheet(images, captions, f"surest mistakes, {which}, step {step}")
        matrix = pictures.confusion_matrix(score.confusion, class_names, f"{which}, step {step}")
        with self._going_on(), self._eval.as_default(step):
            for name, accuracy in zip(class_names, score.per_class(), strict=True):
                tf.summary.scalar(f"class_accuracy/{which}/{name}", accuracy)
            tf.summary.image(f"confusion/{which}", matrix[None])
            tf.summary.image(f"mistakes/{which}", sheet[None])

    def flush(self) -> None:
        """Puts everything on disk."""
        with self._going_on():
            self._train.flush()
            self._eval.flush()

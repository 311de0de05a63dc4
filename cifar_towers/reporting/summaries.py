"""What TensorBoard shows: scalars of the training and of each evaluation, the graph, and notes.

Tags never hold a tower's prefix, so they are the same for any number of towers.
"""

from collections.abc import Mapping
from pathlib import Path

import tensorflow as tf

from cifar_towers.reporting import records


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

    def evaluation(
        self, step: int, split: str, weights: str, tta: int, accuracy: float, loss: float, count: int
    ) -> None:
        """One score over `count` examples; its tags name split, weights and test-time augmentation."""
        which = f"{split}/{weights}" + (f"_tta{tta}" if tta else "")
        with self._going_on(), self._eval.as_default(step):
            tf.summary.scalar(f"accuracy/{which}", accuracy)
            tf.summary.scalar(f"loss/{which}", loss)

    def flush(self) -> None:
        """Puts everything on disk."""
        with self._going_on():
            self._train.flush()
            self._eval.flush()

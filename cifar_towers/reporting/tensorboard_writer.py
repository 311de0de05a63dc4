"""The event files of a run, for TensorBoard: training, evaluations, and a directory for each of several towers.

The scalars of every tower have the same tags in a directory per tower, so that TensorBoard overlays them in one chart.
A run that resumes writes the steps after its checkpoint again; TensorBoard then drops what it has read of them.
"""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import tensorflow as tf
from tensorboard.plugins.histogram import metadata as histogram_metadata
from tensorboard.plugins.hparams import summary_v2 as hparams_summary

from cifar_towers import files
from cifar_towers.training.results import StepDiagnostics, TensorStats

TRAIN, EVAL = "train", "eval"  # beside one directory per tower


class TensorBoardWriter:
    """The event files of a run's directory. An error of writing is logged once, and ends no run."""

    def __init__(self, train_dir: Path):
        self._train_dir = train_dir
        self._writer = functools.cache(lambda name: tf.summary.create_file_writer(str(train_dir / name)))
        self._best_effort = files.BestEffortWrites(train_dir / TRAIN, (OSError, tf.errors.OpError))

    def start(self, hparams: Mapping) -> None:
        """Write the settings of a run that starts at step 0, for HPARAMS; remove the events of an aborted start.

        TensorBoard shows the first settings that it reads of a run.
        """
        with self._best_effort:
            for name in (TRAIN, EVAL, "tower_*"):
                for path in self._train_dir.glob(f"{name}/{files.EVENT_FILES}"):
                    path.unlink()
            with self._writer(EVAL).as_default(0):
                hparams_summary.hparams(dict(hparams), trial_id="")

    def write(
        self,
        name: str,
        step: int,
        scalars: Mapping[str, float],
        images: Mapping[str, np.ndarray] | None = None,
        histograms: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Write values by tag into the directory `name`: scalars, images [h, w, 3] of uint8, and buckets [b, 3]."""
        with self._best_effort:
            writer = self._writer(name)
            with writer.as_default(step):
                for tag, value in scalars.items():
                    tf.summary.scalar(tag, value)
                for tag, picture in (images or {}).items():
                    tf.summary.image(tag, picture[None])
                for tag, buckets in (histograms or {}).items():
                    metadata = histogram_metadata.create_summary_metadata(None, None)
                    tf.summary.write(tag, buckets, metadata=metadata)
            writer.flush()

    def write_graph(self, function: tf.types.experimental.ConcreteFunction) -> None:
        """Draw a traced step, its towers as boxes, without its library of functions, which would be drawn beside it."""
        graph = function.graph.as_graph_def(add_shapes=True)
        graph.ClearField("library")
        with self._best_effort, self._writer(TRAIN).as_default(0):
            tf.summary.graph(graph)

    def write_tower_scalars(self, step: int, scalars: Mapping[str, Sequence[float]]) -> None:
        """Write the scalars of each of several towers: {tag: [K]}."""
        for index, values in enumerate(zip(*scalars.values(), strict=True)):
            self.write(f"tower_{index}", step, dict(zip(scalars, values, strict=True)))

    def write_diagnostics(
        self,
        step: int,
        picture: np.ndarray,
        diagnostics: StepDiagnostics,
        layers: Sequence[str],
        weights: Sequence[str],
    ) -> None:
        """Write a picture of the input, layers' outputs and sparsity, weights, mean gradients, and update ratios."""
        histograms = _histograms("activations", layers, diagnostics.activations)
        histograms |= _histograms("weights", weights, diagnostics.weights)
        histograms |= _histograms("gradients", weights, diagnostics.gradients)
        sparsity = zip(layers, diagnostics.activations.zero_fraction, strict=True)
        scalars = {f"sparsity/{layer}": share for layer, share in sparsity}
        norms = diagnostics.weights.norm, diagnostics.gradients.norm, diagnostics.update_norm
        for name, norm, gradient_norm, update_norm in zip(weights, *norms, strict=True):
            scalars |= {f"weight_norm/{name}": norm, f"gradient_norm/{name}": gradient_norm}
            if norm:
                scalars[f"update_ratio/{name}"] = update_norm / norm
        self.write(TRAIN, step, scalars, {"input/augmented": picture}, histograms)


def _histograms(kind: str, names: Sequence[str], stats: TensorStats) -> dict[str, np.ndarray]:
    """Return the buckets [b, 3] of lower edge, upper edge and count, as TensorBoard stores them, by tag."""
    histograms = {}
    for name, low, high, counts in zip(names, stats.min, stats.max, stats.counts, strict=True):
        edges = np.linspace(float(low), float(high), len(counts) + 1)
        if low == high:  # TensorBoard draws a single value in the last bucket
            counts = np.append(np.zeros(len(counts) - 1), counts.sum())
        histograms[f"{kind}/{name}"] = np.stack([edges[:-1], edges[1:], counts], 1)
    return histograms

"""The event files of a run, for TensorBoard: one directory of the training, one of its evaluations.

A run that resumes writes the steps after its checkpoint again; TensorBoard then drops what it has
read of them.
"""

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorboard.plugins.histogram import metadata as histogram_metadata
from tensorboard.plugins.hparams import summary_v2 as hparams_summary
from tensorboard.plugins.scalar.summary_v2 import scalar_pb

from cifar_towers import files
from cifar_towers.training.diagnostics import StepDiagnostics

TRAIN, EVAL = files.EVENT_DIRECTORIES
NUM_BUCKETS = 30  # of a histogram, as in `tf.summary.histogram`
# the name of a node that TensorFlow made for a gradient; "^" is before the name of a control input
GRADIENT_OF_TOWER = re.compile(r"^(\^?)gradient_tape/(tower_\d+)(?=/)")
HISTOGRAM = histogram_metadata.create_summary_metadata(None, None)


class TensorBoardWriter:
    """The event files of a run's directory. An error of writing is logged once, and ends no run."""

    def __init__(self, train_dir: Path):
        self._train_dir = train_dir
        self._writer = functools.cache(
            lambda name: tf.summary.create_file_writer(str(train_dir / name))
        )
        self._best_effort = files.BestEffortWrites(train_dir / TRAIN, (OSError, tf.errors.OpError))

    def start(self, hparams: Mapping) -> None:
        """Write the settings of a run that starts at step 0, for HPARAMS; remove the events of an
        aborted start.

        TensorBoard shows the first settings that it reads of a run.
        """
        with self._best_effort:
            for name in files.EVENT_DIRECTORIES:
                for path in self._train_dir.glob(f"{name}/{files.EVENT_FILES}"):
                    path.unlink()
            with self._writer(EVAL).as_default(0):
                hparams_summary.hparams(dict(hparams), trial_id="")

    def write(
        self,
        name: str,
        step: int,
        scalars: Mapping[str, float],
        images: Mapping[str, bytes] | None = None,
        histograms: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Write values by tag into the directory `name`: scalars, PNG images and histograms of
        arrays.
        """
        with self._best_effort:
            writer = self._writer(name)
            with writer.as_default(step):
                # as one event: ten calls of `tf.summary.scalar` take as long as a step on a GPU
                if scalars:
                    summaries = [
                        scalar_pb(tag, value).SerializeToString() for tag, value in scalars.items()
                    ]
                    # joined, they are one `Summary`
                    tf.summary.experimental.write_raw_pb(b"".join(summaries))
                for tag, picture in (images or {}).items():
                    tf.summary.image(tag, tf.io.decode_png(picture, channels=3)[None])
                for tag, values in (histograms or {}).items():
                    tf.summary.write(tag, _histogram(values), metadata=HISTOGRAM)
            writer.flush()

    def write_graph(self, function: tf.types.experimental.ConcreteFunction) -> None:
        """Draw a traced step, its towers as boxes, without its library of functions, which would be
        drawn beside it.

        Variables are drawn as a box of their own; TensorFlow has them in the tower that reads them
        first. Gradients are drawn in their tower, not in "gradient_tape".
        """
        graph = function.graph.as_graph_def(add_shapes=True)
        graph.ClearField("library")
        variables = _names_of_variables(function.graph)
        for node in graph.node:
            node.name = _drawn_name(node.name, variables)
            for index, name in enumerate(node.input):
                node.input[index] = _drawn_name(name, variables)
        with self._best_effort, self._writer(TRAIN).as_default(0):
            tf.summary.graph(graph)

    def write_diagnostics(self, step: int, picture: bytes, diagnostics: StepDiagnostics) -> None:
        """Write a picture of the input, layers' outputs with their sparsity, weights, and mean
        gradients.
        """
        histograms = {}
        for layer, values in diagnostics.activations.items():
            histograms[f"activations/{layer}"] = values
        for variable, values in diagnostics.weights.items():
            histograms[f"weights/{variable}"] = values
        for variable, values in diagnostics.gradients.items():
            histograms[f"gradients/{variable}"] = values

        sparsity = {}
        for layer, values in diagnostics.activations.items():
            sparsity[f"sparsity/{layer}"] = np.mean(values == 0)
        self.write(TRAIN, step, sparsity, {"input/augmented": picture}, histograms)


def _names_of_variables(graph: Any) -> dict[str, str]:
    """Return the name by which each variable is drawn, by the name of its node in a traced graph
    (a `FuncGraph`).
    """
    variables = {id(variable.handle): variable.name for variable in graph.variables}
    names = {}
    for outside, inside in graph.captures:
        if id(outside) in variables:
            path = variables[id(outside)].partition(":")[0]
            names[inside.op.name] = graph.unique_name(f"variables/{path}")
    return names


def _drawn_name(name: str, variables: Mapping[str, str]) -> str:
    return variables.get(name) or GRADIENT_OF_TOWER.sub(r"\1\2/gradient_tape", name)


def _histogram(values: np.ndarray) -> tf.Tensor:
    """Return [30, 3] edges and counts of the finite values; `tf.summary.histogram` takes a second
    for a million.
    """
    finite = values if np.isfinite(values.sum()) else values[np.isfinite(values)]
    # float32 has too few numbers for the edges between values that are nearly equal
    counts, edges = np.histogram(finite.astype(np.float64), NUM_BUCKETS)
    return tf.constant(np.stack([edges[:-1], edges[1:], counts], 1), tf.float64)

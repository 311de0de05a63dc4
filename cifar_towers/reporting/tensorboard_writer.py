"""The event files of a run: training, evaluations, one directory per tower, and the result.

They are appended to, truncated after a step, and never a reason for a run to end.
"""

import contextlib
import functools
import itertools
import os
import platform
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import tensorflow as tf
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.plugins.histogram import metadata as histogram_metadata
from tensorboard.plugins.hparams import api_pb2
from tensorboard.plugins.hparams.summary import session_end_pb
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.image import metadata as image_metadata
from tensorboard.plugins.scalar.summary_v2 import scalar_pb
from tensorboard.util.tensor_util import make_tensor_proto
from tensorflow.core.framework.graph_pb2 import GraphDef

from cifar_towers import files
from cifar_towers.reporting import figures, tags
from cifar_towers.training.diagnostics import StepDiagnostics

TRAIN, EVAL, RESULT = "train", "eval", "result"  # beside one directory per tower
ERRORS = (OSError, tf.errors.OpError)  # of writing
FILE_VERSION = "brain.Event:2"  # in the event that a file begins with
_file_numbers = itertools.count()


class EventWriter:
    """The event files of one directory, which TensorBoard shows as one run.

    The first event begins a file. An event after a failure, or after the file was removed, begins another, so that only
    what a full disk truncated is lost. A failure is logged once.
    """

    def __init__(self, directory: Path):
        self._directory, self._best_effort = directory, files.BestEffortWrites(directory, ERRORS)
        self._path = directory
        self._writer: tf.io.TFRecordWriter | None = None

    def write(self, step: int, summaries: Sequence = (), **fields) -> None:
        """Append one event: `Summary` protos of a step, or another field of `Event`, such as graph_def."""
        with self._best_effort:
            try:
                writer = self._writer if self._writer and self._path.exists() else self._open()
                _append(writer, make_event(step, summaries, **fields))
            except ERRORS:
                self.close()
                raise

    def truncate_after(self, step: int) -> None:
        """Remove all events after `step`. Each file is replaced atomically, or removed if it has no other events."""
        self.close()
        with self._best_effort:
            for path in sorted(self._directory.glob(files.EVENT_FILES)):
                events = list(read_events(path))
                remaining = [event for event in events if event.step <= step]
                if events and not remaining:
                    path.unlink()
                elif len(remaining) < len(events):
                    write_events(path, remaining)

    def close(self) -> None:
        """End the file; the next event begins a new one."""
        writer, self._writer = self._writer, None
        with contextlib.suppress(*ERRORS):  # every event was flushed when it was written
            if writer:
                writer.close()

    def _open(self) -> tf.io.TFRecordWriter:
        self.close()
        self._directory.mkdir(parents=True, exist_ok=True)
        self._path = new_event_file(self._directory)
        self._writer = tf.io.TFRecordWriter(str(self._path))
        try:
            _append(self._writer, make_event(0, file_version=FILE_VERSION))
        except ERRORS:
            self.close()
            self._path.unlink(missing_ok=True)  # otherwise every event on a full disk would leave an empty file
            raise
        return self._writer


def _append(writer: tf.io.TFRecordWriter, event: Event) -> None:
    writer.write(event.SerializeToString())
    writer.flush()


def new_event_file(directory: Path) -> Path:
    """Return the path of a new event file. TensorBoard reads those of one second in the order of their numbers."""
    name = f"{time.time():.0f}.{platform.node()}.{os.getpid()}.{next(_file_numbers):06d}"
    return directory / files.EVENT_FILES.replace("*", name)


def make_event(step: int, summaries: Sequence = (), **fields) -> Event:
    """Make an event of `Summary` protos, of TensorBoard's class or of TensorFlow's, or of another field of `Event`."""
    if summaries:
        fields["summary"] = Summary.FromString(b"".join(summary.SerializeToString() for summary in summaries))
    return Event(step=step, wall_time=time.time(), **fields)


def read_events(path: Path) -> Iterator[Event]:
    """Yield the events of a file, up to a truncated one."""
    try:
        for record in tf.data.TFRecordDataset(str(path)).as_numpy_iterator():
            yield Event.FromString(record)
    except tf.errors.DataLossError:
        return


def write_events(path: Path, events: Iterable[Event]) -> None:
    """Write or replace an event file in one step."""
    with files.temporary_beside(path.with_name("kept")) as temporary:  # TensorBoard reads names with `tfevents`
        with tf.io.TFRecordWriter(str(temporary)) as writer:
            for event in events:
                writer.write(event.SerializeToString())
        os.replace(temporary, path)


class TensorBoardWriter:
    """The event files of a run's directory."""

    def __init__(self, train_dir: Path):
        self._train_dir = train_dir
        self._events = functools.cache(lambda name: EventWriter(train_dir / name))

    def write(self, name: str, step: int, scalars: Mapping[str, float], others: Iterable = ()) -> None:
        """Write one event into the directory `name`: scalars by tag, and other summaries."""
        self._events(name).write(step, [*(scalar_pb(tag, value) for tag, value in scalars.items()), *others])

    def write_settings(self, hparams: Mapping) -> None:
        """Write the settings of a run that starts at step 0, for HPARAMS. TensorBoard shows the first ones of a run."""
        self._events(RESULT).write(0, [hparams_pb(hparams, trial_id="")])

    def write_graph(self, function) -> None:
        """Draw a traced step (`ConcreteFunction`), its towers as boxes."""
        handles = {id(variable.handle): variable.name.removesuffix(":0") for variable in function.variables}
        captured = function.graph.captures
        variables = {inner.op.name: handles[id(outer)] for outer, inner in captured if id(outer) in handles}
        graph = relabel_graph(function.graph.as_graph_def(add_shapes=True), variables)
        self._events(TRAIN).write(0, graph_def=graph.SerializeToString())

    def write_tower_scalars(self, step: int, scalars: Mapping[str, Sequence[float]]) -> None:
        """Write the scalars of each tower: {tag: [K]}."""
        for index, values in enumerate(zip(*scalars.values(), strict=True)):
            self.write(f"tower_{index}", step, dict(zip(scalars, values, strict=True)))

    def write_diagnostics(self, step: int, diagnostics: StepDiagnostics) -> None:
        """Write each layer's output and sparsity, each weight and its mean gradient."""
        tensors = (
            (tags.ACTIVATIONS, diagnostics.activations),
            (tags.WEIGHTS, diagnostics.weights),
            (tags.GRADIENTS, diagnostics.gradients),
        )
        histograms = []
        for prefix, values in tensors:
            for name, array in values.items():
                counts, _ = np.histogram(array, 30)
                histograms.append(histogram(f"{prefix}/{name}", array.min(), array.max(), counts))
        scalars = {
            f"{tags.SPARSITY}/{layer}": float(np.mean(array == 0)) for layer, array in diagnostics.activations.items()
        }
        self.write(TRAIN, step, scalars, histograms)

    def write_result(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write the run's metrics for HPARAMS, and that the run has ended successfully.

        If a directory has several such ends, TensorBoard reads only the first.
        """
        metrics = {f"{tags.FINAL}/{tag}": value for tag, value in scalars.items()}
        self.write(RESULT, step, metrics, [session_end_pb(api_pb2.STATUS_SUCCESS)])

    def truncate_after(self, train_step: int, eval_step: int) -> None:
        """Remove what was written of training after `train_step`, and of evaluations after `eval_step`.

        The settings under HPARAMS stay unless `train_step` is negative.
        """
        towers = (path.name for path in self._train_dir.glob("tower_*"))  # there may have been more towers
        for name in (TRAIN, *towers):
            self._events(name).truncate_after(train_step)
        self._events(EVAL).truncate_after(eval_step)
        self._events(RESULT).truncate_after(min(train_step, 0))


def image(tag: str, pixels: np.ndarray) -> Summary:
    """Make the summary of an image [height, width, 3] of uint8.

    TensorBoard's own builder would open a TensorFlow session to encode it; the layout is that of its `summary_v2`.
    """
    height, width = pixels.shape[:2]
    content = np.array([str(width).encode(), str(height).encode(), figures.png(pixels)], object)
    return _summary(tag, image_metadata.create_summary_metadata(None, None), content)


def histogram(tag: str, low: float, high: float, counts: np.ndarray) -> Summary:
    """Make the summary of a histogram from the counts [b] of equal buckets between low and high.

    TensorBoard's own builder takes values that are not counted yet; the layout is that of its `summary_v2`. If low
    equals high, the last bucket holds all counts. Without counts everything is zero.
    """
    low, high = (float(low), float(high)) if np.any(counts) else (0.0, 0.0)
    edges = np.linspace(low, high, len(counts) + 1)
    if low == high:
        counts = np.append(np.zeros(len(counts) - 1), np.sum(counts))
    buckets = np.stack([edges[:-1], edges[1:], counts], 1)
    return _summary(tag, histogram_metadata.create_summary_metadata(None, None), buckets)


def _summary(tag: str, metadata: SummaryMetadata, content: np.ndarray) -> Summary:
    return Summary(value=[Summary.Value(tag=tag, metadata=metadata, tensor=make_tensor_proto(content))])


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

    The `variables`, {placeholder name: variable name}, are drawn in a box of their own. In the scope of their first
    read, which is that of tower 0, the other towers would seem to read from tower 0.
    """
    unscoped = {node.name for node in graph.node if "/" not in node.name}
    names = {node.name: _name_to_draw(node.name, unscoped, variables) for node in graph.node}
    relabeled = GraphDef(versions=graph.versions, node=graph.node)
    for node in relabeled.node:
        node.name = names[node.name]
        node.attr.pop("_class", None)
        for index, source in enumerate(node.input):
            name = source.lstrip("^").partition(":")[0]
            node.input[index] = source.replace(name, names[name], 1)
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

"""What TensorBoard's projector shows: which examples lie close to each other in a layer's output, and why."""

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from google.protobuf import text_format
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.plugins.projector.metadata import PROJECTOR_FILENAME
from tensorboard.plugins.projector.projector_config_pb2 import EmbeddingInfo, ProjectorConfig, SpriteMetadata
from tensorboard.summary.writer.record_writer import RecordWriter

from cifar_towers.files import atomic_io
from cifar_towers.reporting import figures

FEATURES, METADATA, SPRITE, EVENTS = "features.tsv", "metadata.tsv", "sprite.png", "events.out.tfevents.0.projector"
MOST_PIXELS = 8192  # a side of the largest sprite that TensorBoard takes


def write(directory: Path, features: np.ndarray, images: np.ndarray, columns: Mapping[str, Sequence]) -> None:
    """Writes vectors, pictures and facts of n examples, and makes `directory` one of TensorBoard's runs.

    TensorBoard looks for the config when it first sees an event file, which is why that comes last. It keeps the
    vectors that it has read, and would show newer facts with them: give every state a directory of its own, and
    remove the last one's.

    Args:
      features: [n, d] numbers.
      images: [n, side, side, 3] of uint8.
      columns: name -> n values, as from `describe`; at least two.

    Raises:
      ValueError: TensorBoard could not show them. OSError: a file cannot be written.
    """
    side = images.shape[1]
    sizes = {"features": len(features), "images": len(images)} | {name: len(column) for name, column in columns.items()}
    if len(set(sizes.values())) > 1 or not len(features):
        raise ValueError(f"the projector shows equally many of everything, and at least one: {sizes}")
    if not np.isfinite(features).all():
        raise ValueError("the projector shows finite numbers only")
    if len(images) > (MOST_PIXELS // side) ** 2:
        raise ValueError(
            f"the projector shows {(MOST_PIXELS // side) ** 2} images of {side} x {side}, not {len(images)}"
        )
    embedding = EmbeddingInfo(
        tensor_name=Path(FEATURES).stem,
        tensor_shape=features.shape,
        tensor_path=FEATURES,
        metadata_path=METADATA,
        sprite=SpriteMetadata(image_path=SPRITE, single_image_dim=[side, side]),
    )
    directory.mkdir(parents=True, exist_ok=True)
    atomic_io.write_whole(
        directory / FEATURES, _table([f"{number:.6g}" for number in row] for row in features.tolist())
    )
    facts = [columns, *zip(*columns.values(), strict=True)]
    atomic_io.write_whole(directory / METADATA, _table([" ".join(str(fact).split()) for fact in row] for row in facts))
    atomic_io.write_whole(directory / SPRITE, figures.png(figures.sprite(images, side)))
    config = text_format.MessageToString(ProjectorConfig(embeddings=[embedding]))
    atomic_io.write_whole(directory / PROJECTOR_FILENAME, config.encode())
    if not list(directory.glob("*tfevents*")):
        with (directory / EVENTS).open("wb") as file:
            RecordWriter(file).write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())


def describe(
    labels: np.ndarray, predicted: np.ndarray, confidence: np.ndarray, examples: np.ndarray, class_names: Sequence[str]
) -> dict[str, list]:
    """What each example is, what it was taken for and how surely (a probability), whether rightly, and its place.

    All are [n]; the classes are indices into `class_names`.
    """
    return {
        "class": [class_names[label] for label in labels],
        "predicted": [class_names[label] for label in predicted],
        "confidence": [f"{probability:.4f}" for probability in confidence],
        "right": ["yes" if label == taken else "no" for label, taken in zip(labels, predicted, strict=True)],
        "example": list(examples),
    }


def _table(rows: Iterable[Iterable[str]]) -> bytes:
    """Values with tabs between them, a row a line."""
    return "".join("\t".join(row) + "\n" for row in rows).encode()

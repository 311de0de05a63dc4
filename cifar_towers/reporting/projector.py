"""TensorBoard's projector: the features of examples, with a thumbnail and metadata of each."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from google.protobuf import text_format
from tensorboard.plugins.projector import EmbeddingInfo, ProjectorConfig, SpriteMetadata
from tensorboard.plugins.projector.metadata import PROJECTOR_FILENAME

from cifar_towers import files
from cifar_towers.reporting import figures
from cifar_towers.reporting.event_files import EventWriter

FEATURES, METADATA, SPRITE = "features.tsv", "metadata.tsv", "sprite.png"
MAX_SPRITE_PIXELS = 8192  # of height and width, in TensorBoard


def write(directory: Path, features: np.ndarray, images: np.ndarray, columns: Mapping[str, Sequence]) -> None:
    """Write features [n, d], thumbnails [n, size, size, 3] of uint8, and at least two columns of metadata by name.

    TensorBoard reads the config when it first reads an event file, which is therefore written last. TensorBoard caches
    the features that it has read, so another state needs another directory.

    Raises:
      ValueError: TensorBoard could not show them. OSError: a file cannot be written.
    """
    image_size = images.shape[1]
    sizes = {"features": len(features), "images": len(images)} | {name: len(column) for name, column in columns.items()}
    if len(set(sizes.values())) > 1 or not len(features):
        raise ValueError(f"the projector needs the same number of each, and at least one: {sizes}")
    if not np.isfinite(features).all():
        raise ValueError("the projector shows finite features only")
    most = (MAX_SPRITE_PIXELS // image_size) ** 2
    if len(images) > most:
        raise ValueError(f"the projector shows {most} images of {image_size} x {image_size}, not {len(images)}")
    embedding = EmbeddingInfo(
        tensor_name=Path(FEATURES).stem,
        tensor_shape=features.shape,
        tensor_path=FEATURES,
        metadata_path=METADATA,
        sprite=SpriteMetadata(image_path=SPRITE, single_image_dim=[image_size, image_size]),
    )
    feature_rows = ([f"{number:.6g}" for number in row] for row in features.tolist())
    metadata_rows = [columns, *zip(*columns.values(), strict=True)]
    contents = {
        FEATURES: _tsv(feature_rows),
        METADATA: _tsv([" ".join(str(value).split()) for value in row] for row in metadata_rows),
        SPRITE: figures.png(figures.sprite(images)),
        PROJECTOR_FILENAME: text_format.MessageToString(ProjectorConfig(embeddings=[embedding])).encode(),
    }
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        files.write_whole(directory / name, content)
    if not list(directory.glob("*tfevents*")):
        EventWriter(directory).write(0)


def metadata_columns(labels: np.ndarray, probabilities: np.ndarray, class_names: Sequence[str]) -> dict[str, list]:
    """Return metadata of n examples, from their labels [n] and the predicted probabilities [n, C]."""
    predicted = probabilities.argmax(1)
    return {
        "class": [class_names[label] for label in labels],
        "predicted": [class_names[label] for label in predicted],
        "confidence": [f"{probability:.4f}" for probability in probabilities.max(1)],
        "right": ["yes" if right else "no" for right in labels == predicted],
        "example": list(range(len(labels))),
    }


def _tsv(rows: Iterable[Iterable[str]]) -> bytes:
    return "".join("\t".join(row) + "\n" for row in rows).encode()

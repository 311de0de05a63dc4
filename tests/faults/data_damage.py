"""Damage to the prepared CIFAR-10 that reading it must detect, also where the checksums of its records are right."""

import functools
import io
import os
import random
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from PIL import Image

from cifar_towers.data import cifar10
from cifar_towers.data.dataset import CLASSES
from cifar_towers.errors import DataError
from tests.faults import harness, hooks, subjects
from tests.faults.damage import BYTE_FAULTS, damage_bytes
from tests.faults.harness import Experiment, Failed, Trial, check

PREPARED = Path(os.environ.get("TFDS_DATA_DIR", "")).expanduser().resolve()
SPLITS = ("train", "test")
METADATA = ("dataset_info.json", "features.json")
FAULTS = (
    *("change a pixel", "exchange labels", "swap records", "repeat a record", "other images"),
    *("flip a bit", "truncate", "delete the split"),
    *("change a label", "drop the last", "drop a record", "change an id"),
    *("flip a bit", "change a byte", "empty", "zero a block", "zero", "garble"),
    *("swap splits", *["damage metadata"] * 4),
)
PROGRAM_TRIALS = 8  # the first trials, a fault each, run the whole program
ONE_STEP = ("--dataset=cifar10", "--model=cifarnet", "--batch_size=200", "--max_steps=1", "--num_gpus=2")


class Record(NamedTuple):
    """One example as it is stored."""

    id: bytes
    image: bytes  # PNG
    label: int


def damage_data(trial: Trial) -> str:
    """Guaranteed: a difference in images, labels or their order is detected, and the message names the split."""
    import tensorflow_datasets  # noqa: F401 - in the parent, once for all children

    split = "train" if trial.rng.random() < 0.04 else "test"
    copy = trial.scratch / "data" / cifar10.BUILDER
    copy.mkdir(parents=True)
    for path in (PREPARED / cifar10.BUILDER).iterdir():
        (copy / path.name).symlink_to(path)
    files = {}
    while all(content == _content(name) for name, content in files.items()):
        trial.details, files = _change_files(trial.rng, split, FAULTS[trial.index % len(FAULTS)])
    for name, content in files.items():
        (copy / name).unlink()
        if content is not None:
            (copy / name).write_bytes(content)
    by_program = trial.index < PROGRAM_TRIALS
    message = _run_program(trial.scratch) if by_program else harness.in_worker(_read, trial.scratch, split)
    if not message:
        return "harmless"
    ways = {"its digest is": "digest", "cannot be read": "unreadable"}
    way = next((way for part, way in ways.items() if part in message), "otherwise")
    named = f"{split} split" in message or _file_name(split) in message
    check(named, f"detected, split not named: {way}")
    return f"detected: {way}{', by the program' if by_program else ''}"


def _read(scratch: Path, split: str) -> str:
    """Return the message of a program that reads a split; empty if it reads the right images and labels."""
    os.environ["XDG_CACHE_HOME"] = str(scratch / "cache")
    try:
        digest = cifar10.load(str(scratch / "data"), [split])[split].digest
    except DataError as error:
        return str(error)
    except Exception as error:
        raise Failed(f"raised {type(error).__name__}") from error
    check(digest == cifar10.DIGESTS[split], "not detected")
    return ""


def _run_program(scratch: Path) -> str:
    """Return the message of the whole program, which must end with exit code 3, bad data, and one line of error."""

    def train() -> None:
        os.environ["XDG_CACHE_HOME"] = str(scratch / "cache")
        hooks.train((*ONE_STEP, f"--data_dir={scratch / 'data'}", f"--train_dir={scratch / 'run'}"))

    with harness.Child(train, scratch / "output") as child:
        child.wait()
    messages = [line for line in child.output.splitlines() if line.startswith("data: ")]
    succeeded = child.exit_code == 3 and len(messages) == 1 and "Traceback" not in child.output
    check(succeeded, f"exit code {child.exit_code}, {len(messages)} lines")
    return messages[0]


def _file_name(split: str) -> str:
    return f"cifar10-{split}.tfrecord-00000-of-00001"


def _content(name: str) -> bytes:
    return (PREPARED / cifar10.BUILDER / name).read_bytes()


@functools.cache
def _records(split: str) -> tuple[Record, ...]:
    """Return the examples of a split, read without initializing TensorFlow."""
    records = []
    for content in tf.compat.v1.io.tf_record_iterator(str(PREPARED / cifar10.BUILDER / _file_name(split))):
        features = tf.train.Example.FromString(content).features.feature
        id_, image, label = features["id"].bytes_list, features["image"].bytes_list, features["label"].int64_list
        records.append(Record(id_.value[0], image.value[0], label.value[0]))
    return tuple(records)


def _record_file(records: list[Record]) -> bytes:
    with tempfile.NamedTemporaryFile() as file:
        with tf.io.TFRecordWriter(file.name) as writer:
            for record in records:
                example = tf.train.Example()
                example.features.feature["id"].bytes_list.value.append(record.id)
                example.features.feature["image"].bytes_list.value.append(record.image)
                example.features.feature["label"].int64_list.value.append(record.label)
                writer.write(example.SerializeToString(deterministic=True))
        return Path(file.name).read_bytes()


def _png(image: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


def _change_files(rng: random.Random, split: str, fault: str) -> tuple[str, dict[str, bytes | None]]:
    """Return the description of a fault, and the content of the files that it changes, None if it deletes them."""
    name = _file_name(split)
    if fault == "delete the split":
        return f"{split}: deleted", {name: None}
    if fault == "swap splits":
        train, test = map(_file_name, SPLITS)
        return f"the files of the splits swapped, {split} read", {train: _content(test), test: _content(train)}
    if fault == "damage metadata":
        name = rng.choice(METADATA)
        fault = rng.choice(BYTE_FAULTS)
    if fault in BYTE_FAULTS:
        content = bytearray(_content(name))
        details = damage_bytes(rng, content, fault)
        return f"{name}: {details}", {name: bytes(content)}
    records = list(_records(split))
    details = _change_records(rng, records, fault)
    return f"{split}: {details}", {name: _record_file(records)}


def _change_records(rng: random.Random, records: list[Record], fault: str) -> str:
    """Change examples, their choice or their order in place; return a description."""
    if fault == "drop the last":
        del records[rng.choice((len(records) - 1, rng.randrange(1, len(records)))) :]
        return f"only the first {len(records)} records left"
    if fault == "swap records":
        one, other = rng.sample(range(len(records)), 2)
        records[one], records[other] = records[other], records[one]
        return f"records {one} and {other} swapped"
    if fault == "other images":  # as many of noise, with labels of 10 or, as in CIFAR-100, 100 classes
        classes = rng.choice((len(CLASSES), 100))
        noise = [_png(np.frombuffer(rng.randbytes(32 * 32 * 3), np.uint8).reshape(32, 32, 3)) for _ in range(64)]
        labels = [number % classes for number in range(len(records))]
        rng.shuffle(labels)
        records[:] = [records[0]._replace(image=rng.choice(noise), label=label) for label in labels]
        return f"other images of {classes} classes"
    one = rng.randrange(len(records))
    record = records[one]
    match fault:
        case "drop a record":
            del records[one]
            return f"record {one} dropped"
        case "repeat a record":  # within a class, so that counts per class do not reveal it
            other = rng.choice([at for at, that in enumerate(records) if at != one and that.label == record.label])
            records[other] = record
            return f"record {one} over record {other}"
        case "exchange labels":  # counts per class stay the same
            other = rng.choice([at for at, that in enumerate(records) if that.label != record.label])
            records[one] = record._replace(label=records[other].label)
            records[other] = records[other]._replace(label=record.label)
            return f"labels of records {one} and {other} exchanged"
        case "change a label":
            label = (record.label + rng.randrange(1, len(CLASSES))) % len(CLASSES)
            records[one] = record._replace(label=label)
            return f"record {one}: label set to {label}"
        case "change a pixel":
            image = np.array(Image.open(io.BytesIO(record.image)))
            place = tuple(rng.randrange(size) for size in image.shape)
            image[place] ^= rng.randrange(1, 256)
            records[one] = record._replace(image=_png(image))
            return f"record {one}: value {place} of its image set to {image[place]}"
    records[one] = record._replace(id=b"another")  # harmless: training does not read it
    return f"record {one}: another id"


EXPERIMENTS = []
if cifar10.is_prepared(PREPARED):
    EXPERIMENTS.append(Experiment("damaged data", (subjects.OURS,), 20, 500, damage_data))
else:
    print("no prepared CIFAR-10 in TFDS_DATA_DIR: its files are not damaged")

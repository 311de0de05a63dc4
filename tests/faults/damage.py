"""Damage to saved checkpoints and to the prepared CIFAR-10, which the next start must detect."""

import functools
import io
import os
import random
import re
import tempfile
from pathlib import Path

import numpy as np
import tensorflow as tf
from PIL import Image

from cifar_towers.data import cifar10
from cifar_towers.data.dataset import CLASSES
from cifar_towers.errors import DataError
from tests.faults import harness, saving, subjects
from tests.faults.harness import Experiment, Failed, Trial, check

BYTE_FAULTS = ("flip a bit", "truncate", "zero a block", "zero", "garble")
TREE_FAULTS = (
    *["damage a file"] * 7,
    "delete a file",
    "swap files",
    "swap checkpoints",
    "delete a checkpoint",
)
END_BYTES = 200
Tree = dict[str, bytearray]  # path -> content
PREPARED = Path(os.environ.get("TFDS_DATA_DIR", "")).expanduser().resolve()
FILES = {split: f"cifar10-{split}.tfrecord-00000-of-00001" for split in ("train", "test")}
DATA_FAULTS = (
    "change a pixel",
    "change a label",
    "swap records",
    "repeat a record",
    "drop the last",
    "swap splits",
    "delete the split",
    *BYTE_FAULTS,
    *["damage metadata"] * 3,
)


def damage_checkpoint(trial: Trial) -> str:
    """Guaranteed: weights of the newest intact step, or of a newer one; a refusal if no checkpoint
    is intact.
    """
    disk, _ = saving.record(trial.subject)
    saved = {path: content for path, content in disk.now().items() if content is not None}
    damaged = saved
    while damaged == saved:  # as when a block of zeros is zeroed
        damaged = {name: bytearray(content) for name, content in saved.items()}
        trial.details = _damage_tree(trial.rng, damaged)
    for name, content in damaged.items():
        path = trial.scratch / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    checkpoints = list(_by_checkpoint(saved).values())
    steps = saving.STEPS[-len(checkpoints) :]
    newest_intact = 0
    for step, names in zip(steps, checkpoints, strict=True):
        if all(damaged.get(name) == saved[name] for name in names):
            newest_intact = step

    step, state = harness.in_worker(subjects.recover, trial.subject, trial.scratch)
    if state.startswith("refused"):
        check(not newest_intact, state)
        return f"{state}, none intact"
    check(state == "intact", state)
    check(step in steps, f"restart at {step}")
    check(step >= newest_intact, "an older one taken")
    return "newest taken" if step == saving.STEPS[-1] else "older taken"


def _by_checkpoint(tree: Tree) -> dict[str, list[str]]:
    """Return the files of each checkpoint, oldest first; of two backups, `.bkp` is the older."""
    checkpoints: dict[str, list[str]] = {}
    for name in sorted(tree, key=lambda name: (not name.endswith(".bkp"), name)):
        if name != "checkpoint":  # the manager's index
            checkpoints.setdefault(_checkpoint_of(name), []).append(name)
    return checkpoints


def _checkpoint_of(file: str) -> str:
    """Return the name of the checkpoint that a file belongs to."""
    numbered = re.search(r"(step|ckpt)-\d+", file)
    if numbered:
        return numbered[0]
    return "the backup" if file.endswith(".bkp") else "the newest"


def _damage_tree(rng: random.Random, tree: Tree) -> str:
    """Damages checkpoints in place; returns a description."""
    fault = rng.choice(TREE_FAULTS)
    checkpoints = _by_checkpoint(tree)
    (one, names), (other, other_names) = rng.sample(list(checkpoints.items()), 2)
    if fault == "delete a checkpoint":
        for file in names:
            del tree[file]
        return f"{one} deleted"
    if not fault.endswith("checkpoints"):
        *_, newest = checkpoints.values()
        one = rng.choice(newest if rng.random() < 0.5 else list(tree))
        other = rng.choice([name for name in tree if name != one])
        names = [one]
        other_names = [other]
    match fault:
        case "damage a file":
            return f"{one}: {damage_bytes(rng, tree[one], rng.choice(BYTE_FAULTS))}"
        case "delete a file":
            del tree[one]
            return f"{one} deleted"
    for name, other_name in zip(names, other_names, strict=True):
        content = tree[name]
        tree[name] = tree[other_name]
        tree[other_name] = content
    return f"{one} and {other} swapped"


def damage_bytes(rng: random.Random, content: bytearray, fault: str) -> str:
    """Damages the content of a file in place; returns a description."""
    position = rng.randrange(len(content))
    match fault:
        case "flip a bit":
            # half of them near the beginning or end, where most formats say how to read the rest
            near = position % END_BYTES
            bit = rng.randrange(8)
            position = rng.choice((position, position, near, len(content) - 1 - near))
            content[position] ^= 1 << bit
            return f"bit {bit} of byte {position} flipped"
        case "truncate":
            position = rng.choice((0, position))
            del content[position:]
            return f"truncated to {position} bytes"
        case "zero a block":
            start = position // 512 * 512
            content[start : start + 512] = bytes(len(content[start : start + 512]))
            return f"512 bytes from {start} zeroed"
        case "zero":
            content[:] = bytes(len(content))
            return "zeroed"
    size = rng.choice((len(content), rng.randrange(1, 2 * len(content))))
    content[:] = rng.randbytes(size)
    return f"replaced by {size} random bytes"


def damage_data(trial: Trial) -> str:
    """Guaranteed: a difference in images, labels or their order is detected, and the message names
    the split.
    """
    split = "train" if trial.rng.random() < 0.04 else "test"
    copy = trial.scratch / "data" / cifar10.BUILDER
    copy.mkdir(parents=True)
    files = {}
    fault = DATA_FAULTS[trial.index % len(DATA_FAULTS)]
    while all(content == _content(name) for name, content in files.items()):
        trial.details, files = _change_files(trial.rng, split, fault)

    for path in (PREPARED / cifar10.BUILDER).iterdir():
        if path.name not in files:
            (copy / path.name).symlink_to(path)
        elif files[path.name] is not None:
            (copy / path.name).write_bytes(files[path.name])

    message = harness.in_worker(_read, trial.scratch, split)
    if not message:
        return "harmless"
    is_named = f"{split} split" in message or FILES[split] in message
    check(is_named, f"detected, split not named: {message}")
    return "detected"


def _read(scratch: Path, split: str) -> str:
    """Return the message of a program that reads a split; empty if it reads the right images and
    labels.
    """
    os.environ["XDG_CACHE_HOME"] = str(scratch / "cache")
    try:
        digest = cifar10.load(str(scratch / "data"), [split])[split].digest
    except DataError as error:
        return str(error)
    except Exception as error:
        raise Failed(f"raised {type(error).__name__}") from error
    check(digest == cifar10.DIGESTS[split], "not detected")
    return ""


def _content(name: str) -> bytes:
    return (PREPARED / cifar10.BUILDER / name).read_bytes()


def _change_files(
    rng: random.Random, split: str, fault: str
) -> tuple[str, dict[str, bytes | None]]:
    """Return the description of a fault, and the content of the files that it changes, None if it
    deletes them.
    """
    name = FILES[split]
    if fault == "delete the split":
        return f"{split}: deleted", {name: None}
    if fault == "swap splits":
        train, test = FILES.values()
        swapped = {train: _content(test), test: _content(train)}
        return f"the files of the splits swapped, {split} read", swapped
    if fault == "damage metadata":
        name = rng.choice(("dataset_info.json", "features.json"))
        fault = rng.choice(BYTE_FAULTS)
    if fault in BYTE_FAULTS:
        content = bytearray(_content(name))
        return f"{name}: {damage_bytes(rng, content, fault)}", {name: bytes(content)}
    records = list(_records(split))
    details = _change_records(rng, records, fault)
    with tempfile.NamedTemporaryFile() as file:
        with tf.io.TFRecordWriter(file.name) as writer:
            for record in records:
                writer.write(record)
        return f"{split}: {details}", {name: Path(file.name).read_bytes()}


@functools.cache
def _records(split: str) -> tuple[bytes, ...]:
    """Return the examples of a split as they are stored, read without initializing TensorFlow."""
    return tuple(tf.compat.v1.io.tf_record_iterator(str(PREPARED / cifar10.BUILDER / FILES[split])))


def _change_records(rng: random.Random, records: list[bytes], fault: str) -> str:
    """Change examples, their choice or their order in place; return a description."""
    one, other = rng.sample(range(len(records)), 2)
    match fault:
        case "drop the last":
            del records[max(one, 1) :]
            return f"only the first {len(records)} records left"
        case "swap records":
            record = records[one]
            records[one] = records[other]
            records[other] = record
            return f"records {one} and {other} swapped"
        case "repeat a record":
            records[other] = records[one]
            return f"record {one} over record {other}"
    example = tf.train.Example.FromString(records[one])
    features = example.features.feature
    if fault == "change a label":
        label = features["label"].int64_list.value
        label[0] = (label[0] + rng.randrange(1, len(CLASSES))) % len(CLASSES)
    else:
        image = features["image"].bytes_list.value
        file = io.BytesIO()
        pixels = np.array(Image.open(io.BytesIO(image[0])))
        pixels[tuple(map(rng.randrange, pixels.shape))] ^= rng.randrange(1, 256)
        Image.fromarray(pixels).save(file, "PNG")
        image[0] = file.getvalue()
    records[one] = example.SerializeToString()
    return f"{fault} of record {one}"


MISSING = "" if cifar10.is_prepared(PREPARED) else "a prepared CIFAR-10 in TFDS_DATA_DIR"
EXPERIMENTS = [
    Experiment("damaged checkpoint", subjects.ALL, 60, 1000, damage_checkpoint, saving.MISSING),
    Experiment("damaged data", (subjects.OURS,), 20, 500, damage_data, MISSING),
]

"""Damage on disk that the next start must detect: to saved checkpoints, and to the prepared CIFAR-10."""

import functools
import io
import os
import random
import re
import struct
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import tensorflow as tf
from PIL import Image

from cifar_towers.data import cifar10
from cifar_towers.data.dataset import CLASSES
from tests.faults import harness, hooks, subjects
from tests.faults.harness import ChildDied, ChildError, Experiment, Outcome, Trial

BYTE_FAULTS = ("flip a bit", "change a byte", "truncate", "empty", "zero a block", "zero", "garble")


def _damage_bytes(rng: random.Random, content: bytearray, fault: str) -> str:
    """Damages the content of a file in place; returns a description."""
    match fault:
        case "flip a bit":
            position, bit = rng.randrange(len(content)), rng.randrange(8)
            content[position] ^= 1 << bit
            return f"bit {bit} of byte {position} flipped"
        case "change a byte":
            position = rng.randrange(len(content))
            content[position] ^= rng.randrange(1, 256)
            return f"byte {position} set to {content[position]}"
        case "truncate":
            del content[rng.randrange(1, len(content)) :]
            return f"truncated to {len(content)} bytes"
        case "empty":
            content.clear()
            return "emptied"
        case "zero a block":
            start = rng.randrange(0, len(content), 512)
            content[start : start + 512] = bytes(len(content[start : start + 512]))
            return f"512 bytes from {start} zeroed"
        case "zero":
            content[:] = bytes(len(content))
            return "zeroed"
    size = rng.choice((len(content), rng.randrange(1, 2 * len(content))))
    content[:] = rng.randbytes(size)
    return f"replaced by {size} random bytes"


# Files of checkpoints ----------------------------------------------------------------------------------------------

STEPS = (1, 2, 3)
Tree = dict[str, bytearray]  # path -> content
TREE_FAULTS = (
    *["damage a file"] * len(BYTE_FAULTS),
    *("delete a file", "swap files", "swap checkpoints", "delete a checkpoint"),
)


@functools.cache
def _saved_tree(subject: str) -> dict[str, bytes]:
    """The files that a subject leaves after three saves."""
    with harness.scratch_directory() as directory:
        harness.in_child(subjects.save, subject, directory, *STEPS)
        paths = sorted(path for path in directory.rglob("*") if path.is_file())
        return {str(path.relative_to(directory)): path.read_bytes() for path in paths}


def _by_checkpoint(tree: Tree) -> dict[str, list[str]]:
    """The files of each checkpoint, oldest first; of two backups, `.bkp` is the older."""
    checkpoints: dict[str, list[str]] = {}
    for name in sorted(tree, key=lambda name: (not name.endswith(".bkp"), name)):
        numbered = re.search(r"(step|ckpt)-\d+", name)
        if name != "checkpoint":  # the manager's index
            key = numbered[0] if numbered else "the backup" if name.endswith(".bkp") else "the newest"
            checkpoints.setdefault(key, []).append(name)
    return checkpoints


def _damage_tree(rng: random.Random, tree: Tree) -> str:
    """Damages checkpoints in place; returns a description."""
    fault, checkpoints = rng.choice(TREE_FAULTS), _by_checkpoint(tree)
    if fault == "swap checkpoints":  # every other time except JSON
        (one, names), (other, other_names) = rng.sample(list(checkpoints.items()), 2)
        keep_json = rng.random() < 0.5
        for a, b in zip(names, other_names, strict=True):
            if not (keep_json and ".json" in a):
                tree[a], tree[b] = tree[b], tree[a]
        return f"{one} and {other} swapped{', without JSON' if keep_json else ''}"
    if fault == "delete a checkpoint":
        name, files = rng.choice(list(checkpoints.items()))
        for file in files:
            del tree[file]
        return f"{name} deleted"
    *_, newest = checkpoints.values()
    name = rng.choice(newest if rng.random() < 0.5 else list(tree))
    if fault == "damage a file":
        return f"{name}: {_damage_bytes(rng, tree[name], rng.choice(BYTE_FAULTS))}"
    if fault == "delete a file":
        del tree[name]
        return f"{name} deleted"
    other = rng.choice([other for other in tree if other != name])
    tree[name], tree[other] = tree[other], tree[name]
    return f"{name} and {other} swapped"


def damage_checkpoint(trial: Trial) -> Outcome:
    """Guaranteed: the weights of some step, or a refusal if no checkpoint is intact."""
    saved = _saved_tree(trial.subject)
    damaged, details = saved, ""
    while damaged == saved:  # as when a block of zeros is zeroed
        damaged = {name: bytearray(content) for name, content in saved.items()}
        details = _damage_tree(trial.rng, damaged)
    for name, content in damaged.items():
        path = trial.scratch / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    intact = any(all(damaged.get(name) == saved[name] for name in names) for names in _by_checkpoint(saved).values())
    try:
        step, weights = harness.in_child(subjects.recover, trial.subject, trial.scratch)
    except ChildError as error:
        refusal = f"refused: {str(error).partition(':')[0]}"
        return Outcome(details, refusal if intact else f"{refusal}, none intact", not intact)
    except ChildDied as error:
        return Outcome(details, f"recovery {error}", False)
    if weights == "wrong weights":
        return Outcome(details, weights, False)
    if step not in STEPS:
        return Outcome(details, f"restart at {step}", False)
    return Outcome(details, "newest taken" if step == STEPS[-1] else "older taken", True)


# Files of the prepared CIFAR-10; the checksums of records are right after a fault ----------------------------------

PREPARED = Path(os.environ.get("TFDS_DATA_DIR", "")).expanduser().resolve()
SPLITS = ("train", "test")
METADATA = ("dataset_info.json", "features.json")
DATA_FAULTS = (
    *("change a pixel", "exchange labels", "swap records", "repeat a record", "other images"),
    *("flip a bit", "truncate", "delete the split"),
    *("change a label", "drop the last", "drop a record", "change an id"),
    *("flip a bit", "change a byte", "empty", "zero a block", "zero", "garble"),
    *("swap splits", *["damage metadata"] * 4),
)
PROGRAM_TRIALS = 8  # the first trials, a fault each, run the whole program
ONE_STEP = ("--dataset=cifar10", "--model=cifarnet", "--batch_size=200", "--max_steps=1", "--num_gpus=2")


def _file_name(split: str) -> str:
    return f"cifar10-{split}.tfrecord-00000-of-00001"


def _content(name: str) -> bytes:
    return (PREPARED / cifar10.BUILDER / name).read_bytes()


@functools.cache
def _records(split: str) -> tuple[bytes, ...]:
    """The examples of a split. Read here, as TensorFlow must not be initialized in the parent."""
    content, records, position = _content(_file_name(split)), [], 0
    while position < len(content):
        (size,) = struct.unpack_from("<Q", content, position)
        records.append(content[position + 12 : position + 12 + size])
        position += 12 + size + 4
    return tuple(records)


def _record_file(records: list[bytes]) -> bytes:
    with tempfile.NamedTemporaryFile() as file:
        with tf.io.TFRecordWriter(file.name) as writer:
            for record in records:
                writer.write(record)
        return Path(file.name).read_bytes()


def _feature(record: bytes, name: str) -> int | bytes:
    feature = tf.train.Example.FromString(record).features.feature[name]
    return [*feature.int64_list.value, *feature.bytes_list.value][0]


def _with_features(record: bytes, **values: int | bytes) -> bytes:
    example = tf.train.Example.FromString(record)
    for name, value in values.items():
        feature = example.features.feature[name]
        (feature.int64_list if isinstance(value, int) else feature.bytes_list).value[0] = value
    return example.SerializeToString(deterministic=True)


def _png(image: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


def _change_data(rng: random.Random, split: str, fault: str) -> tuple[str, dict[str, bytes | None]]:
    """The description of a fault; and the content of the files that it changes, None if it deletes them."""
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
        details = _damage_bytes(rng, content, fault)
        return f"{name}: {details}", {name: bytes(content)}
    records = list(_records(split))
    change = _change_example if fault.startswith(("change", "exchange")) else _change_records
    details = change(rng, records, fault)
    return f"{split}: {details}", {name: _record_file(records)}


def _change_records(rng: random.Random, records: list[bytes], fault: str) -> str:
    """Changes the choice or order of examples in place; returns a description."""
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
        records[:] = [_with_features(records[0], image=rng.choice(noise), label=label) for label in labels]
        return f"other images of {classes} classes"
    one = rng.randrange(len(records))
    if fault == "drop a record":
        del records[one]
        return f"record {one} dropped"
    label = _feature(records[one], "label")  # counts per class do not reveal a repetition within a class
    same = [at for at, record in enumerate(records) if at != one and _feature(record, "label") == label]
    other = rng.choice(same)
    records[other] = records[one]
    return f"record {one} over record {other}"


def _change_example(rng: random.Random, records: list[bytes], fault: str) -> str:
    """Changes one example, or the labels of two, in place; returns a description."""
    one = rng.randrange(len(records))
    label = _feature(records[one], "label")
    if fault == "change a pixel":
        image = np.array(Image.open(io.BytesIO(_feature(records[one], "image"))))
        place = tuple(rng.randrange(size) for size in image.shape)
        image[place] ^= rng.randrange(1, 256)
        records[one] = _with_features(records[one], image=_png(image))
        return f"record {one}: value {place} of its image set to {image[place]}"
    if fault == "change a label":
        label = (label + rng.randrange(1, len(CLASSES))) % len(CLASSES)
        records[one] = _with_features(records[one], label=label)
        return f"record {one}: label set to {label}"
    if fault == "exchange labels":  # counts per class stay the same
        other = rng.choice([at for at, record in enumerate(records) if _feature(record, "label") != label])
        records[one] = _with_features(records[one], label=_feature(records[other], "label"))
        records[other] = _with_features(records[other], label=label)
        return f"labels of records {one} and {other} exchanged"
    records[one] = _with_features(records[one], id=b"another")  # harmless: training does not read it
    return f"record {one}: another id"


def damage_data(trial: Trial) -> Outcome:
    """Guaranteed: a difference in images, labels or their order is detected, and the message names the split."""
    import tensorflow_datasets  # noqa: F401 - in the parent, once for all children

    split = "train" if trial.rng.random() < 0.04 else "test"
    copy = trial.scratch / "data" / cifar10.BUILDER
    copy.mkdir(parents=True)
    for path in (PREPARED / cifar10.BUILDER).iterdir():
        (copy / path.name).symlink_to(path)
    details, changed = "", {}
    while all(content == _content(name) for name, content in changed.items()):
        details, changed = _change_data(trial.rng, split, DATA_FAULTS[trial.index % len(DATA_FAULTS)])
    for name, content in changed.items():
        (copy / name).unlink()
        if content is not None:
            (copy / name).write_bytes(content)
    check = _check_program if trial.index < PROGRAM_TRIALS else _check_reading
    with mock.patch.dict(os.environ, XDG_CACHE_HOME=str(trial.scratch / "cache")):
        return Outcome(details, *check(trial.scratch, split))


def _check_reading(scratch: Path, split: str) -> tuple[str, bool]:
    try:
        digest = harness.in_child(lambda: cifar10.read_split(scratch / "data", split).digest)
        return ("harmless", True) if digest == cifar10.DIGESTS[split] else ("not detected", False)
    except ChildError as error:
        kind = str(error).partition(":")[0]
        return _how_detected(str(error), split) if kind == "DataError" else (f"raised {kind}", False)
    except ChildDied as error:
        return f"reading {error}", False


def _check_program(scratch: Path, split: str) -> tuple[str, bool]:
    """The program must end with exit code 3, bad data, and one line of error."""
    flags = (*ONE_STEP, f"--data_dir={scratch / 'data'}", f"--train_dir={scratch / 'run'}")
    child = harness.fork(functools.partial(hooks.train, flags), scratch / "output")
    harness.wait(child)
    output = (scratch / "output").read_text()
    lines = [line for line in output.splitlines() if line.startswith("data: ")]
    if child.exitcode != 3 or len(lines) != 1 or "Traceback" in output:
        return f"exit code {child.exitcode}, {len(lines)} lines", False
    outcome, ok = _how_detected(lines[0], split)
    return f"{outcome}, by the program", ok


def _how_detected(message: str, split: str) -> tuple[str, bool]:
    ways = {"its digest is": "digest", "examples, ": "counts", "cannot be read": "unreadable"}
    way = next((way for part, way in ways.items() if part in message), "otherwise")
    named = f"{split} split" in message or _file_name(split) in message
    return f"detected{'' if named else ', split not named'}: {way}", named


EXPERIMENTS = [Experiment("damaged checkpoint", subjects.ALL, 60, 1000, damage_checkpoint)]
if cifar10.is_prepared(PREPARED):
    EXPERIMENTS.append(Experiment("damaged data", (subjects.OURS,), 20, 500, damage_data))
else:
    print("no prepared CIFAR-10 in TFDS_DATA_DIR: its files are not damaged")

"""Damage on disk that the next start must detect: to saved checkpoints, and to the prepared CIFAR-10."""

import functools
import io
import os
import random
import re
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tensorflow as tf
from PIL import Image

from cifar_towers.data import cifar10
from cifar_towers.data.dataset import CLASSES
from tests.faults import harness, hooks, subjects
from tests.faults.harness import ChildDied, ChildError, Experiment, Outcome, Trial

# Every fault changes its second argument in place and returns a description.

# Bytes of a file ---------------------------------------------------------------------------------------------------


def _flip_bit(rng: random.Random, content: bytearray) -> str:
    position, bit = rng.randrange(len(content)), rng.randrange(8)
    content[position] ^= 1 << bit
    return f"bit {bit} of byte {position} flipped"


def _change_byte(rng: random.Random, content: bytearray) -> str:
    position = rng.randrange(len(content))
    content[position] ^= rng.randrange(1, 256)
    return f"byte {position} set to {content[position]}"


def _truncate(rng: random.Random, content: bytearray) -> str:
    del content[rng.randrange(1, len(content)) :]
    return f"truncated to {len(content)} bytes"


def _empty(rng: random.Random, content: bytearray) -> str:
    content.clear()
    return "emptied"


def _zero_block(rng: random.Random, content: bytearray) -> str:
    start = rng.randrange(0, len(content), 512)
    content[start : start + 512] = bytes(len(content[start : start + 512]))
    return f"512 bytes from {start} zeroed"


def _zero(rng: random.Random, content: bytearray) -> str:
    content[:] = bytes(len(content))
    return "zeroed"


def _garble(rng: random.Random, content: bytearray) -> str:
    size = rng.choice((len(content), rng.randrange(1, 2 * len(content))))
    content[:] = rng.randbytes(size)
    return f"replaced by {size} random bytes"


BYTE_FAULTS = (_flip_bit, _change_byte, _truncate, _empty, _zero_block, _zero, _garble)

# Files of checkpoints ----------------------------------------------------------------------------------------------

STEPS = (1, 2, 3)
Tree = dict[str, bytearray]  # path -> content


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


def _any_file(rng: random.Random, tree: Tree) -> str:
    """Any file, every other time one of the newest checkpoint."""
    *_, newest = _by_checkpoint(tree).values()
    return rng.choice(newest if rng.random() < 0.5 else list(tree))


def _damage_file(rng: random.Random, tree: Tree) -> str:
    name = _any_file(rng, tree)
    return f"{name}: {rng.choice(BYTE_FAULTS)(rng, tree[name])}"


def _delete_file(rng: random.Random, tree: Tree) -> str:
    name = _any_file(rng, tree)
    del tree[name]
    return f"{name} deleted"


def _swap_files(rng: random.Random, tree: Tree) -> str:
    name = _any_file(rng, tree)
    other = rng.choice([other for other in tree if other != name])
    tree[name], tree[other] = tree[other], tree[name]
    return f"{name} and {other} swapped"


def _swap_checkpoints(rng: random.Random, tree: Tree) -> str:
    """All files of two checkpoints, every other time except JSON."""
    (one, names), (other, other_names) = rng.sample(list(_by_checkpoint(tree).items()), 2)
    keep_json = rng.random() < 0.5
    for a, b in zip(names, other_names, strict=True):
        if not (keep_json and ".json" in a):
            tree[a], tree[b] = tree[b], tree[a]
    return f"{one} and {other} swapped{', without JSON' if keep_json else ''}"


def _delete_checkpoint(rng: random.Random, tree: Tree) -> str:
    name, files = rng.choice(list(_by_checkpoint(tree).items()))
    for file in files:
        del tree[file]
    return f"{name} deleted"


TREE_FAULTS = (*[_damage_file] * len(BYTE_FAULTS), _delete_file, _swap_files, _swap_checkpoints, _delete_checkpoint)


def damage_checkpoint(trial: Trial) -> Outcome:
    """Guaranteed: the weights of some step, or a refusal if no checkpoint is intact."""
    saved = _saved_tree(trial.subject)
    damaged, details = saved, ""
    while damaged == saved:  # as when a block of zeros is zeroed
        damaged = {name: bytearray(content) for name, content in saved.items()}
        details = trial.rng.choice(TREE_FAULTS)(trial.rng, damaged)
    for name, content in damaged.items():
        path = trial.scratch / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    intact = [all(damaged.get(name) == saved[name] for name in names) for names in _by_checkpoint(saved).values()]
    try:
        step, weights = harness.in_child(subjects.recover, trial.subject, trial.scratch)
    except ChildError as error:
        refusal = f"refused: {str(error).partition(':')[0]}"
        return Outcome(details, refusal if any(intact) else f"{refusal}, none intact", not any(intact))
    except ChildDied as error:
        return Outcome(details, f"recovery {error}", False)
    if weights == "wrong weights":
        return Outcome(details, weights, False)
    if step not in STEPS:
        return Outcome(details, f"restart at {step}", False)
    return Outcome(details, "newest taken" if step == STEPS[-1] else "older taken", True)


# Records of a split, whose checksums are right afterwards ------------------------------------------------------------

PREPARED = Path(os.environ.get("TFDS_DATA_DIR", "")).expanduser().resolve()
SPLITS = ("train", "test")
Records = list[bytes]


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


def _record_file(records: Records) -> bytes:
    """A TFRecord file of these examples."""
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


def _drop_last(rng: random.Random, records: Records) -> str:
    del records[rng.choice((len(records) - 1, rng.randrange(1, len(records)))) :]
    return f"only the first {len(records)} records left"


def _drop_one(rng: random.Random, records: Records) -> str:
    at = rng.randrange(len(records))
    del records[at]
    return f"record {at} dropped"


def _swap_records(rng: random.Random, records: Records) -> str:
    one, other = rng.sample(range(len(records)), 2)
    records[one], records[other] = records[other], records[one]
    return f"records {one} and {other} swapped"


def _repeat_record(rng: random.Random, records: Records) -> str:
    """Over another of the same class, which counts per class do not reveal."""
    one = rng.randrange(len(records))
    label = _feature(records[one], "label")
    same = [at for at, record in enumerate(records) if at != one and _feature(record, "label") == label]
    records[other := rng.choice(same)] = records[one]
    return f"record {one} over record {other}"


def _change_pixel(rng: random.Random, records: Records) -> str:
    at = rng.randrange(len(records))
    image = np.array(Image.open(io.BytesIO(_feature(records[at], "image"))))
    place = tuple(rng.randrange(size) for size in image.shape)
    image[place] ^= rng.randrange(1, 256)
    records[at] = _with_features(records[at], image=_png(image))
    return f"record {at}: value {place} of its image set to {image[place]}"


def _change_label(rng: random.Random, records: Records) -> str:
    at = rng.randrange(len(records))
    label = (_feature(records[at], "label") + rng.randrange(1, len(CLASSES))) % len(CLASSES)
    records[at] = _with_features(records[at], label=label)
    return f"record {at}: label set to {label}"


def _exchange_labels(rng: random.Random, records: Records) -> str:
    """Counts per class stay the same."""
    one = rng.randrange(len(records))
    label = _feature(records[one], "label")
    other = rng.choice([at for at, record in enumerate(records) if _feature(record, "label") != label])
    records[one] = _with_features(records[one], label=_feature(records[other], "label"))
    records[other] = _with_features(records[other], label=label)
    return f"labels of records {one} and {other} exchanged"


def _other_images(rng: random.Random, records: Records) -> str:
    """As many images of noise, with labels of 10 or, as in CIFAR-100, 100 classes."""
    classes = rng.choice((len(CLASSES), 100))
    noise = [_png(np.frombuffer(rng.randbytes(32 * 32 * 3), np.uint8).reshape(32, 32, 3)) for _ in range(64)]
    labels = [at % classes for at in range(len(records))]
    rng.shuffle(labels)
    records[:] = [_with_features(records[0], image=rng.choice(noise), label=label) for label in labels]
    return f"other images of {classes} classes"


def _change_id(rng: random.Random, records: Records) -> str:
    """Harmless: training does not read it."""
    at = rng.randrange(len(records))
    records[at] = _with_features(records[at], id=b"another")
    return f"record {at}: another id"


# Files of the prepared CIFAR-10: (rng, split to be read) -> (details, {file: content, None if deleted}) --------------

Change = tuple[str, dict[str, bytes | None]]


def _of_records(fault: Callable) -> Callable[[random.Random, str], Change]:
    def change(rng: random.Random, split: str) -> Change:
        records = list(_records(split))
        details = fault(rng, records)
        return f"{split}: {details}", {_file_name(split): _record_file(records)}

    return change


def _of_bytes(fault: Callable, *names: str) -> Callable[[random.Random, str], Change]:
    def change(rng: random.Random, split: str) -> Change:
        name = rng.choice(names) if names else _file_name(split)
        content = bytearray(_content(name))
        details = fault(rng, content)
        return f"{name}: {details}", {name: bytes(content)}

    return change


def _delete_records(rng: random.Random, split: str) -> Change:
    return f"{split}: deleted", {_file_name(split): None}


def _swap_splits(rng: random.Random, split: str) -> Change:
    train, test = map(_file_name, SPLITS)
    return f"the files of the splits swapped, {split} read", {train: _content(test), test: _content(train)}


def _any_byte_fault(rng: random.Random, content: bytearray) -> str:
    return rng.choice(BYTE_FAULTS)(rng, content)


DATA_FAULTS = (
    *map(_of_records, (_change_pixel, _exchange_labels, _swap_records, _repeat_record, _other_images)),
    *map(_of_bytes, (_flip_bit, _truncate)),
    _delete_records,
    *map(_of_records, (_change_label, _drop_last, _drop_one, _change_id)),
    *map(_of_bytes, (_flip_bit, _change_byte, _empty, _zero_block, _zero, _garble)),
    _swap_splits,
    *[_of_bytes(_any_byte_fault, "dataset_info.json", "features.json")] * 4,
)
PROGRAM_TRIALS = 8  # the first trials, a fault each, run the whole program
ONE_STEP = ("--dataset=cifar10", "--model=cifarnet", "--batch_size=200", "--max_steps=1", "--num_gpus=2")


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
        details, changed = DATA_FAULTS[trial.index % len(DATA_FAULTS)](trial.rng, split)
    for name, content in changed.items():
        (copy / name).unlink()
        if content is not None:
            (copy / name).write_bytes(content)
    check = _check_program if trial.index < PROGRAM_TRIALS else _check_reading
    return Outcome(details, *check(trial.scratch, split))


def _check_reading(scratch: Path, split: str) -> tuple[str, bool]:
    try:
        unchanged = harness.in_child(_reads_unchanged, scratch, split)
        return ("harmless", True) if unchanged else ("not detected", False)
    except ChildError as error:
        kind = str(error).partition(":")[0]
        return _how_detected(str(error), split) if kind == "DataError" else (f"raised {kind}", False)
    except ChildDied as error:
        return f"reading {error}", False


def _reads_unchanged(scratch: Path, split: str) -> bool:
    _use_empty_cache(scratch)
    return cifar10.read_split(scratch / "data", split).digest == cifar10.DIGESTS[split]


def _use_empty_cache(scratch: Path) -> None:
    os.environ["XDG_CACHE_HOME"] = str(scratch / "cache")


def _check_program(scratch: Path, split: str) -> tuple[str, bool]:
    """The program must end with exit code 3, bad data, and one line of error."""
    flags = (*ONE_STEP, f"--data_dir={scratch / 'data'}", f"--train_dir={scratch / 'run'}")
    prepare = functools.partial(_use_empty_cache, scratch)
    child = harness.fork(functools.partial(hooks.train, flags, prepare=prepare), scratch / "output")
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

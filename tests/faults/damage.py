"""Damage on disk: to checkpoints after they were saved, and to the prepared CIFAR-10.

Nothing of the run is wrong when the damage is done; what is asked is whether the next start sees it.
"""

import functools
import io
import os
import random
import re
import struct
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tensorflow as tf
from PIL import Image

from cifar_towers.cli import main
from cifar_towers.data import cifar10
from cifar_towers.data.dataset import CLASSES
from tests.faults import harness, subjects
from tests.faults.harness import Experiment, Outcome

# What can happen to the bytes of one file: (rng, content) -> (what was done, content) ----------------------------


def _flip_bit(rng: random.Random, content: bytes) -> tuple[str, bytes]:
    place, bit = rng.randrange(len(content)), rng.randrange(8)
    changed = bytes([content[place] ^ 1 << bit])
    return f"bit {bit} of byte {place} flipped", content[:place] + changed + content[place + 1 :]


def _change_byte(rng: random.Random, content: bytes) -> tuple[str, bytes]:
    place = rng.randrange(len(content))
    changed = bytes([content[place] ^ rng.randrange(1, 256)])
    return f"byte {place} made {changed.hex()}", content[:place] + changed + content[place + 1 :]


def _truncate(rng: random.Random, content: bytes) -> tuple[str, bytes]:
    left = rng.randrange(1, len(content))
    return f"cut to {left} bytes", content[:left]


def _empty(rng: random.Random, content: bytes) -> tuple[str, bytes]:
    return "emptied", b""


def _zero_block(rng: random.Random, content: bytes) -> tuple[str, bytes]:
    start = rng.randrange(0, len(content), 512)
    zeros = bytes(len(content[start : start + 512]))
    return f"the 512 bytes from {start} zeroed", content[:start] + zeros + content[start + 512 :]


def _zero(rng: random.Random, content: bytes) -> tuple[str, bytes]:
    return "zeroed", bytes(len(content))


def _garble(rng: random.Random, content: bytes) -> tuple[str, bytes]:
    size = rng.choice((len(content), rng.randrange(1, 2 * len(content))))
    return f"made {size} bytes of garbage", rng.randbytes(size)


BYTE_FAULTS = (_flip_bit, _change_byte, _truncate, _empty, _zero_block, _zero, _garble)

# Damaged checkpoints ----------------------------------------------------------------------------------------------

STEPS = (1, 2, 3)
Tree = dict[str, bytes]  # what a directory holds: path -> content


@functools.cache
def _saved(subject: str) -> Tree:
    """What a subject leaves that saved three steps."""
    with harness.scratch() as directory:
        harness.in_child(subjects.save, subject, directory, *STEPS)
        return {str(path.relative_to(directory)): path.read_bytes() for path in harness.files_of(directory)}


def _by_checkpoint(tree: Tree) -> dict[str, list[str]]:
    """The files of each checkpoint, oldest first; a backup counts as the older one of two."""
    checkpoints: dict[str, list[str]] = {}
    for name in sorted(tree, key=lambda name: (not name.endswith(".bkp"), name)):
        numbered = re.search(r"(step|ckpt)-\d+", name)
        if name != "checkpoint":  # the manager's list of all
            key = numbered[0] if numbered else "the backup" if name.endswith(".bkp") else "the newest"
            checkpoints.setdefault(key, []).append(name)
    return checkpoints


def _damage_file(rng: random.Random, tree: Tree) -> tuple[str, Tree]:
    name = _any_file(rng, tree)
    what, content = rng.choice(BYTE_FAULTS)(rng, tree[name])
    return f"{name}: {what}", tree | {name: content}


def _delete_file(rng: random.Random, tree: Tree) -> tuple[str, Tree]:
    name = _any_file(rng, tree)
    return f"{name} deleted", _without(tree, name)


def _swap_files(rng: random.Random, tree: Tree) -> tuple[str, Tree]:
    name = _any_file(rng, tree)
    other = rng.choice(list(_without(tree, name)))
    return f"{name} and {other} swapped", tree | {name: tree[other], other: tree[name]}


def _swap_checkpoints(rng: random.Random, tree: Tree) -> tuple[str, Tree]:
    """All files of two, or all but what is told of them in JSON."""
    (one, names), (other, other_names) = rng.sample(list(_by_checkpoint(tree).items()), 2)
    pairs = list(zip(names, other_names, strict=True))
    what = f"{one} and {other} swapped"
    if rng.random() < 0.5:
        pairs, what = [pair for pair in pairs if ".json" not in pair[0]], f"{what}, without JSON"
    return what, tree | {a: tree[b] for a, b in pairs} | {b: tree[a] for a, b in pairs}


def _delete_checkpoint(rng: random.Random, tree: Tree) -> tuple[str, Tree]:
    checkpoint, names = rng.choice(list(_by_checkpoint(tree).items()))
    return f"{checkpoint} deleted", _without(tree, *names)


TREE_FAULTS = (*[_damage_file] * len(BYTE_FAULTS), _delete_file, _swap_files, _swap_checkpoints, _delete_checkpoint)


def _any_file(rng: random.Random, tree: Tree) -> str:
    """Any one; every other time, one of the newest checkpoint's."""
    *_, newest = _by_checkpoint(tree).values()
    return rng.choice(newest if rng.random() < 0.5 else list(tree))


def _without(tree: Tree, *names: str) -> Tree:
    return {name: content for name, content in tree.items() if name not in names}


def _damaged_checkpoint(subject: str, number: int, rng: random.Random, scratch: Path) -> Outcome:
    """Promised: whole weights of some step, or a refusal where no checkpoint stands as it was saved."""
    tree = _saved(subject)
    what, damaged = "", tree
    while damaged == tree:  # as when a block of zeros is zeroed
        what, damaged = rng.choice(TREE_FAULTS)(rng, tree)
    for name, content in damaged.items():
        path = scratch / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    one_stands = any(all(damaged.get(name) == tree[name] for name in names) for names in _by_checkpoint(tree).values())
    try:
        step, weights = harness.in_child(subjects.recover, subject, scratch)
    except harness.Raised as error:
        refusal = f"refused: {str(error).partition(':')[0]}"
        return Outcome(what, refusal if one_stands else f"{refusal}, nothing stood", not one_stands)
    except harness.ChildDied as error:
        return Outcome(what, f"recovery {error}", False)
    if weights == "wrong weights":
        return Outcome(what, weights, False)
    if step not in STEPS:
        return Outcome(what, f"restart at {step}", False)
    return Outcome(what, "newest taken" if step == STEPS[-1] else "older taken", True)


# Damaged data -----------------------------------------------------------------------------------------------------

SPLITS = ("train", "test")
PREPARED = Path(os.environ.get("TFDS_DATA_DIR", "")).expanduser().resolve()
WITH_PROGRAM = 8  # the first trials, a kind of fault each, are whole programs
ONE_STEP = ("--dataset=cifar10", "--model=cifarnet", "--batch_size=200", "--max_steps=1", "--num_gpus=2")
Records = list[bytes]


def _file_name(split: str) -> str:
    return f"cifar10-{split}.tfrecord-00000-of-00001"


def _content(name: str) -> bytes:
    return (PREPARED / cifar10.BUILDER / name).read_bytes()


@functools.cache
def _records(split: str) -> Records:
    """The examples of a split, without lengths and checksums."""
    content, records, place = _content(_file_name(split)), [], 0
    while place < len(content):
        (size,) = struct.unpack_from("<Q", content, place)
        records.append(content[place + 12 : place + 12 + size])
        place += 12 + size + 4
    return records


def _with_checksums(records: Records) -> bytes:
    """A record file of these examples in which every checksum is right."""
    with tempfile.NamedTemporaryFile() as file:
        with tf.io.TFRecordWriter(file.name) as writer:
            for record in records:
                writer.write(record)
        return Path(file.name).read_bytes()


# What can happen to a split whose checksums then are right: (rng, records) -> (what was done, records)


def _drop_last(rng: random.Random, records: Records) -> tuple[str, Records]:
    left = rng.choice((len(records) - 1, rng.randrange(1, len(records))))
    return f"only the first {left} records left", records[:left]


def _drop_one(rng: random.Random, records: Records) -> tuple[str, Records]:
    at = rng.randrange(len(records))
    return f"record {at} left out", records[:at] + records[at + 1 :]


def _swap_records(rng: random.Random, records: Records) -> tuple[str, Records]:
    one, other = rng.sample(range(len(records)), 2)
    return f"records {one} and {other} swapped", _replaced(records, {one: records[other], other: records[one]})


def _repeat_record(rng: random.Random, records: Records) -> tuple[str, Records]:
    """Over another of the same class, so that counting does not tell."""
    one = rng.randrange(len(records))
    label = _label(records[one])
    other = rng.choice([at for at, record in enumerate(records) if at != one and _label(record) == label])
    return f"record {one} over record {other}", _replaced(records, {other: records[one]})


def _change_pixel(rng: random.Random, records: Records) -> tuple[str, Records]:
    at, example = _any_example(rng, records)
    png = example.features.feature["image"].bytes_list.value
    image = np.array(Image.open(io.BytesIO(png[0])))
    place = tuple(rng.randrange(size) for size in image.shape)
    image[place] ^= rng.randrange(1, 256)
    png[0] = _png(image)
    return f"record {at}: value {place} of its image made {image[place]}", _replaced(records, {at: _bytes(example)})


def _change_label(rng: random.Random, records: Records) -> tuple[str, Records]:
    at, example = _any_example(rng, records)
    label = (_label(records[at]) + rng.randrange(1, len(CLASSES))) % len(CLASSES)
    return f"record {at}: label made {label}", _replaced(records, {at: _relabelled(example, label)})


def _exchange_labels(rng: random.Random, records: Records) -> tuple[str, Records]:
    """So that there are as many of each class as before."""
    one, example = _any_example(rng, records)
    label = _label(records[one])
    other = rng.choice([at for at, record in enumerate(records) if _label(record) != label])
    changed = {one: _relabelled(example, _label(records[other]))}
    changed[other] = _relabelled(tf.train.Example.FromString(records[other]), label)
    return f"labels of records {one} and {other} exchanged", _replaced(records, changed)


def _other_pictures(rng: random.Random, records: Records) -> tuple[str, Records]:
    """As many of the same shape, with labels of as many classes or, as of CIFAR-100, of more."""
    classes = rng.choice((len(CLASSES), 100))
    noise = [_png(np.frombuffer(rng.randbytes(32 * 32 * 3), np.uint8).reshape(32, 32, 3)) for _ in range(64)]
    labels = [at % classes for at in range(len(records))]
    rng.shuffle(labels)
    example = tf.train.Example.FromString(records[0])
    others = []
    for label in labels:
        example.features.feature["image"].bytes_list.value[0] = rng.choice(noise)
        others.append(_relabelled(example, label))
    return f"other pictures of {classes} classes", others


def _change_id(rng: random.Random, records: Records) -> tuple[str, Records]:
    """Which nothing is trained on."""
    at, example = _any_example(rng, records)
    example.features.feature["id"].bytes_list.value[0] = b"another"
    return f"record {at}: another id", _replaced(records, {at: _bytes(example)})


def _any_example(rng: random.Random, records: Records) -> tuple[int, tf.train.Example]:
    at = rng.randrange(len(records))
    return at, tf.train.Example.FromString(records[at])


def _label(record: bytes) -> int:
    return tf.train.Example.FromString(record).features.feature["label"].int64_list.value[0]


def _relabelled(example: tf.train.Example, label: int) -> bytes:
    example.features.feature["label"].int64_list.value[0] = label
    return _bytes(example)


def _bytes(example: tf.train.Example) -> bytes:
    return example.SerializeToString(deterministic=True)


def _png(image: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


def _replaced(records: Records, changed: dict[int, bytes]) -> Records:
    return [changed.get(at, record) for at, record in enumerate(records)]


# What can happen to a prepared copy: (rng, the split that will be read) -> (what was done, {file: content or None})

Change = tuple[str, dict[str, bytes | None]]


def _of_records(fault: Callable) -> Callable[[random.Random, str], Change]:
    def damage(rng: random.Random, split: str) -> Change:
        what, records = fault(rng, _records(split))
        return f"{split}: {what}", {_file_name(split): _with_checksums(records)}

    return damage


def _of_bytes(fault: Callable) -> Callable[[random.Random, str], Change]:
    def damage(rng: random.Random, split: str) -> Change:
        what, content = fault(rng, _content(_file_name(split)))
        return f"{split}: {what}", {_file_name(split): content}

    return damage


def _swap_splits(rng: random.Random, split: str) -> Change:
    train, test = map(_file_name, SPLITS)
    return f"the splits' files swapped, {split} read", {train: _content(test), test: _content(train)}


def _delete_records(rng: random.Random, split: str) -> Change:
    return f"{split}: deleted", {_file_name(split): None}


def _damage_description(rng: random.Random, split: str) -> Change:
    name = rng.choice(("dataset_info.json", "features.json"))
    what, content = rng.choice(BYTE_FAULTS)(rng, _content(name))
    return f"{name}: {what}", {name: content}


DATA_FAULTS = (
    *map(_of_records, (_change_pixel, _exchange_labels, _swap_records, _repeat_record, _other_pictures)),
    *map(_of_bytes, (_flip_bit, _truncate)),
    _delete_records,  # the last of WITH_PROGRAM
    *map(_of_records, (_change_label, _drop_last, _drop_one, _change_id)),
    *map(_of_bytes, (_flip_bit, _change_byte, _empty, _zero_block, _zero, _garble)),
    _swap_splits,
    *[_damage_description] * 4,
)


def _damaged_data(subject: str, number: int, rng: random.Random, scratch: Path) -> Outcome:
    """Promised: what differs in what would be trained or judged on is found, and where it is is said."""
    import tensorflow_datasets  # noqa: F401 - in the parent, once for all children

    split = "train" if rng.random() < 0.04 else "test"
    copy = scratch / "data" / cifar10.BUILDER
    copy.mkdir(parents=True)
    for path in (PREPARED / cifar10.BUILDER).iterdir():
        (copy / path.name).symlink_to(path)
    changed: dict[str, bytes | None] = {}
    what = ""
    while all(content == _content(name) for name, content in changed.items()):
        what, changed = DATA_FAULTS[number % len(DATA_FAULTS)](rng, split)
    for name, content in changed.items():
        (copy / name).unlink()
        if content is not None:
            (copy / name).write_bytes(content)
    judge = _judge_program if number < WITH_PROGRAM else _judge_reading
    outcome, ok = judge(scratch, split)
    return Outcome(what, outcome, ok)


def _judge_reading(scratch: Path, split: str) -> tuple[str, bool]:
    try:
        right = harness.in_child(_is_right, scratch / "data", split)
        return ("harmless", True) if right else ("not found", False)
    except harness.Raised as error:
        told = str(error)
    except harness.ChildDied as error:
        return f"reading {error}", False
    if not told.startswith("DataError: "):
        return f"raised {told.partition(':')[0]}", False
    return _how_found(told, split), _names(told, split)


def _is_right(directory: Path, split: str) -> bool:
    _forget_decoded(directory)
    return cifar10.read_split(directory, split).digest == cifar10.DIGESTS[split]


def _forget_decoded(directory: Path) -> None:
    """Leaves this process no split that was decoded before the damage."""
    os.environ["XDG_CACHE_HOME"] = str(directory / "cache")


def _judge_program(scratch: Path, split: str) -> tuple[str, bool]:
    """One that ends with exit code 3, the code of bad data, and one line that says so."""

    def train():
        _forget_decoded(scratch / "data")
        sys.argv = ["train.py", *ONE_STEP, f"--data_dir={scratch / 'data'}", f"--train_dir={scratch / 'run'}"]
        main.train()

    code = harness.wait(harness.fork(train, scratch / "told"), timeout=120)
    told = (scratch / "told").read_text()
    lines = [line for line in told.splitlines() if line.startswith("data: ")]
    if code != 3 or len(lines) != 1 or "Traceback" in told:
        return f"exit code {code}, {len(lines)} lines", False
    return f"{_how_found(lines[0], split)}, by the program", _names(lines[0], split)


def _how_found(told: str, split: str) -> str:
    ways = {"its digest is": "digest", "examples, ": "counts", "cannot be read": "unreadable"}
    way = next((ways[part] for part in ways if part in told), "otherwise")
    return f"found: {way}" if _names(told, split) else f"found without its name: {way}"


def _names(told: str, split: str) -> bool:
    return f"{split} split" in told or _file_name(split) in told


EXPERIMENTS = [Experiment("damaged checkpoint", subjects.EVERY, 60, 1000, _damaged_checkpoint)]
if cifar10.is_prepared(PREPARED):
    EXPERIMENTS.append(Experiment("damaged data", (subjects.OURS,), 20, 500, _damaged_data))
else:
    print("no prepared CIFAR-10 in TFDS_DATA_DIR: its files are not damaged")

"""The common part of a user's own data sets, from folders, tables or arrays: classes, splits, and how they are read."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cifar_towers.data.dataset import DatasetInfo, Split, moments
from cifar_towers.errors import DataError, did_you_mean, listed

log = logging.getLogger(__name__)

SPLITS = ("train", "validation", "test")
ALL = "all"  # the split of data without splits: a fifth of each class becomes the test split
TEST_FRACTION = 0.2


class OwnData(NamedTuple):
    """The examples of a data set of the user's own, located but not read."""

    class_names: tuple[str, ...]
    # Split -> (n items, their class numbers [n] int64): `all` alone, or `train` first if there is one. The first split
    # that is read gives mean and standard deviation. Errors name an item by its text.
    splits: dict[str, tuple[Any, np.ndarray]]
    # Return a hash of an item that stays the same when the data are moved. The order of the hashes decides which
    # examples are held out.
    hash_of: Callable[[Any], bytes]
    read: Callable[[Sequence[Any], int], tuple[np.ndarray, dict[int, str]]]  # as `image_files.read_all` does
    class_roots: tuple[Path, ...] = ()  # folders whose subfolders are classes


def number_classes(
    splits: Mapping[str, tuple[Any, Sequence[Any]]],
    classes: Mapping[Any, str],
    complete: Sequence[str] = ("train", "test"),
    hint: str = "add another",
) -> dict[str, tuple[Any, np.ndarray]]:
    """Check the examples, and return them with the numbers of their classes [n] int64 in place of labels.

    Args:
      splits: split -> items and their labels. Without a test, `validation` becomes the test split.
      classes: label -> name of the class, in the order of their numbers.
      complete: splits that need an example of every class, if there is something to train on.
      hint: end of the messages about too few classes or examples.

    Raises:
      ValueError: there are too few classes or two of one name, or a label, a split or an example is missing.
    """
    names, numbers = [*classes.values()], {label: number for number, label in enumerate(classes)}
    is_for_training = bool(splits.keys() & {"train", ALL})
    if len(names) < (2 if is_for_training else 1):
        raise ValueError(f"at least two classes are needed, and there is {listed(names) or 'none'}; {hint}")
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ValueError(f"{listed(twice)} is the name of several classes; give each class a name of its own")
    if ALL in splits and len(splits) > 1:
        others = listed([name for name in splits if name != ALL])
        raise ValueError(f"some examples are of {others}, and others have no split; give all a split, or none")
    if "validation" in splits and "test" not in splits:
        log.info("there are no test examples: validation is used as the test split")
        splits = {("test" if name == "validation" else name): split for name, split in splits.items()}
    for name, (_, labels) in splits.items():
        counts = Counter(labels)
        if unknown := [str(label) for label in counts if label not in numbers]:
            suggestion = did_you_mean(unknown[0], names) or f"the classes are {listed(names)}; "
            raise ValueError(f"{listed(sorted(unknown))} in {name} is no class; {suggestion}give all splits the same")
        needed = is_for_training * {ALL: 2, **dict.fromkeys(complete, 1)}.get(name, 0)  # of two, one is tested on
        if few := [classes[label] for label in classes if counts[label] < needed]:
            use = "test" if name == "test" else "train"
            suggestion = "".join(did_you_mean(name, {*names}.difference(few)) for name in few[:3])
            raise ValueError(f"no images of {listed(few)} to {use} on; {suggestion}every class needs some; {hint}")
    return {
        name: (items, np.array([numbers[label] for label in labels], np.int64))
        for name, (items, labels) in splits.items()
    }


def load(data: OwnData, image_size: int, names: Sequence[str]) -> dict[str, Split]:
    """Return the splits of these names that have examples, in the order of `divided`.

    Raises:
      DataError: some images cannot be read; the message names them.
    """
    splits = {name: (items, labels) for name, items, labels in divided(data, names) if len(labels)}
    if not splits:
        return {}
    arrays, errors = {}, []
    for name, (items, _) in splits.items():
        arrays[name], failed = data.read(items, image_size)
        errors += [f"{items[index]} {error}" for index, error in failed.items()]
    if errors:
        count = sum(len(labels) for _, labels in splits.values())
        raise DataError(f"{len(errors)} of {count} images cannot be read: {listed(errors)}; repair or remove them")
    images = next(iter(arrays.values()))
    if (brightest := int(images.max())) < 32:
        log.info(
            f"the brightest pixel of {len(images)} images is {brightest} of 255: scale them to 0 to 255 first, or "
            "pictures of 16 bits to 0 to 65535"
        )
    info = DatasetInfo(data.class_names, image_size, *moments(images))
    return {name: Split(array, splits[name][1], info) for name, array in arrays.items()}


def divided(data: OwnData, names: Sequence[str] = SPLITS) -> Iterator[tuple[str, list[Any], np.ndarray]]:
    """Yield (split, items, class numbers) of these splits, in the order of the items' hashes.

    In this order the first examples are a random sample, as some callers need. If the data has no splits, the first
    fifth of each class is the test split. Corrupted images keep their order, which is the same in each of their sets.
    """
    for name, (items, labels) in data.splits.items():
        if name not in (*names, ALL):
            continue
        order = np.argsort(labels, kind="stable") if name == ALL else np.arange(len(labels))  # where hashes are equal
        if name in (*SPLITS, ALL):
            hashes = [data.hash_of(item) for item in items]
            order = np.array(sorted(order, key=hashes.__getitem__), int)
        parts = {name: order}
        if name == ALL:
            held_out = np.zeros(len(order), bool)
            for number in range(len(data.class_names)):
                places = np.flatnonzero(labels[order] == number)
                held_out[places[: max(1, round(TEST_FRACTION * len(places)))]] = True
            parts = {"train": order[~held_out], "test": order[held_out]}
        for part, chosen in parts.items():
            if part in names:
                yield part, [items[index] for index in chosen], labels[chosen]

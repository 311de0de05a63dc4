"""A checkpoint is read back to the bit, by NumPy alone; whatever a disk does to it is noticed."""

import json
import random
import re

import numpy as np
import pytest

from cifar_towers.errors import DataError, UsageError
from cifar_towers.runs.checkpoint import (
    checkpoint_path,
    find_checkpoint,
    list_checkpoints,
    read_checkpoint,
    write_checkpoint,
)

VALUES = {
    "model.conv1.kernel": np.random.default_rng(0).normal(size=(9, 80, 4)).astype(np.float32),
    "model.a/b.c": np.array([1, 2], np.uint32),
    "step": np.int64(12),
}


def save(directory, step=12, values=VALUES, **metadata):
    path = checkpoint_path(directory, step)
    write_checkpoint(path, values, {"step": step, **metadata})
    return path


def test_round_trip_also_by_numpy_alone(tmp_path):
    path = save(tmp_path, towers=2)
    values, metadata = read_checkpoint(path)
    archive = np.load(path)

    assert metadata == {"step": 12, "towers": 2, "num_variables": 3}
    assert json.loads(str(archive["metadata"])) == metadata
    assert values.keys() == VALUES.keys()
    assert list(tmp_path.iterdir()) == [path]

    for name, value in VALUES.items():
        assert values[name].dtype == value.dtype
        np.testing.assert_array_equal(values[name], value)
        np.testing.assert_array_equal(archive[name], value)


def faults_of(content):
    """Yield contents with one fault of a disk each: a flipped bit, a cut, zeros, another end.

    The bits are in every byte of an array's header and of the archive's end, and in random ones.
    """
    generator = random.Random(0)
    header = content.index(b"NUMPY")
    places = [*range(header, header + 127), *range(len(content) - 22, len(content))]
    places += [generator.randrange(len(content)) for _ in range(100)]
    for place in places:
        flipped = bytearray(content)
        flipped[place] ^= 1 << generator.randrange(8)
        yield bytes(flipped)
    for _ in range(20):
        place = generator.randrange(len(content))
        yield content[:place]
        yield content[:place] + bytes(len(content) - place)
    yield b""
    yield bytes(len(content))
    yield bytes(255 - byte for byte in content)


def test_no_fault_is_read_as_other_values(tmp_path):
    """Bits of the archive that say nothing about its content, such as times, may flip unnoticed."""
    path = save(tmp_path)
    expected = read_checkpoint(path)
    content = path.read_bytes()
    noticed = 0
    count = 0
    for fault in faults_of(content):
        path.write_bytes(fault)
        count += 1
        try:
            values, metadata = read_checkpoint(path)
        except DataError as error:
            assert "step-12.npz is damaged" in str(error)
            noticed += 1
            continue
        assert metadata == expected[1]
        assert values.keys() == VALUES.keys()
        for name, value in VALUES.items():
            np.testing.assert_array_equal(values[name], value)

    assert noticed > 0.7 * count


def test_a_checkpoint_under_another_steps_name_is_damaged(tmp_path):
    path = save(tmp_path)
    with pytest.raises(DataError, match="step-13.npz"):
        read_checkpoint(path.rename(checkpoint_path(tmp_path, 13)))


@pytest.mark.parametrize("name", ["run", "run [1]", "läuft*"])
def test_other_files_are_no_checkpoints(tmp_path, name):
    directory = tmp_path / name
    directory.mkdir()
    others = [".DS_Store", "step-7.npz.bak", "step-8.npz.damaged", ".tmp-step-9.npz", "step-x.npz"]
    for other in others:
        (directory / other).write_text("")
    for place in (directory, tmp_path / "none"):
        with pytest.raises(UsageError, match=re.escape(str(place))):
            find_checkpoint(place)
    for step in (9, 100, 20):
        save(directory, step)

    names = [path.name for path in list_checkpoints(directory)]
    assert names == ["step-9.npz", "step-20.npz", "step-100.npz"]
    assert find_checkpoint(directory).name == "step-100.npz"
    assert find_checkpoint(directory, 9).name == "step-9.npz"

    with pytest.raises(UsageError, match="step 7.*step-9.npz"):
        find_checkpoint(directory, 7)


class Canary:
    """An object whose pickle makes a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_a_pickled_object_is_not_executed(tmp_path):
    path = checkpoint_path(tmp_path, 12)
    canary = np.array([Canary(tmp_path / "executed")], object)
    metadata = json.dumps({"step": 12, "num_variables": 1})
    np.savez(path, canary=canary, metadata=np.array(metadata))
    with pytest.raises(DataError, match="step-12.npz is damaged"):
        read_checkpoint(path)

    assert not (tmp_path / "executed").exists()

    np.load(path, allow_pickle=True)["canary"]
    assert (tmp_path / "executed").exists()  # so that the test could fail

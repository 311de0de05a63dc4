"""The cache of decoded splits, with a small data set and its digests in place of CIFAR-10."""

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from cifar_towers.data import cache, cifar10, sources, synthetic
from cifar_towers.errors import DataError

ROOT = Path(__file__).parents[2]
SMALL = {"train": synthetic.make(200, 0, 0), "test": synthetic.make(100, 0, 1)}


@pytest.fixture
def decoded(monkeypatch, tmp_path):
    """Names of the splits that were decoded."""
    names = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cifar10, "SIZES", {name: len(split.labels) for name, split in SMALL.items()})
    monkeypatch.setattr(cifar10, "DIGESTS", {name: split.digest for name, split in SMALL.items()})
    monkeypatch.setattr(cifar10, "reachable", lambda host: False)
    monkeypatch.setattr(cifar10, "_from_tfds", lambda directory, name: names.append(name) or SMALL[name])
    return names


@pytest.fixture
def prepared(tmp_path):
    """A directory that `is_prepared` accepts."""
    (tmp_path / cifar10.BUILDER).mkdir(parents=True)
    (tmp_path / cifar10.BUILDER / "dataset_info.json").write_text("{}")
    return tmp_path


def files():
    return sorted(path for path in cache.directory().iterdir() if path.name != ".lock")


def are_verified(splits):
    return [split.digest for split in splits] == list(cifar10.DIGESTS.values())


def test_second_start_reads_the_cache_and_needs_no_prepared_copy(decoded, prepared, tmp_path, monkeypatch):
    cifar10.load(prepared)
    assert decoded == ["train", "test"] and len(files()) == 2
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "nowhere"))
    for dataset in ("cifar10", "auto"):
        source, data = sources.load(sources.find(dataset))
        assert source.name == "cifar10" and are_verified((data.train, data.test))
        np.testing.assert_array_equal(data.train.images, SMALL["train"].images)
        np.testing.assert_array_equal(data.test.labels, SMALL["test"].labels)
    assert decoded == ["train", "test"]


def flip_bit(content):
    return content[:999] + bytes([content[999] ^ 1]) + content[1000:]


@pytest.mark.parametrize(
    "damage",
    [
        flip_bit,
        lambda content: content[:-1],
        lambda content: content[: len(content) // 2],
        lambda content: content + b"x",
        lambda content: content[:-8] + b"\xff" * 8,  # a label that no class has
        lambda content: b"",
    ],
    ids=["flipped bit", "missing byte", "half", "extra byte", "wrong label", "empty"],
)
def test_damaged_cache_is_reported_and_replaced(decoded, prepared, caplog, damage):
    cifar10.load(prepared)
    path = next(path for path in files() if "train" in path.name)
    path.write_bytes(damage(path.read_bytes()))
    decoded.clear()
    caplog.clear()
    assert are_verified(cifar10.load(prepared)) and decoded == ["train"]
    messages = [record.getMessage() for record in caplog.records if "is damaged;" in record.getMessage()]
    assert messages == [f"{path} is damaged; it is removed and decoded again"]
    assert are_verified(cifar10.load(prepared)) and decoded == ["train"]


def test_damaged_cache_without_a_prepared_copy_is_an_error(decoded, prepared, tmp_path, monkeypatch):
    cifar10.load(prepared)
    path = next(path for path in files() if "test" in path.name)
    path.write_bytes(flip_bit(path.read_bytes()))
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "nowhere"))
    source = sources.find("cifar10")
    for use in (lambda: sources.load(source), lambda: sources.find("cifar10")):
        with pytest.raises(DataError, match="no CIFAR-10 in .*nowhere"):
            use()


def test_splits_are_verified_before_they_are_cached(decoded, prepared, monkeypatch):
    monkeypatch.setitem(SMALL, "train", synthetic.make(200, 1, 0))
    with pytest.raises(DataError, match="train split is damaged"):
        cifar10.load(prepared)
    assert not cache.directory().exists()


def test_unwritable_cache_is_ignored(decoded, prepared, monkeypatch, tmp_path, caplog):
    caplog.set_level("INFO")
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # not a directory, so that root cannot write either
    for _ in range(2):
        assert are_verified(cifar10.load(prepared))
    assert decoded == ["train", "test"] * 2
    assert "cannot be cached (Not a directory)" in caplog.text


def test_full_disk_leaves_no_partial_file(decoded, prepared, monkeypatch):
    monkeypatch.setattr(os, "replace", Mock(side_effect=OSError(28, "No space left on device")))
    assert are_verified(cifar10.load(prepared)) and files() == []


SAVE_AND_LOAD = """
import sys
from cifar_towers.data import cache, synthetic
split, exists = synthetic.make(200, 0, 0), False
print("ready", flush=True)
sys.stdin.readline()
for _ in range(20):
    cache.save("small", split)
    loaded = cache.load("small", split.digest)  # removes a partial file
    assert loaded or not exists, "an existing file is gone"
    exists = exists or loaded is not None
"""


def test_concurrent_processes_never_read_partial_files(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    processes = [subprocess.Popen([sys.executable, "-c", SAVE_AND_LOAD], **pipes) for _ in range(4)]
    assert [process.stdout.readline() for process in processes] == ["ready\n"] * 4
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        process.communicate(timeout=60)
    assert [process.returncode for process in processes] == [0] * 4
    assert [path.name for path in files()] == ["small"]
    assert cache.load("small", SMALL["train"].digest)


def test_loading_from_the_cache_imports_no_tensorflow(decoded, prepared):
    cifar10.load(prepared)
    program = (
        "import sys; from cifar_towers.data import cache; "
        f"split = cache.load({files()[0].name!r}, {cifar10.DIGESTS['test']!r}); "
        "print(len(split.labels), {'tensorflow', 'tensorflow_datasets'} & {*sys.modules})"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert result.stdout == "100 set()\n", result.stderr

"""Decoded splits kept between starts: a small set stands in for CIFAR-10, its digests for the known ones."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cifar_towers.data import cache, cifar10, sources, synthetic
from cifar_towers.errors import DataError

ROOT = Path(__file__).parents[2]
SMALL = {"train": synthetic.make(200, 0, 0), "test": synthetic.make(100, 0, 1)}


@pytest.fixture
def decoded(monkeypatch, tmp_path):
    """The names of the splits that had to be decoded."""
    names = []

    def decode(directory, name):
        names.append(name)
        return SMALL[name]

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cifar10, "SIZES", {name: len(split.labels) for name, split in SMALL.items()})
    monkeypatch.setattr(cifar10, "DIGESTS", {name: split.digest for name, split in SMALL.items()})
    monkeypatch.setattr(cifar10, "reachable", lambda host, timeout: False)
    monkeypatch.setattr(cifar10, "_from_tfds", decode)
    return names


@pytest.fixture
def prepared(tmp_path):
    """A directory that passes for one with a prepared copy."""
    (tmp_path / cifar10.BUILDER).mkdir(parents=True)
    (tmp_path / cifar10.BUILDER / "dataset_info.json").write_text("{}")
    return tmp_path


def files():
    return sorted(path for path in cache.directory().iterdir() if path.name != ".lock")


def are_right(splits):
    return [split.digest for split in splits] == list(cifar10.DIGESTS.values())


def test_a_second_start_decodes_nothing_and_needs_no_prepared_copy(decoded, prepared, tmp_path):
    cifar10.load(prepared)
    assert decoded == ["train", "test"] and len(files()) == 2
    nowhere = str(tmp_path / "nowhere")
    for dataset in ("cifar10", "auto"):
        source, data = sources.load(sources.find(dataset, nowhere))
        assert source.name == "cifar10" and are_right((data.train, data.test))
        np.testing.assert_array_equal(data.train.images, SMALL["train"].images)
        np.testing.assert_array_equal(data.test.labels, SMALL["test"].labels)
    assert decoded == ["train", "test"]


def flip(content):
    return content[:999] + bytes([content[999] ^ 1]) + content[1000:]


@pytest.mark.parametrize(
    "damage",
    [
        flip,
        lambda content: content[:-1],
        lambda content: content[: len(content) // 2],
        lambda content: content + b"x",
        lambda content: content[:-8] + b"\xff" * 8,  # a label that no class has
        lambda content: b"",
    ],
    ids=["a bit", "a byte short", "half", "a byte more", "a label", "nothing"],
)
def test_damage_is_told_in_a_line_and_made_good(decoded, prepared, caplog, damage):
    cifar10.load(prepared)
    path = next(path for path in files() if "train" in path.name)
    path.write_bytes(damage(path.read_bytes()))
    decoded.clear()
    caplog.clear()
    assert are_right(cifar10.load(prepared)) and decoded == ["train"]
    told = [record.getMessage() for record in caplog.records if "damaged" in record.getMessage()]
    assert told == [f"{path} is damaged: removed, and made anew"]
    assert are_right(cifar10.load(prepared)) and decoded == ["train"]


def test_damage_with_nothing_to_make_it_anew_from_is_an_error(decoded, prepared, tmp_path):
    cifar10.load(prepared)
    path = next(path for path in files() if "test" in path.name)
    path.write_bytes(flip(path.read_bytes()))
    source = sources.find("cifar10", str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match="no CIFAR-10 in .*nowhere"):
        sources.load(source)
    with pytest.raises(DataError, match="no CIFAR-10 in .*nowhere"):
        sources.find("cifar10", str(tmp_path / "nowhere"))


def test_what_is_decoded_is_verified_before_it_is_kept(decoded, prepared, monkeypatch):
    monkeypatch.setitem(SMALL, "train", synthetic.make(200, 1, 0))
    with pytest.raises(DataError, match="train split is damaged"):
        cifar10.load(prepared)
    assert not cache.directory().exists()


def test_where_nothing_can_be_kept_the_data_is_had_all_the_same(decoded, prepared, monkeypatch, tmp_path, caplog):
    caplog.set_level("INFO")
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # no directory, for root neither
    for _ in range(2):
        assert are_right(cifar10.load(prepared))
    assert decoded == ["train", "test"] * 2
    assert "cannot be kept for the next start (Not a directory)" in caplog.text


def test_a_full_disk_leaves_no_part_of_a_file(decoded, prepared, monkeypatch):
    def replace(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", replace)
    assert are_right(cifar10.load(prepared)) and files() == []


KEEP = """
import sys
from cifar_towers.data import cache, synthetic
split, began = synthetic.make(200, 0, 0), False
print("ready", flush=True)
sys.stdin.readline()
for _ in range(20):
    cache.save("small", split)
    found = cache.load("small", split.digest)  # would remove one that is not whole
    assert found or not began, "a file that stood is gone"
    began = began or found is not None
"""


def test_processes_that_keep_at_once_find_whole_files(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    processes = [subprocess.Popen([sys.executable, "-c", KEEP], **pipes) for _ in range(4)]
    assert [process.stdout.readline() for process in processes] == ["ready\n"] * 4
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        process.communicate(timeout=60)
    assert [process.returncode for process in processes] == [0] * 4
    assert [path.name for path in files()] == ["small"]
    assert cache.load("small", SMALL["train"].digest)


def test_finding_and_loading_kept_data_imports_no_tensorflow(decoded, prepared):
    cifar10.load(prepared)
    program = (
        "import sys; from cifar_towers.data import cache; "
        f"split = cache.load({files()[0].name!r}, {cifar10.DIGESTS['test']!r}); "
        "print(len(split.labels), {'tensorflow', 'tensorflow_datasets'} & {*sys.modules})"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert told.stdout == "100 set()\n", told.stderr

"""CIFAR-10: found, verified, and cached after decoding; most tests use a small data set and its digests instead."""

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from cifar_towers.data import cifar10, sources, synthetic, tfds_source
from cifar_towers.errors import DataError, UsageError

ROOT = Path(__file__).parents[2]
SMALL = {"train": synthetic.make(200, 0, 0), "test": synthetic.make(100, 0, 1)}


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "keras"))


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setattr(cifar10, "reachable", lambda url: False)


@pytest.fixture
def online(monkeypatch):
    monkeypatch.setattr(cifar10, "reachable", lambda url: True)


@pytest.fixture
def cached(monkeypatch):
    monkeypatch.setattr(cifar10, "is_cached", lambda: True)


@pytest.fixture
def decoded(monkeypatch, offline):
    """Names of the splits that were decoded."""
    names = []
    monkeypatch.setattr(cifar10, "DIGESTS", {name: split.digest for name, split in SMALL.items()})
    monkeypatch.setattr(cifar10, "_from_tfds", lambda directory, name: names.append(name) or SMALL[name])
    return names


@pytest.fixture
def prepared(tmp_path):
    """Return a directory that `is_prepared` accepts."""
    (tmp_path / cifar10.BUILDER).mkdir(parents=True)
    (tmp_path / cifar10.BUILDER / "dataset_info.json").write_text("{}")
    return tmp_path


def files():
    return sorted(path for path in cifar10.cache_directory().iterdir() if path.name != ".lock")


def are_verified(splits):
    return [split.digest for split in splits.values()] == list(cifar10.DIGESTS.values())


def test_missing_cifar10_is_an_error_and_auto_falls_back_to_synthetic(offline, tmp_path):
    with pytest.raises(DataError, match=r"put cifar-10-binary.tar.gz into .*downloads/manual"):
        sources.find("cifar10", str(tmp_path))
    source = sources.find("auto", str(tmp_path))
    assert source.name == "synthetic" and source.banner.startswith("SYNTHETIC DATA")


def test_prepared_copy_needs_no_network_and_is_an_error_if_damaged(offline, prepared):
    source = sources.find("auto", str(prepared))
    assert (source.name, source.directory, source.banner) == ("cifar10", prepared, "")
    with pytest.raises(DataError, match="cannot be read"):
        sources.load(source, fall_back=True)


@pytest.mark.parametrize("dataset", ["cifar10", "auto"])
@pytest.mark.parametrize(("name", "problem"), [("nowhere", "does not exist"), ("", "has no cifar10/3.0.2")])
def test_data_dir_that_would_not_be_used_is_refused(cached, tmp_path, dataset, name, problem):
    with pytest.raises(UsageError, match=f"data_dir={tmp_path / name} {problem}"):
        sources.find(dataset, str(tmp_path / name))


def test_data_dir_for_a_download_is_accepted(online, tmp_path):
    assert sources.find("cifar10", str(tmp_path / "new")).directory == tmp_path / "new"


def test_data_dir_of_a_copy_or_an_archive_is_accepted(cached, prepared, tmp_path):
    archive = tmp_path / "other/downloads/manual" / cifar10.ARCHIVE
    archive.parent.mkdir(parents=True)
    archive.touch()
    for directory in (prepared, tmp_path / "other"):
        assert sources.find("cifar10", str(directory)).directory == directory


def test_second_start_reads_the_cache_and_needs_no_prepared_copy(decoded, prepared, tmp_path, monkeypatch):
    cifar10.load(prepared)
    assert decoded == ["train", "test"] and len(files()) == 2
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "nowhere"))
    for dataset in ("cifar10", "auto"):
        source, data = sources.load(sources.find(dataset))
        assert source.name == "cifar10" and are_verified({"train": data.train, "test": data.test})
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
        lambda content: content[:-8] + b"\xff" * 8,  # a label that no class has
        lambda content: b"",
    ],
    ids=["flipped bit", "missing byte", "half", "wrong label", "empty"],
)
def test_damaged_cache_is_reported_and_replaced(decoded, prepared, caplog, damage):
    cifar10.load(prepared)
    path = next(path for path in files() if "train" in path.name)
    path.write_bytes(damage(path.read_bytes()))
    decoded.clear()
    caplog.clear()
    assert are_verified(cifar10.load(prepared)) and decoded == ["train"]
    (message,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert message.startswith(f"{path} is damaged")
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


@pytest.mark.parametrize("wrong", [synthetic.make(200, 1, 0), SMALL["train"].take(slice(199))])
def test_splits_are_verified_before_they_are_cached(decoded, prepared, monkeypatch, wrong):
    monkeypatch.setitem(SMALL, "train", wrong)
    with pytest.raises(DataError, match=f"train split is damaged: its {len(wrong.labels)} examples"):
        cifar10.load(prepared)
    assert not cifar10.cache_directory().exists()


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
from cifar_towers.data import cifar10, synthetic
split, exists = synthetic.make(200, 0, 0), False
cifar10.DIGESTS["train"] = split.digest
print("ready", flush=True)
sys.stdin.readline()
for _ in range(20):
    cifar10._save_to_cache("train", split)
    loaded = cifar10._load_cached("train")  # removes a partial file
    assert loaded or not exists, "an existing file is gone"
    exists = exists or loaded is not None
"""


def test_concurrent_processes_never_read_partial_files(decoded):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    processes = [subprocess.Popen([sys.executable, "-c", SAVE_AND_LOAD], **pipes) for _ in range(4)]
    assert [process.stdout.readline() for process in processes] == ["ready\n"] * 4
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        process.communicate(timeout=60)
    assert [process.returncode for process in processes] == [0] * 4
    assert len(files()) == 1 and cifar10._load_cached("train")


def test_loading_from_the_cache_imports_no_tensorflow(decoded, prepared):
    cifar10.load(prepared)
    program = (
        "import sys; from cifar_towers.data import cifar10; "
        f"cifar10.DIGESTS['test'] = {cifar10.DIGESTS['test']!r}; split = cifar10._load_cached('test'); "
        "print(len(split.labels), {'tensorflow', 'tensorflow_datasets'} & {*sys.modules})"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert result.stdout == "100 set()\n", result.stderr


needs_data = pytest.mark.skipif(
    not cifar10.is_prepared(tfds_source.tfds_directory()), reason="no prepared CIFAR-10 on this machine"
)


@needs_data
def test_real_test_split_has_the_published_counts_and_moments():
    test = cifar10.load(tfds_source.tfds_directory(), ["test"])["test"]
    assert test.digest == cifar10.DIGESTS["test"] and (test.class_counts() == 1000).all()
    np.testing.assert_allclose(test.images.mean((0, 1, 2)) / 255, [0.4942, 0.4851, 0.4504], atol=1e-3)


@needs_data
@pytest.mark.slow
def test_real_data_set_has_the_published_counts_and_moments():
    _, data = sources.load(sources.find("cifar10"), validation_examples=5000)
    assert [len(s.labels) for s in (data.train, data.validation, data.test)] == [45_000, 5_000, 10_000]
    assert data.test.digest == cifar10.DIGESTS["test"]
    pixels = data.train.images.reshape(-1, 3) / 255
    np.testing.assert_allclose(pixels.mean(0), [0.4914, 0.4822, 0.4465], atol=1e-3)
    np.testing.assert_allclose(pixels.std(0), [0.2470, 0.2435, 0.2616], atol=1e-3)

"""CIFAR-10: found in its places, verified, and cached; most tests use a small data set and its
digests instead.
"""

import hashlib
import os
import pickle
import socket
import tarfile
from unittest.mock import Mock

import numpy as np
import pytest
from tensorflow_datasets.core.hashing import Hasher

from cifar_towers.data import cifar10, sources, synthetic, tfds_source
from cifar_towers.errors import DataError

COUNT = 20  # images of a file
# in the files' order
PUBLISHED = {"train": synthetic.make(5 * COUNT, 0, 0), "test": synthetic.make(COUNT, 0, 1)}


def in_tfds_order(name):
    """Return the split as TFDS's own writer sorts it."""
    split = PUBLISHED[name]
    hasher = Hasher(name)
    return split.take(np.array(sorted(range(len(split.labels)), key=hasher.hash_key)))


STORED = {name: in_tfds_order(name) for name in PUBLISHED}


def batches():
    """Return the published files by name."""
    parts = {
        f"data_batch_{n + 1}": PUBLISHED["train"].take(slice(n * COUNT, (n + 1) * COUNT))
        for n in range(5)
    }
    parts["test_batch"] = PUBLISHED["test"]
    planes = {
        name: split.images.transpose(0, 3, 1, 2).reshape(COUNT, -1) for name, split in parts.items()
    }
    return {
        name: pickle.dumps({b"labels": parts[name].labels.tolist(), b"data": planes[name]})
        for name in parts
    }


def write(path):
    """Write a folder of files, or an archive if the path's suffix says so; return the path."""
    folder = path.with_name("packed") if path.suffix == ".gz" else path
    folder.mkdir(parents=True)
    for name, content in {**batches(), "readme.html": b"CIFAR-10"}.items():
        (folder / name).write_bytes(content)
    if folder != path:
        with tarfile.open(path, "w:gz") as archive:
            archive.add(folder, "cifar-10-batches-py")
    return path


@pytest.fixture(autouse=True)
def own_place(monkeypatch, tmp_path):
    """Leave this machine's copies, caches and network out of it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "keras"))
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "tfds"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket, "create_connection", Mock(side_effect=TimeoutError))


@pytest.fixture
def small(monkeypatch):
    """Make the small files the right ones."""
    monkeypatch.setattr(cifar10, "DIGESTS", {name: split.digest for name, split in STORED.items()})
    md5 = {name: hashlib.md5(content).hexdigest() for name, content in batches().items()}
    known = {}
    for split, names in cifar10.BATCHES.items():
        known[split] = {name: md5[name] for name in names}
    monkeypatch.setattr(cifar10, "BATCHES", known)


@pytest.fixture
def decoded(monkeypatch, small):
    """Names of the splits that TFDS decoded."""
    names = []

    def load(builder, directory, image_size, wanted):
        names.extend(wanted)
        return {name: STORED[name] for name in wanted}

    monkeypatch.setattr(tfds_source, "load", load)
    monkeypatch.setattr(socket, "create_connection", Mock())
    return names


def are_verified(splits):
    return [split.digest for split in splits.values()] == list(cifar10.DIGESTS.values())


# Places -------------------------------------------------------------------------------------------


def test_auto_falls_back_to_synthetic_if_nothing_is_here_and_the_host_does_not_answer(
    monkeypatch, tmp_path, caplog
):
    caplog.set_level("INFO")

    assert sources.find("auto", str(tmp_path)).name == "synthetic"

    (line,) = caplog.messages
    assert all(word in line for word in ("synthetic", str(tmp_path), cifar10.SOURCE_HOST))

    (address, timeout), _ = socket.create_connection.call_args
    assert address == ("www.cs.toronto.edu", 443)
    assert timeout < 5

    with pytest.raises(DataError, match=f"{cifar10.SOURCE_HOST} does not answer"):
        sources.load(sources.find("cifar10", str(tmp_path)))
    monkeypatch.setattr(socket, "create_connection", Mock())

    assert sources.find("auto", str(tmp_path)).name == "cifar10"
    assert sources.find("synthetic").name == "synthetic"
    assert len(caplog.messages) == 1


def test_damaged_prepared_copy_is_an_error_and_not_replaced_by_synthetic_data(tmp_path):
    (tmp_path / cifar10.BUILDER).mkdir(parents=True)
    (tmp_path / cifar10.BUILDER / "dataset_info.json").write_text("{}")
    source = sources.find("auto", str(tmp_path))
    assert source.name == "cifar10"
    with pytest.raises(DataError, match=f"{tmp_path}/{cifar10.BUILDER}$"):
        sources.load(source)


@pytest.mark.parametrize(
    "place",
    [
        "tfds/cifar-10-python.tar.gz",
        "data/cifar-10-batches-py",
        "keras/datasets/cifar-10-batches-py-target/cifar-10-batches-py",
    ],
)
def test_own_files_in_a_usual_place_are_read_in_tfds_order_and_cached(place, small, tmp_path):
    copy = write(tmp_path / place)
    source = sources.find("auto")

    assert source.name == "cifar10"

    data = sources.load(source)
    assert data.digests() == cifar10.DIGESTS
    assert data.train.labels.dtype == np.int64

    copy.rename(tmp_path / "elsewhere")
    assert sources.load(sources.find("cifar10")).digests() == cifar10.DIGESTS


def test_only_a_data_dir_that_is_given_is_looked_at(small, tmp_path):
    write(tmp_path / "data/cifar-10-batches-py")
    assert cifar10.is_available()
    assert not cifar10.is_available(str(tmp_path / "empty"))
    write(tmp_path / "mine/cifar-10-batches-py")
    assert are_verified(cifar10.load(str(tmp_path / "mine")))


# Damage -------------------------------------------------------------------------------------------


def flip_bit(content):
    return content[:999] + bytes([content[999] ^ 1]) + content[1000:]


def cut(content):
    return content[:-999]


def empty(content):
    return b""


@pytest.mark.parametrize("damage", [flip_bit, cut, empty])
@pytest.mark.parametrize(
    "place", ["tfds/cifar-10-python.tar.gz", "tfds/cifar-10-batches-py/data_batch_2"]
)
def test_damaged_copy_is_skipped_with_a_warning(place, damage, decoded, tmp_path, caplog):
    path = tmp_path / place
    copy = write(path if path.suffix == ".gz" else path.parent)
    path.write_bytes(damage(path.read_bytes()))

    assert are_verified(cifar10.load())
    assert decoded[0] == "train"
    assert str(copy) in caplog.messages[0]

    write(tmp_path / "data/cifar-10-batches-py")
    cifar10._cached_file("train").unlink()
    decoded.clear()

    assert are_verified(cifar10.load())
    assert not decoded


@pytest.mark.parametrize("damage", [flip_bit, cut, empty])
def test_cache_is_read_unless_it_is_damaged(decoded, caplog, damage):
    assert are_verified(cifar10.load())
    assert decoded == ["train", "test"]
    assert sources.load(sources.find("auto")).digests() == cifar10.DIGESTS
    assert decoded == ["train", "test"]

    path = cifar10._cached_file("train")
    path.write_bytes(damage(path.read_bytes()))
    for _ in range(2):
        assert are_verified(cifar10.load())
        assert decoded == ["train", "test", "train"]

    assert [str(path) in message for message in caplog.messages] == [True]


class Canary:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def test_pickle_that_is_not_the_published_file_is_not_executed(decoded, tmp_path):
    copy = write(tmp_path / "data/cifar-10-batches-py")
    (copy / "data_batch_1").write_bytes(pickle.dumps({b"labels": Canary(), b"data": 0}))
    assert are_verified(cifar10.load())
    assert decoded == ["train"]
    assert not (tmp_path / "executed").exists()
    pickle.loads((copy / "data_batch_1").read_bytes())
    assert (tmp_path / "executed").exists()


def test_unwritable_cache_is_ignored_and_a_full_disk_leaves_no_partial_file(
    decoded, monkeypatch, tmp_path
):
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", Mock(side_effect=OSError(28, "No space left on device")))
        assert are_verified(cifar10.load())
        assert not [*cifar10._cached_file("test").parent.iterdir()]
    (tmp_path / "file").touch()
    # not a directory, so that root cannot write either
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))

    assert are_verified(cifar10.load())
    assert decoded == ["train", "test"] * 2


# The real data set --------------------------------------------------------------------------------

REAL = tfds_source.tfds_directory()


@pytest.mark.slow
@pytest.mark.skipif(not cifar10.is_prepared(REAL), reason="no prepared CIFAR-10 on this machine")
def test_real_data_set_has_the_published_counts_and_moments():
    data = sources.load(sources.find("cifar10", str(REAL)), validation_examples=5000)

    counts = [len(split.labels) for split in (data.train, data.validation, data.test)]
    assert counts == [45_000, 5_000, 10_000]
    assert data.test.digest == cifar10.DIGESTS["test"]
    assert (data.test.class_counts() == 1000).all()

    pixels = data.train.images.reshape(-1, 3) / 255
    np.testing.assert_allclose(pixels.mean(0), [0.4914, 0.4822, 0.4465], atol=1e-3)
    np.testing.assert_allclose(pixels.std(0), [0.2470, 0.2435, 0.2616], atol=1e-3)

"""CIFAR-10's own files: small ones in the published formats, in the order of TFDS, and never executed."""

import codecs
import gzip
import io
import os
import pickle
import struct
import tarfile

import numpy as np
import pytest
from tensorflow_datasets.core.hashing import Hasher

from cifar_towers.data import cifar10, sources, synthetic, tfds_source
from cifar_towers.data.dataset import Split
from cifar_towers.errors import DataError, UsageError

COUNT = 20  # images of a file
PUBLISHED = {"train": synthetic.make(5 * COUNT, 0, 0), "test": synthetic.make(COUNT, 0, 1)}  # in the files' order


def in_tfds_order(name):
    """Return the split as TFDS's own writer sorts it."""
    hasher = Hasher(name)
    split = PUBLISHED[name]
    return split.take(np.array(sorted(range(len(split.labels)), key=hasher.hash_key)))


@pytest.fixture(scope="module")
def stored():
    return {name: in_tfds_order(name) for name in PUBLISHED}


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path, stored):
    """Make the small files the right ones, and leave this machine's copies and caches out of it."""
    for variable, place in (("XDG_CACHE_HOME", "cache"), ("KERAS_HOME", "keras"), ("TFDS_DATA_DIR", "tfds")):
        monkeypatch.setenv(variable, str(tmp_path / place))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cifar10, "reachable", lambda url: False)
    monkeypatch.setattr(cifar10, "DIGESTS", {name: split.digest for name, split in stored.items()})
    monkeypatch.setattr(cifar10, "IMAGES_PER_BATCH", COUNT)


def to_binary(split):
    planes = split.images.transpose(0, 3, 1, 2).reshape(len(split.labels), -1)
    return np.concatenate([split.labels[:, None].astype(np.uint8), planes], axis=1).tobytes()


def to_pickle(split):
    """Return the split as Python 2 pickled the published files, whose strings are bytes."""
    planes = split.images.transpose(0, 3, 1, 2).tobytes()
    number = struct.Struct("<i").pack
    labels = b"".join(b"K" + bytes([label]) for label in split.labels)
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85U\x01b\x87R"
    shape = b"(K\x01J" + number(len(split.labels)) + b"J" + number(3072) + b"\x86"
    dtype = b"cnumpy\ndtype\nU\x02u1K\0K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb"
    state = shape + dtype + b"\x89T" + number(len(planes)) + planes + b"tb"
    return b"\x80\x02}(U\x06labels](" + labels + b"eU\x04data" + array + state + b"u."


def batches(kind):
    """Return the files of a version by name."""
    parts = {f"data_batch_{n + 1}": PUBLISHED["train"].take(slice(n * COUNT, (n + 1) * COUNT)) for n in range(5)}
    parts["test_batch"] = PUBLISHED["test"]
    if kind == "bin":
        return {f"{name}.bin": to_binary(split) for name, split in parts.items()}
    return {name: to_pickle(split) for name, split in parts.items()}


def write(path, kind):
    """Write a folder of files, or an archive if the path's suffix says so; return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix != ".gz" and not path.name.endswith("_archive"):
        path.mkdir()
        for name, content in {**batches(kind), "readme.html": b"CIFAR-10"}.items():
            (path / name).write_bytes(content)
        return path
    with tarfile.open(path, "w:gz") as archive:
        for name, content in batches(kind).items():
            member = tarfile.TarInfo(f"cifar-10-batches-{kind}/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def test_pickles_of_these_tests_are_numpy_arrays():
    batch = pickle.loads(to_pickle(PUBLISHED["test"]), encoding="bytes")
    np.testing.assert_array_equal(batch[b"labels"], PUBLISHED["test"].labels)
    planes = PUBLISHED["test"].images.transpose(0, 3, 1, 2).reshape(COUNT, 3072)
    np.testing.assert_array_equal(batch[b"data"], planes)


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        ("tfds/cifar-10-batches-bin", "bin"),
        ("tfds/cifar-10-python.tar.gz", "py"),
        ("tfds/cifar-10-binary.tar.gz", "bin"),
        ("data/cifar-10-batches-py", "py"),
        ("keras/datasets/cifar-10-batches-py", "py"),
        ("keras/datasets/cifar-10-batches-py.tar.gz", "py"),
        ("keras/datasets/cifar-10-batches-py-target/cifar-10-batches-py", "py"),
        ("keras/datasets/cifar-10-batches-py-target_archive", "py"),
    ],
)
def test_copy_in_a_usual_place_is_read_in_tfds_order_and_cached(place, kind, stored, tmp_path, caplog):
    caplog.set_level("INFO", "cifar_towers")
    copy = write(tmp_path / place, kind)
    source = sources.find("auto")
    assert (source.name, source.banner) == ("cifar10", "")
    _, data = sources.load(source)
    for name, split in stored.items():
        read = getattr(data, name)
        np.testing.assert_array_equal(read.images, split.images)
        np.testing.assert_array_equal(read.labels, split.labels)
        assert read.digest == split.digest and read.labels.dtype == np.int64
    places = [message.rpartition(", from ")[2] for message in caplog.messages]
    assert [(tmp_path / place).resolve() for place in places] == [copy] * 2
    copy.rename(tmp_path / "elsewhere")
    assert sources.load(sources.find("cifar10"))[1].digests() == cifar10.DIGESTS


def test_data_dir_is_the_copy_or_holds_it_and_no_other_place_is_looked_at(tmp_path):
    write(tmp_path / "data/cifar-10-batches-py", "py")
    copy = write(tmp_path / "mine/cifar-10-batches-bin", "bin")
    archive = write(tmp_path / "mine/another.tar.gz", "py")
    for data_dir, found in ((copy.parent, copy), (copy, copy), (archive, archive)):
        source = sources.find("cifar10", str(data_dir))
        assert source.directory == found
    assert sources.load(source)[1].digests() == cifar10.DIGESTS
    with pytest.raises(UsageError, match="would not be used: CIFAR-10 is read from"):
        sources.find("cifar10", str(tmp_path / "empty"))
    (tmp_path / "data/my_batch.csv").touch()
    assert not cifar10.is_copy(tmp_path / "data")


class Canary:
    def __reduce__(self):
        return os.mkdir, ("executed",)


@pytest.mark.parametrize("protocol", [0, 2, 5])
@pytest.mark.parametrize("dataset", ["cifar10", "auto"])
def test_pickle_that_would_execute_code_is_refused(protocol, dataset, tmp_path):
    copy = write(tmp_path / "data/cifar-10-batches-py", "py")
    (copy / "data_batch_2").write_bytes(pickle.dumps({"labels": Canary()}, protocol))
    with pytest.raises(
        DataError, match=r"^data/cifar-10-batches-py/data_batch_2 .*would execute posix.mkdir\); replace"
    ):
        sources.load(sources.find(dataset), fall_back=dataset == "auto")
    assert not (tmp_path / "executed").exists()
    pickle.loads((copy / "data_batch_2").read_bytes())
    assert (tmp_path / "executed").exists()


@pytest.mark.parametrize(("protocol", "encoding"), [(1, "bytes"), (2, "bytes"), (2, "latin1"), (4, "bytes")])
def test_pickles_written_again_by_python_3_are_read(protocol, encoding, stored, tmp_path):
    copy = write(tmp_path / "data/cifar-10-batches-py", "py")
    for path in copy.glob("*batch*"):
        path.write_bytes(pickle.dumps(pickle.loads(path.read_bytes(), encoding=encoding), protocol))
    assert (b"_codecs" in path.read_bytes()) == (protocol < 3)
    for name, split in stored.items():
        assert cifar10.read_own_files(copy, name).digest == split.digest


def test_largest_file_that_python_3_writes_is_read_whole(tmp_path):
    content = pickle.dumps({b"data": np.full((10_000, 3072), 255, np.uint8), b"labels": [9] * 10_000}, 2)
    assert 2 * 30_720_000 < len(content) < cifar10.MAX_BATCH_BYTES
    assert 6 * len(content) < cifar10.MAX_ARCHIVE_BYTES


@pytest.mark.parametrize("arguments", [("x", "rot13"), ("x", "utf-8"), (b"x", "latin1"), ("x",), ("x", "latin1", "y")])
def test_codecs_encode_is_read_for_text_in_latin1_only(arguments, tmp_path):
    (tmp_path / "test_batch").write_bytes(pickle.dumps(Encoded(arguments), 2))
    with pytest.raises(DataError, match="would execute _codecs.encode|_encode_latin1"):
        cifar10.read_own_files(tmp_path, "test")


class Encoded:
    def __init__(self, arguments):
        self.arguments = arguments

    def __reduce__(self):
        return codecs.encode, self.arguments


def test_files_in_a_named_folder_are_read_though_cifar10_is_cached(tmp_path, caplog):
    caplog.set_level("INFO", "cifar_towers")
    copy = write(tmp_path / "mine/cifar-10-batches-py", "py")
    archive = write(tmp_path / "other/cifar-10-python.tar.gz", "py")
    sources.load(sources.find("cifar10", str(copy)))
    cache = {path: path.stat().st_mtime_ns for path in cifar10.cache_directory().iterdir()}
    caplog.clear()
    for data_dir, place in (
        (copy, copy),
        (archive, f"{cifar10.cache_directory()}, and {archive} is not read"),
        ("", cifar10.cache_directory()),
    ):
        assert sources.load(sources.find("cifar10", str(data_dir)))[1].digests() == cifar10.DIGESTS
        assert [message.rpartition(", from ")[2] for message in caplog.messages] == [str(place)] * 2
        caplog.clear()
    assert cache == {path: path.stat().st_mtime_ns for path in cifar10.cache_directory().iterdir()}
    batch = pickle.loads((copy / "data_batch_2").read_bytes(), encoding="bytes")
    batch[b"labels"][0] = (batch[b"labels"][0] + 1) % 10
    (copy / "data_batch_2").write_bytes(pickle.dumps(batch))
    with pytest.raises(DataError, match=f"train split is damaged: .*; replace {copy} by a good copy, or delete it"):
        sources.load(sources.find("auto", str(copy.parent)), fall_back=True)


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("cifar-10-batches-py/data_batch_3", lambda content: content[:-100], "data_batch_3 .*truncated"),
        ("cifar-10-batches-py/data_batch_3", lambda content: b"", "data_batch_3 .*Ran out of input"),
        ("cifar-10-batches-py/data_batch_3", lambda content: pickle.dumps({}), "data_batch_3 .*b'labels'"),
        ("cifar-10-batches-py/data_batch_3", None, "data_batch_3 .*no such file"),
        (
            "cifar-10-batches-bin/test_batch.bin",
            lambda content: content[1:],
            "test_batch.bin .* 61,459 bytes, not 61,460",
        ),
        (
            "cifar-10-python.tar.gz",
            lambda content: content[: len(content) // 2],
            "cifar-10-python.tar.gz .*before the end",
        ),
        ("cifar-10-python.tar.gz", lambda content: b"<html>", "cifar-10-python.tar.gz .*Not a gzipped file"),
        ("cifar-10-python.tar.gz", lambda content: gzip.compress(b"no tar" * 99), "cifar-10-python.tar.gz .*ReadError"),
        (
            "cifar-10-batches-bin/data_batch_1.bin",
            lambda content: content[:999] + bytes([content[999] ^ 1]) + content[1000:],
            "train split is damaged: its 100 examples have the digest .*; replace data/cifar-10-batches-bin by",
        ),
    ],
)
def test_damaged_copy_is_named_and_nothing_else_is_used(name, damage, message, tmp_path):
    path = tmp_path / "data" / name
    copy = path if path.suffix == ".gz" else path.parent
    write(copy, "py" if "py" in name else "bin")
    write(tmp_path / "data/cifar-10-batches-py.tar.gz", "py")  # a good one, later in the order
    content = path.read_bytes()
    path.unlink()
    if damage:
        path.write_bytes(damage(content))
    with pytest.raises(DataError, match=message + ".*or delete it") as caught:
        sources.load(sources.find("auto"), fall_back=True)
    assert "\n" not in str(caught.value)


def test_archive_is_read_to_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(cifar10, "MAX_ARCHIVE_BYTES", 100_000)
    write(tmp_path / "data/cifar-10-python.tar.gz", "py")
    with pytest.raises(DataError, match="data/cifar-10-python.tar.gz .*unexpected end of data"):
        sources.load(sources.find("cifar10"))


PREPARED = tfds_source.tfds_directory()


@pytest.mark.skipif(not cifar10.is_prepared(PREPARED), reason="no prepared CIFAR-10 on this machine")
def test_real_images_in_published_order_get_the_published_digest(tmp_path, monkeypatch):
    monkeypatch.undo()
    builder = tfds_source.import_tfds().builder("cifar10:3.0.2", data_dir=str(PREPARED))
    (batch,) = tfds_source.in_stored_order(builder, "test", batch_size=10_000)
    numbers = [int(name.removeprefix(b"test_")) for name in batch["id"]]
    published = Split(batch["image"], batch["label"]).take(np.argsort(numbers))
    (tmp_path / "test_batch").write_bytes(to_pickle(published))
    assert cifar10.read_own_files(tmp_path, "test").digest == cifar10.DIGESTS["test"]

import contextlib
import os
import socket

import numpy as np
import pytest

from cifar_towers.data import cifar10, sources, synthetic
from cifar_towers.data.dataset import Split
from cifar_towers.data.tfds_source import reachable
from cifar_towers.errors import DataError, RunError, UsageError
from cifar_towers.registry import BUILT_IN, CSV, FOLDER, NPY


@pytest.fixture
def no_proxy(monkeypatch):
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)


def test_host_is_probed_at_the_port_of_its_url(no_proxy, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert reachable(f"http://127.0.0.1:{port}/some/file")
    assert not reachable(f"http://127.0.0.1:{port}/some/file")
    probed = []
    monkeypatch.setattr(socket, "create_connection", lambda to, timeout: probed.append(to) or contextlib.nullcontext())
    assert reachable("http://one.org/a") and reachable("https://two.org/b")
    assert probed == [("one.org", 80), ("two.org", 443)]
    assert reachable("gs://bucket/c") and len(probed) == 2  # its port is unknown


@pytest.mark.parametrize(
    ("variable", "scheme"), [("http_proxy", "http"), ("HTTPS_PROXY", "https"), ("all_proxy", "http")]
)
def test_proxy_is_probed_instead_of_the_host(no_proxy, monkeypatch, variable, scheme):
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv(variable, f"127.0.0.1:{server.getsockname()[1]}")
        assert reachable(f"{scheme}://127.0.0.1:2")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        assert not reachable(f"{scheme}://127.0.0.1:2")
        monkeypatch.delenv("no_proxy")
    assert not reachable(f"{scheme}://127.0.0.1:2")
    monkeypatch.setenv(variable, "socks5://127.0.0.1")  # its port is unknown
    assert reachable(f"{scheme}://127.0.0.1:2")


def test_pictures_as_data_dir_are_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cifar10, "reachable", lambda url: True)  # else CIFAR-10 would be put among the pictures
    (tmp_path / "photos/train/cats").mkdir(parents=True)
    (tmp_path / "photos/train/cats/one.JPG").touch()
    monkeypatch.chdir(tmp_path)
    for dataset, data_dir in (("cifar10", "photos"), ("auto", "photos/train"), ("mnist", "photos/train/cats")):
        with pytest.raises(UsageError, match=f"data_dir={data_dir} .*pictures.* --dataset=folder:{data_dir}"):
            sources.find(dataset, data_dir)
    (tmp_path / "photos/downloads").mkdir()  # of TFDS
    assert sources.find("cifar10", "photos").name == "cifar10"


def test_data_dir_that_would_not_be_read_is_refused(monkeypatch, tmp_path):
    """There are pictures in both places."""
    monkeypatch.chdir(tmp_path)
    for place in ("photos", "data/photos"):
        (tmp_path / place / "cats").mkdir(parents=True)
    (tmp_path / "data/arrays").mkdir()
    np.save(tmp_path / "data/arrays/x_test.npy", np.zeros(1))
    for name, advice in (
        ("folder:photos", "did you mean folder:data/photos\\? leave data_dir out$"),
        ("npy:arrays", "did you mean npy:data/arrays\\? leave data_dir out$"),
        ("csv:labels.csv", "leave data_dir out$"),
        (f"folder:{tmp_path}/photos", "leave data_dir out$"),
        ("synthetic", "leave data_dir out$"),
    ):
        with pytest.raises(UsageError, match=f"^data_dir=data is not read with dataset={name}: {advice}"):
            sources.find(name, "data")
    (tmp_path / "data/arrays/cifar10h-probs.npy").touch()  # votes on CIFAR-10's images, which are read from there
    monkeypatch.setattr(cifar10, "locate", lambda data_dir: tmp_path / data_dir)
    assert sources.find("npy:data/arrays", "data").directory == tmp_path / "data"


@pytest.mark.parametrize(
    ("name", "guess"),
    [
        ("{root}/kaggle", "csv:{root}/kaggle/labels.csv"),
        ("{root}/kaggle/labels.csv", "csv:{root}/kaggle/labels.csv"),
        ("csv:{root}/kaggle", "csv:{root}/kaggle/labels.csv"),
        ("folder:{root}/kaggle", "csv:{root}/kaggle/labels.csv"),
        ("folder:{root}/kaggle/labels.csv", "csv:{root}/kaggle/labels.csv"),
        ("{root}/photos", "folder:{root}/photos"),
        ("csv:{root}/photos", "folder:{root}/photos"),
        ("{root}/arrays", "npy:{root}/arrays"),
        ("{root}/arrays.npz", "npy:{root}/arrays.npz"),
        ("cifar-10", "cifar10"),
        ("CIFAR10", "cifar10"),
        ("cifar-100", "cifar100"),
    ],
)
def test_name_that_is_nearly_a_data_set_gets_its_right_name(name, guess, tmp_path):
    for file in ("kaggle/labels.csv", "kaggle/1.png", "photos/cat/1.png", "arrays/x_train.npy", "arrays.npz"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    with pytest.raises(RunError) as caught:
        sources.find(name.format(root=tmp_path))
    assert f"did you mean {guess.format(root=tmp_path)}?" in str(caught.value)


def test_name_that_is_too_long_for_a_file_is_an_error_of_one_line():
    for prefix in (FOLDER, CSV, NPY):
        with pytest.raises(DataError, match=f"dataset={prefix}.*; "):
            sources.find(f"{prefix}{'x' * 300}")


def test_copies_are_equal_in_every_pixel():
    train = synthetic.make(20, 0, 0)
    images = train.images[:5].copy()
    images[0, 0, 0, 0] ^= 1  # all but a corner is equal
    images[1, 16] ^= 1
    assert sources.count_copies(Split(images, train.labels[:5]), train) == 3
    assert sources.count_copies(synthetic.make(10, 0, 1), train) == 0


def test_synthetic_is_balanced_seeded_and_disjoint():
    train, test = synthetic.make(500, 0, 0), synthetic.make(500, 0, 1)
    assert train.images.shape == (500, 32, 32, 3) and train.images.dtype == np.uint8
    assert (train.class_counts() == 50).all()
    assert synthetic.make(500, 0, 0).digest == train.digest != test.digest


def test_source_names_are_those_of_the_registry(monkeypatch):
    assert {*sources.SOURCES} == {*BUILT_IN, FOLDER, CSV, NPY} - {"auto"}
    with pytest.raises(UsageError, match=f"dataset=Other .*{', '.join(BUILT_IN)}, folder:<path>"):
        sources.find("Other")
    small = {"train": synthetic.make(20, 0, 0), "test": synthetic.make(10, 0, 1)}
    monkeypatch.setitem(
        sources.SOURCES, "new", lambda name, data_dir: sources.Source(name, lambda image_size, names: small)
    )
    assert sources.load(sources.find("new"))[1].test.digest == small["test"].digest
    with pytest.raises(UsageError, match="leaves none of 20"):
        sources.load(sources.find("new"), 20)


def test_validation_split_of_a_source_is_used_unless_examples_are_held_out(caplog):
    caplog.set_level("INFO", "cifar_towers")
    splits = {
        "train": synthetic.make(20, 0, 0),
        "validation": synthetic.make(8, 0, 2),
        "test": synthetic.make(10, 0, 1),
    }
    source = sources.Source("new", lambda image_size, names: splits)
    _, data = sources.load(source)
    assert data.digests() == {name: split.digest for name, split in splits.items()}
    _, data = sources.load(source, validation_examples=5)
    assert (len(data.train.labels), len(data.validation.labels)) == (15, 5)
    assert caplog.messages[-1] == "new validation: not used, as validation_examples=5"


def test_held_out_images_leave_some_of_each_class():
    splits = {"train": synthetic.make(20, 0, 0), "test": synthetic.make(10, 0, 1)}
    with pytest.raises(UsageError, match="validation_examples=15 leaves no images of .* to train on; give fewer"):
        sources.load(sources.Source("few", lambda image_size, names: splits), validation_examples=15)


def test_source_with_a_test_split_alone_is_scored_and_not_trained_on():
    test, train = synthetic.make(10, 0, 1), synthetic.make(20, 0, 0)
    read = []
    only_test = sources.Source("new", lambda image_size, names: read.append(names) or {"test": test})
    assert sources.load_split(only_test).digest == test.digest and read == [("test",)]
    small = sources.load_split(only_test, "test", 16)
    assert small.images.shape == (10, 16, 16, 3) and small.info.image_size == 16
    with pytest.raises(UsageError, match="dataset=new has no train examples; give a data set that"):
        sources.load(only_test)
    others = sources.Source("new", lambda image_size, names: {"train": train, "validation": test})
    with pytest.raises(UsageError, match="new has no test examples; give a data set that has test"):
        sources.load_split(others)

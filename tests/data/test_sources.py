import contextlib
import os
import re
import socket

import numpy as np
import pytest

from cifar_towers.data import cifar10, sources, synthetic, tfds_source
from cifar_towers.data.connectivity import reachable
from cifar_towers.data.dataset import Split
from cifar_towers.errors import DataError, UsageError
from cifar_towers.registry import BUILT_IN, FOLDER


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setattr(cifar10, "reachable", lambda host: False)


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


def test_missing_cifar10_is_an_error_and_auto_falls_back_to_synthetic(offline, tmp_path):
    with pytest.raises(DataError, match=r"put cifar-10-binary.tar.gz into .*downloads/manual"):
        sources.find("cifar10", str(tmp_path))
    source = sources.find("auto", str(tmp_path))
    assert source.name == "synthetic" and source.banner.startswith("SYNTHETIC DATA")


def test_prepared_copy_needs_no_network_and_is_an_error_if_damaged(offline, tmp_path):
    (tmp_path / "cifar10/3.0.2").mkdir(parents=True)
    (tmp_path / "cifar10/3.0.2/dataset_info.json").write_text("{}")
    source = sources.find("auto", str(tmp_path))
    assert source == sources.Source("cifar10", tmp_path)
    with pytest.raises(DataError, match="cannot be read"):
        sources.load(source, fall_back=True)


@pytest.fixture
def cached(monkeypatch):
    monkeypatch.setattr(cifar10.cache, "contains", lambda name: True)


@pytest.mark.parametrize("dataset", ["cifar10", "auto"])
@pytest.mark.parametrize(("name", "problem"), [("nowhere", "does not exist"), ("", "has no cifar10/3.0.2")])
def test_data_dir_that_would_not_be_used_is_refused(cached, tmp_path, dataset, name, problem):
    with pytest.raises(UsageError, match=f"data_dir={tmp_path / name} {problem}, .* leave data_dir out, or give one"):
        sources.find(dataset, str(tmp_path / name))


def test_data_dir_of_a_copy_an_archive_or_a_download_is_accepted(monkeypatch, tmp_path):
    new = tmp_path / "new"
    monkeypatch.setattr(cifar10, "reachable", lambda host: True)
    assert sources.find("cifar10", str(new)).directory == new  # a download makes it
    monkeypatch.setattr(cifar10.cache, "contains", lambda name: True)
    (new / "downloads/manual").mkdir(parents=True)
    (new / "downloads/manual" / cifar10.ARCHIVE).touch()
    assert sources.find("cifar10", str(new)).directory == new
    (tmp_path / "cifar10/3.0.2").mkdir(parents=True)
    (tmp_path / "cifar10/3.0.2/dataset_info.json").touch()
    assert sources.find("cifar10", str(tmp_path)).directory == tmp_path


def test_pictures_as_data_dir_are_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(cifar10, "reachable", lambda host: True)  # else CIFAR-10 would be put among the pictures
    (tmp_path / "photos/train/cats").mkdir(parents=True)
    (tmp_path / "photos/train/cats/one.JPG").touch()
    monkeypatch.chdir(tmp_path)
    for dataset, data_dir in (("cifar10", "photos"), ("auto", "photos/train"), ("mnist", "photos/train/cats")):
        with pytest.raises(UsageError, match=f"data_dir={data_dir} holds pictures, .* --dataset=folder:{data_dir} "):
            sources.find(dataset, data_dir)
    (tmp_path / "photos/downloads").mkdir()  # of TFDS
    assert sources.find("cifar10", "photos").name == "cifar10"


def test_synthetic_is_balanced_seeded_and_disjoint():
    train, test = synthetic.make(500, 0, 0), synthetic.make(500, 0, 1)
    assert train.images.shape == (500, 32, 32, 3) and train.images.dtype == np.uint8
    assert (train.class_counts() == 50).all()
    assert synthetic.make(500, 0, 0).digest == train.digest != test.digest


def test_source_names_are_those_of_the_registry(monkeypatch):
    assert {*sources.SOURCES} == {*BUILT_IN, FOLDER} - {"auto"}
    with pytest.raises(UsageError, match=re.escape(f"dataset=Other is not {', '.join(BUILT_IN)}, folder:<path> or")):
        sources.find("Other")
    small = synthetic.make(20, 0, 0), synthetic.make(10, 0, 1)
    new = sources.SourceType(lambda name, data_dir: sources.Source(name), lambda source, side: small)
    monkeypatch.setitem(sources.SOURCES, "new", new)
    assert sources.load(sources.find("new"))[1].test.digest == small[1].digest
    with pytest.raises(UsageError, match="leaves none of 20"):
        sources.load(sources.find("new"), 20)


def split_of(counts):
    labels = np.repeat(np.arange(10), counts)
    return Split(np.zeros((len(labels), 32, 32, 3), np.uint8), labels)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([1000] * 9 + [999], "test split has 9999 examples"),
        ([1001, 999] + [1000] * 8, "test split has 10000 examples"),
        ([1000] * 10, "test split is damaged"),
    ],
)
def test_cifar10_is_verified_by_counts_and_digest(counts, message):
    with pytest.raises(DataError, match=message):
        cifar10.verify("test", split_of(counts))


prepared = pytest.mark.skipif(
    not cifar10.is_prepared(tfds_source.tfds_directory()), reason="no prepared CIFAR-10 on this machine"
)


@prepared
def test_real_cifar10_test_split():
    """Counts, digest and moments are the published ones."""
    test = cifar10.read_split(tfds_source.tfds_directory(), "test")
    assert test.digest == cifar10.DIGESTS["test"] and (test.class_counts() == 1000).all()
    np.testing.assert_allclose(test.images.mean((0, 1, 2)) / 255, [0.4942, 0.4851, 0.4504], atol=1e-3)


@prepared
@pytest.mark.slow
def test_real_cifar10():
    _, data = sources.load(sources.find("cifar10"), validation_examples=5000)
    assert [len(s.labels) for s in (data.train, data.validation, data.test)] == [45_000, 5_000, 10_000]
    assert data.test.digest == cifar10.DIGESTS["test"]
    pixels = data.train.images.reshape(-1, 3) / 255
    np.testing.assert_allclose(pixels.mean(0), [0.4914, 0.4822, 0.4465], atol=1e-3)
    np.testing.assert_allclose(pixels.std(0), [0.2470, 0.2435, 0.2616], atol=1e-3)

import contextlib
import os
import socket

import numpy as np
import pytest

from cifar_towers.data import cifar10, dataset, sources, synthetic
from cifar_towers.data.connectivity import reachable
from cifar_towers.data.dataset import Split
from cifar_towers.errors import DataError, UsageError


@pytest.fixture(autouse=True)
def nothing_decoded(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setattr(cifar10, "reachable", lambda host, timeout: False)


@pytest.fixture
def no_proxy(monkeypatch):
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)


def test_a_host_is_asked_at_the_port_of_its_address(no_proxy, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert reachable(f"http://127.0.0.1:{port}/some/file")
    assert not reachable(f"http://127.0.0.1:{port}/some/file")
    asked = []
    monkeypatch.setattr(socket, "create_connection", lambda at, timeout: asked.append(at) or contextlib.nullcontext())
    assert reachable("http://one.org/a") and reachable("https://two.org/b")
    assert asked == [("one.org", 80), ("two.org", 443)]
    assert reachable("gs://bucket/c") and len(asked) == 2  # no address that could be asked


@pytest.mark.parametrize(
    ("variable", "through"), [("http_proxy", "http"), ("HTTPS_PROXY", "https"), ("all_proxy", "http")]
)
def test_behind_a_proxy_it_is_the_proxy_that_is_asked(no_proxy, monkeypatch, variable, through):
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv(variable, f"127.0.0.1:{server.getsockname()[1]}")
        assert reachable(f"{through}://127.0.0.1:2")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        assert not reachable(f"{through}://127.0.0.1:2")
        monkeypatch.delenv("no_proxy")
    assert not reachable(f"{through}://127.0.0.1:2")
    monkeypatch.setenv(variable, "socks5://127.0.0.1")  # no port that is known here
    assert reachable(f"{through}://127.0.0.1:2")


def test_missing_cifar10_says_what_to_put_where(offline, tmp_path):
    with pytest.raises(DataError, match=r"put cifar-10-binary.tar.gz into .*downloads/manual"):
        sources.find("cifar10", str(tmp_path))


def test_auto_takes_the_synthetic_set_under_a_banner(offline, tmp_path):
    source = sources.find("auto", str(tmp_path))
    assert source.name == "synthetic" and source.banner.startswith("SYNTHETIC DATA")


def test_a_prepared_copy_needs_no_network(offline, tmp_path):
    (tmp_path / "cifar10/3.0.2").mkdir(parents=True)
    (tmp_path / "cifar10/3.0.2/dataset_info.json").write_text("{}")
    assert sources.find("auto", str(tmp_path)) == sources.Source("cifar10", tmp_path)


def test_a_damaged_copy_is_an_error_even_under_auto(tmp_path):
    (tmp_path / "cifar10/3.0.2").mkdir(parents=True)
    (tmp_path / "cifar10/3.0.2/dataset_info.json").write_text("{}")
    with pytest.raises(DataError, match="cannot be read"):
        sources.load(sources.find("auto", str(tmp_path)), fall_back=True)


def test_synthetic_is_balanced_seeded_and_disjoint():
    train, test = synthetic.make(500, 0, 0), synthetic.make(500, 0, 1)
    assert train.images.shape == (500, 32, 32, 3) and train.images.dtype == np.uint8
    assert (train.class_counts() == 50).all()
    assert synthetic.make(500, 0, 0).digest == train.digest != test.digest


def test_held_out_examples_leave_train_and_stay_the_same():
    train = synthetic.make(300, 0, 0)
    kept, held = dataset.split_validation(train, 100)
    assert (len(kept.labels), len(held.labels)) == (200, 100)
    both = np.concatenate([kept.images, held.images]).reshape(300, -1)
    assert len(np.unique(both, axis=0)) == 300
    assert dataset.split_validation(train, 100)[1].digest == held.digest
    assert dataset.split_validation(train, 0)[0] is train


def test_splits_that_changed_are_told_by_what_a_checkpoint_knows_of_them():
    train, test, other = (synthetic.make(20, 0, stream) for stream in range(3))
    kept, held = dataset.split_validation(train, 5)
    data = dataset.Dataset("some", kept, held, test)
    facts = {f"{name}_sha256": digest for name, digest in data.digests().items()}
    assert facts.keys() == {"train_sha256", "validation_sha256", "test_sha256"} and not data.changed_splits(facts)
    assert data._replace(test=other).changed_splits(facts) == ["test"]
    assert data._replace(train=other, validation=other).changed_splits(facts) == ["train", "validation"]
    del facts["test_sha256"]  # as older ones are
    assert not data._replace(test=other).changed_splits(facts)


def test_holding_out_everything(monkeypatch):
    monkeypatch.setattr(synthetic, "load", lambda: (synthetic.make(20, 0, 0), synthetic.make(10, 0, 1)))
    with pytest.raises(UsageError, match="leaves none of 20"):
        sources.load(sources.Source("synthetic", None), 20)


def split_of(counts):
    labels = np.repeat(np.arange(10), counts)
    return Split(np.zeros((len(labels), 32, 32, 3), np.uint8), labels)


def test_verify_counts_and_digest():
    with pytest.raises(DataError, match="test split has 9999 examples"):
        cifar10.verify("test", split_of([1000] * 9 + [999]))
    with pytest.raises(DataError, match="test split has 10000 examples"):
        cifar10.verify("test", split_of([1001, 999] + [1000] * 8))
    with pytest.raises(DataError, match="test split is damaged"):
        cifar10.verify("test", split_of([1000] * 10))


prepared = pytest.mark.skipif(
    not cifar10.is_prepared(cifar10.tfds_directory()), reason="no prepared CIFAR-10 on this machine"
)


@prepared
def test_the_real_test_images():
    """Decoded in file order: counts, digest and pixels are those that are published."""
    test = cifar10.read_split(cifar10.tfds_directory(), "test")
    assert test.digest == cifar10.DIGESTS["test"] and (test.class_counts() == 1000).all()
    np.testing.assert_allclose(test.images.mean((0, 1, 2)) / 255, [0.4942, 0.4851, 0.4504], atol=1e-3)


@prepared
@pytest.mark.slow
def test_the_real_thing():
    _, data = sources.load(sources.find("cifar10"), validation_examples=5000)
    assert [len(s.labels) for s in (data.train, data.validation, data.test)] == [45_000, 5_000, 10_000]
    assert data.test.digest == cifar10.DIGESTS["test"]
    pixels = data.train.images.reshape(-1, 3) / 255
    np.testing.assert_allclose(pixels.mean(0), [0.4914, 0.4822, 0.4465], atol=1e-3)
    np.testing.assert_allclose(pixels.std(0), [0.2470, 0.2435, 0.2616], atol=1e-3)

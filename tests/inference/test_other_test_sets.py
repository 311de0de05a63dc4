"""Other test sets of CIFAR-10, by their names in TensorFlow Datasets."""

import json
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import tensorflow as tf

from cifar_towers.config import TrainConfig
from cifar_towers.config.programs import EvaluateConfig
from cifar_towers.data import sources, synthetic
from cifar_towers.data.dataset import CLASSES
from cifar_towers.errors import DataError, UsageError
from cifar_towers.inference import evaluate, load_run
from cifar_towers.inference.evaluate import evaluate_checkpoint
from tests.configs import TINY_NET
from tests.own_data import write_arrays
from tests.runs import short_runs

TRAIN, TEST = synthetic.make(300, 0, 0), synthetic.make(60, 0, 1)
CONFIG = TrainConfig(
    num_gpus=2, model=TINY_NET, crop=0, shift=0, batch_size=50, epochs=20, precision="float32", optimizer="adamw",
    learning_rate=0.02, summary_every_steps=0, eval_every_epochs=0.0, momentum=0.0,
)  # fmt: skip


def train(place, train_split, test_split, names, **settings):
    """Train a run on arrays with these class names, and return its directory."""
    info = train_split.info._replace(class_names=tuple(names))
    data = write_arrays(place, train=replace(train_split, info=info), test=replace(test_split, info=info))
    with short_runs.small_runs():
        short_runs.run(CONFIG, place / "run", dataset=data, **settings)
    return place / "run"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Train a run with CIFAR-10's classes."""
    return train(tmp_path_factory.mktemp("runs") / "cifar", TRAIN, TEST, CLASSES)


def config_of(run, **settings):
    return EvaluateConfig(train_dir=str(run), model=TINY_NET, precision="float32", **settings)


def score(run, **settings):
    return json.loads(evaluate_checkpoint(config_of(run, json=True, **settings)))


def probabilities(run, images):
    opened = load_run.open_run(run, TINY_NET)
    images = opened.augmentation.evaluate(tf.constant(images))
    return tf.nn.softmax(opened.load("raw", "float32")(images, training=False)).numpy()


def accuracy(run, images, labels):
    return float((probabilities(run, images).argmax(1) == labels).mean())


CIFAR10_C = (
    "brightness", "contrast", "defocus_blur", "elastic_transform", "fog", "frost", "gaussian_blur", "gaussian_noise",
    "glass_blur", "impulse_noise", "jpeg_compression", "motion_blur", "pixelate", "saturate", "shot_noise", "snow",
    "spatter", "speckle_noise", "zoom_blur",
)  # fmt: skip


def write_corrupted(place, names, num_images=20):
    """Write files as those of CIFAR-10-C: five severities in blocks, and the labels five times. Return the images."""
    place.mkdir(parents=True, exist_ok=True)
    random, images = np.random.default_rng(0), {}
    for name in names:
        noise = random.integers(0, 256, (5 * num_images, 32, 32, 3))
        weight = np.linspace(0.1, 0.9, 5).repeat(num_images)[:, None, None, None]
        clean = np.tile(TEST.images[:num_images], (5, 1, 1, 1))
        images[name] = ((1 - weight) * clean + weight * noise).astype(np.uint8)
        np.save(place / f"{name}.npy", images[name])
    np.save(place / "labels.npy", np.tile(TEST.labels[:num_images].astype(np.uint8), 5))
    return images


def expected_table(run, images, num_images=20):
    """Return {name: [accuracy of each severity]}."""
    labels = TEST.labels[:num_images]
    return {name: [accuracy(run, part, labels) for part in np.split(of_name, 5)] for name, of_name in images.items()}


def check_table(table, expected):
    """Check a table's cells and its means over severities, corruptions, and both."""
    for name, cells in expected.items():
        assert table[name] == pytest.approx({**dict(zip("12345", cells, strict=True)), "mean": np.mean(cells)})
    cells = np.array([*expected.values()])
    assert [table["mean"][severity] for severity in "12345"] == pytest.approx(cells.mean(0).tolist())
    assert table["mean"]["mean"] == pytest.approx(cells.mean())
    assert table.keys() == {*expected, "mean"}


@pytest.mark.parametrize("in_tfds", [{}, {"glass_blur": "frosted_glass_blur", "elastic_transform": "elastic"}])
def test_published_mean_is_that_of_fifteen_corruptions_and_needs_all_of_them(in_tfds):
    extra = ("gaussian_blur", "saturate", "spatter", "speckle_noise")
    names = [f"{in_tfds.get(name, name)}_{severity}" for name in CIFAR10_C for severity in (1, 5)]
    scores = {name: Mock(count=10, accuracy=number, loss=0.0, ece=0.0) for number, name in enumerate(names)}
    published = [name for name in names if name[:-2] not in extra]
    assert len(names) == 38 and len(published) == 30
    for given in (names, published):
        table = evaluate._tabulate(given, [scores[name] for name in given])["accuracy"]
        for severity, ending in (("1", "_1"), ("5", "_5"), ("mean", "")):
            means = [np.mean([scores[n].accuracy for n in some if n.endswith(ending)]) for some in (given, published)]
            assert [table[row][severity] for row in ("mean", "mean without extra")] == pytest.approx(means)
    few = [name for name in names if name != "fog_1" and name != "fog_5"]
    assert "mean without extra" not in evaluate._tabulate(few, [scores[name] for name in few])["accuracy"]


@pytest.fixture
def downloaded(monkeypatch, tmp_path):
    """Make TFDS's own builders prepare data sets from files below `tmp_path`, and only the download is replaced."""
    from tensorflow_datasets.core.download.download_manager import DownloadManager

    place = tmp_path / "downloaded"
    monkeypatch.setattr(DownloadManager, "download_and_extract", lambda self, url: str(place))

    def download(self, urls):
        return [str(place / url.rpartition("/")[2].partition("?")[0]) for url in urls]

    monkeypatch.setattr(DownloadManager, "download", download)
    return place


def test_configs_of_cifar10_corrupted_are_a_table(run, tmp_path, downloaded, monkeypatch):
    images = write_corrupted(downloaded / "CIFAR-10-C", ["saturate", "pixelate"])
    expected = expected_table(run, images)
    assert len({accuracy for cells in expected.values() for accuracy in cells}) > 3
    settings = {"data_dir": str(tmp_path / "tfds"), "num_images": 20}
    compiled = Mock(side_effect=evaluate.make_logits_fn)
    monkeypatch.setattr(evaluate, "make_logits_fn", compiled)
    record = score(run, dataset="cifar10_corrupted/*ate_*", **settings)
    assert compiled.call_count == 1
    check_table(record["accuracy"], expected)
    losses = [
        -np.log(probabilities(run, part)[range(20), TEST.labels[:20]]).mean()
        for part in np.split(images["pixelate"], 5)
    ]
    assert [record["loss"]["pixelate"][severity] for severity in "12345"] == pytest.approx(losses, rel=1e-4)
    assert 0 < record["ece"]["pixelate"]["3"] < 1 and record["count"] == 20 and record["split"] == "test"
    title, line, blank, header, *rows = evaluate_checkpoint(
        config_of(run, dataset="cifar10_corrupted/*ate_*", **settings)
    ).splitlines()
    assert "cifar10_corrupted/*ate_* test, raw weights, TTA 0" in title and line.endswith("on 20 images by severity")
    assert not blank and header.split() == ["corruption", *"12345", "mean"]
    cells = [f"{100 * value:.2f}" for value in (*expected["pixelate"], np.mean(expected["pixelate"]))]
    assert rows[0].split() == ["pixelate", *cells] and rows[-1].startswith("mean  ")
    source = sources.find("cifar10_corrupted/*ate_*", settings["data_dir"])
    mild, strong = (sources.load_split(source, name).labels.tolist() for name in ("pixelate_1", "saturate_5"))
    assert mild == strong != TEST.labels[:20].tolist()  # the first images are the same pictures in each cell
    one = score(run, dataset="cifar10_corrupted/pixelate_4", **settings)  # a set without a pattern is no table
    assert one["accuracy"] == pytest.approx(expected["pixelate"][3]) and one["count"] == 20


def test_patterns_that_are_no_test_sets_of_the_run_are_refused(run, tmp_path, downloaded):
    data_dir = str(tmp_path / "tfds")
    assert len(sources.find("cifar10_corrupted/*", data_dir).corruptions) == 95
    assert len(sources.find("cifar10_corrupted/*_3", data_dir).corruptions) == 19
    for name, known in (("cifar10_corrupted/mist_*", "brightness_1"), ("cifar10_1/*", "v4, v6"), ("mnist/*", "none")):
        with pytest.raises(UsageError, match=f"dataset={name[:-1]}.* is no pattern of corruptions, e.g. fog_.*{known}"):
            sources.find(name, data_dir)
    with pytest.raises(UsageError, match=r"cifar10_corrupted/\* has no train or test examples"):
        sources.load(sources.find("cifar10_corrupted/*", data_dir))
    with pytest.raises(UsageError, match="has corrupted test images only; leave --split out"):
        score(run, dataset="cifar10_corrupted/*", data_dir=data_dir, split="train")
    few = [split.take(split.labels < 2) for split in (TRAIN, TEST)]
    other = train(tmp_path / "two", *few, ["cat", "fox"], batch_size=10, epochs=1)
    write_corrupted(downloaded / "CIFAR-10-C", ["fog"])
    with pytest.raises(DataError, match="was trained on cat, fox, and cifar10_corrupted.* now has airplane"):
        score(other, dataset="cifar10_corrupted/fog_*", data_dir=data_dir)


def test_cifar10_1_is_read_by_tfds(run, tmp_path, downloaded):
    downloaded.mkdir()
    for version, start, number in (("v4", 0, 21), ("v6", 21, 20)):
        of_version = slice(start, start + number)
        np.save(downloaded / f"cifar10.1_{version}_data.npy", TEST.images[of_version])
        np.save(downloaded / f"cifar10.1_{version}_labels.npy", TEST.labels[of_version].astype(np.int32))
        record = score(run, dataset=f"cifar10_1/{version}", data_dir=str(tmp_path / "tfds"))
        assert record["accuracy"] == pytest.approx(accuracy(run, TEST.images[of_version], TEST.labels[of_version]))
        assert record["count"] == number and [*record["per_class"]] == [*CLASSES]

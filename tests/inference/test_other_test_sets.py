"""Other test sets of CIFAR-10, in the formats in which they are published, and computed corruptions of any."""

import json
from unittest.mock import Mock

import numpy as np
import pytest
import tensorflow as tf

import cifar_towers
from cifar_towers.config import TrainConfig
from cifar_towers.config.programs import EvaluateConfig
from cifar_towers.data import cifar10, corruptions, sources, synthetic
from cifar_towers.data.arrays import CIFAR10_C
from cifar_towers.data.dataset import CLASSES, Split
from cifar_towers.errors import DataError, UsageError
from cifar_towers.inference import evaluate, load_run
from cifar_towers.inference.evaluate import evaluate_checkpoint
from tests.configs import TINY_NET
from tests.runs import short_runs

TRAIN, TEST = synthetic.make(300, 0, 0), synthetic.make(60, 0, 1)
CONFIG = TrainConfig(
    num_gpus=2, model=TINY_NET, crop=0, shift=0, batch_size=50, epochs=20, precision="float32", optimizer="adamw",
    learning_rate=0.02, summary_every_steps=0, eval_every_epochs=0.0, momentum=0.0,
)  # fmt: skip


def train(place, train_split, test_split, names=(), **settings):
    """Train a run on arrays with these class names, and return its directory."""
    place.mkdir()
    for name, split in (("train", train_split), ("test", test_split)):
        np.save(place / f"x_{name}.npy", split.images)
        np.save(place / f"y_{name}.npy", split.labels)
    (place / "classes.txt").write_text("\n".join(names))
    with short_runs.small_runs():
        short_runs.run(CONFIG, place / "run", dataset=f"npy:{place}", **settings)
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


# CIFAR-10-C -----------------------------------------------------------------------------------------------------------


def write_corrupted(place, names=("fog", "glass_blur", "saturate"), num_images=20):
    """Write files as those of CIFAR-10-C: five severities in blocks, and the labels five times. Return the images."""
    place.mkdir(parents=True)
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


def test_folder_of_cifar10_c_is_a_table(run, tmp_path, monkeypatch):
    images = write_corrupted(tmp_path / "CIFAR-10-C")
    expected = expected_table(run, images)
    assert len({accuracy for cells in expected.values() for accuracy in cells}) > 3
    data = f"npy:{tmp_path / 'CIFAR-10-C'}"
    compiled = Mock(side_effect=evaluate.make_logits_fn)
    monkeypatch.setattr(evaluate, "make_logits_fn", compiled)
    record = score(run, dataset=data)
    assert compiled.call_count == 1
    check_table(record["accuracy"], expected)
    losses = [
        -np.log(probabilities(run, part)[range(20), TEST.labels[:20]]).mean() for part in np.split(images["fog"], 5)
    ]
    assert [record["loss"]["fog"][severity] for severity in "12345"] == pytest.approx(losses, rel=1e-4)
    assert 0 < record["ece"]["fog"]["3"] < 1 and record["count"] == 20
    assert (record["dataset"], record["split"], record["corruptions"]) == (data, "test", "of the data set")
    title, line, blank, header, *rows = evaluate_checkpoint(config_of(run, dataset=data)).splitlines()
    assert (
        f"{data} test, raw weights, TTA 0" in title and "on 20 images by severity; corruptions of the data set" in line
    )
    assert not blank and header.split() == ["corruption", *"12345", "mean"]
    cells = [f"{100 * value:.2f}" for value in (*expected["fog"], np.mean(expected["fog"]))]
    assert rows[0].split() == ["fog", *cells] and rows[-1].startswith("mean  ")
    fewer = score(run, dataset=data, num_images=7)
    first = {name: np.concatenate([part[:7] for part in np.split(of_name, 5)]) for name, of_name in images.items()}
    assert fewer["count"] == 7 and fewer["accuracy"] != record["accuracy"]
    check_table(fewer["accuracy"], expected_table(run, first, 7))  # the same pictures in each cell
    assert cifar_towers.evaluate(run, model=TINY_NET, precision="float32", dataset=data) == record
    mirrored = score(run, dataset=data, tta=1)
    assert mirrored["tta"] == 1 and mirrored["loss"] != record["loss"]


def test_wrong_folder_of_cifar10_c_is_an_error_of_one_line(run, tmp_path):
    place = tmp_path / "CIFAR-10-C"
    images = write_corrupted(place)
    data, labels = f"npy:{place}", np.load(place / "labels.npy")

    def refused(error, message, **settings):
        with pytest.raises(error, match=message) as caught:
            score(run, **({"dataset": data} | settings))
        assert "\n" not in str(caught.value)

    refused(UsageError, "CIFAR-10-C has corrupted test images only; leave --corruptions and --split", split="train")
    refused(UsageError, "CIFAR-10-C has corrupted test images only; leave --corruptions and", corruptions="*")
    with pytest.raises(UsageError, match="CIFAR-10-C has no train or test examples; give a data set that has train"):
        sources.load(sources.find(data))
    np.save(place / "fog.npy", images["fog"][:-1])
    refused(DataError, r"labels has the shape \(100,\), and must have \(99,\), a label for each image")
    np.save(place / "fog.npy", images["fog"] / 255)
    refused(DataError, r"fog is float64, and must be uint8, 0 to 255; save \(255 \* fog\).round\(\)")
    (place / "fog.npy").write_bytes(b"\x93NUMPY")
    refused(DataError, "fog.npy cannot be read .*; save it again")
    (place / "fog.npy").unlink()
    (place / "labels.npy").unlink()
    refused(DataError, "CIFAR-10-C: it has no labels.npy; put CIFAR-10-C's beside glass_blur.npy")
    np.save(place / "saturate.npy", images["saturate"][:99])
    np.save(place / "glass_blur.npy", images["glass_blur"][:99])
    np.save(place / "labels.npy", labels[:99])
    refused(DataError, "glass_blur has 99 images, and must have equally many of five severities")
    refused(UsageError, f"did you mean {data}?", dataset=str(place))


def test_table_of_other_classes_than_the_run_has_is_refused(tmp_path):
    few = [split.take(split.labels < 2) for split in (TRAIN, TEST)]
    other = train(tmp_path / "two", *few, ["cat", "fox"], batch_size=10, epochs=1)
    write_corrupted(tmp_path / "CIFAR-10-C", ["fog"])
    with pytest.raises(DataError, match="was trained on cat, fox, and npy:.*CIFAR-10-C now has airplane, automobile, "):
        score(other, dataset=f"npy:{tmp_path / 'CIFAR-10-C'}")
    labels = np.tile(np.arange(20) % 2, 5)
    np.save(tmp_path / "CIFAR-10-C/labels.npy", labels)  # sets of another data set in the same format
    (tmp_path / "CIFAR-10-C/classes.txt").write_text("fox\ncat")
    record = score(other, dataset=f"npy:{tmp_path / 'CIFAR-10-C'}")
    images = np.load(tmp_path / "CIFAR-10-C/fog.npy")
    cells = [accuracy(other, part, 1 - labels[:20]) for part in np.split(images, 5)]
    check_table(record["accuracy"], {"fog": cells})


@pytest.fixture
def downloaded(monkeypatch, tmp_path):
    """Make TFDS's own builders prepare data sets from files below `tmp_path`, and only the download is replaced."""
    from tensorflow_datasets.core.download.download_manager import DownloadManager

    from cifar_towers.data import tfds_source

    place = tmp_path / "downloaded"
    monkeypatch.setattr(tfds_source, "reachable", lambda url: True)
    monkeypatch.setattr(DownloadManager, "download_and_extract", lambda self, url: str(place))

    def download(self, urls):
        return [str(place / url.rpartition("/")[2].partition("?")[0]) for url in urls]

    monkeypatch.setattr(DownloadManager, "download", download)
    return place


def test_configs_of_tfds_are_a_table(run, tmp_path, downloaded, monkeypatch):
    images = write_corrupted(downloaded / "CIFAR-10-C")
    expected = expected_table(run, images)
    settings = {"data_dir": str(tmp_path / "tfds"), "num_images": 20}
    table = score(run, dataset="cifar10_corrupted/fog_*", **settings)["accuracy"]
    check_table(table, {"fog": expected["fog"]})
    assert table.keys() == {"fog", "mean"}
    (tmp_path / "tfds/cifar10_corrupted/fog_5").rename(tmp_path / "tfds/gone")
    from cifar_towers.data import tfds_source

    monkeypatch.setattr(tfds_source, "reachable", lambda url: False)
    with pytest.raises(DataError, match=r"no cifar10_corrupted/fog_5 in .*zenodo.org does not answer; put a prepared"):
        score(run, dataset="cifar10_corrupted/fog_*", **settings)
    one = score(run, dataset="cifar10_corrupted/fog_4", **settings)  # a set without a pattern is no table
    assert one["accuracy"] == pytest.approx(expected["fog"][3]) and one["count"] == 20
    assert len(sources.find("cifar10_corrupted/*", settings["data_dir"]).corruptions) == 95
    assert len(sources.find("cifar10_corrupted/*_3", settings["data_dir"]).corruptions) == 19
    for name, known in (("cifar10_corrupted/mist_*", "brightness_1"), ("cifar10_1/*", "v4, v6"), ("mnist/*", "none")):
        with pytest.raises(UsageError, match=f"dataset={name[:-1]}.* is no pattern of corruptions, as fog_.*{known}"):
            sources.find(name, settings["data_dir"])
    with pytest.raises(UsageError, match=r"cifar10_corrupted/\* has no train or test examples"):
        sources.load(sources.find("cifar10_corrupted/*", settings["data_dir"]))


# CIFAR-10.1 -----------------------------------------------------------------------------------------------------------


def write_new_images(place):
    place.mkdir(parents=True)
    for version, start, number in (("v4", 0, 21), ("v6", 21, 20)):
        of_version = slice(start, start + number)
        np.save(place / f"cifar10.1_{version}_data.npy", TEST.images[of_version])
        np.save(place / f"cifar10.1_{version}_labels.npy", TEST.labels[of_version].astype(np.int32))
    return accuracy_of


def accuracy_of(run, start, number):
    return accuracy(run, TEST.images[start:][:number], TEST.labels[start:][:number])


def test_cifar10_1_is_read_from_its_files_and_by_tfds(run, tmp_path, downloaded):
    write_new_images(downloaded)
    expected = {"v4": accuracy_of(run, 0, 21), "v6": accuracy_of(run, 21, 20)}
    for version, value in expected.items():
        own_file = f"npy:{downloaded}/cifar10.1_{version}_data.npy"
        for dataset, data_dir in ((own_file, ""), (f"cifar10_1/{version}", str(tmp_path / "tfds"))):
            record = score(run, dataset=dataset, data_dir=data_dir)
            assert record["accuracy"] == pytest.approx(value) and record["count"] == {"v4": 21, "v6": 20}[version]
            assert [*record["per_class"]] == [*CLASSES]
    with pytest.raises(DataError, match=r"its images are cifar10.1_v4_data, cifar10.1_v6_data; keep one array of a sp"):
        score(run, dataset=f"npy:{downloaded}")
    (downloaded / "cifar10.1_v4_data.npy").unlink()
    assert score(run, dataset=f"npy:{downloaded}")["accuracy"] == pytest.approx(expected["v6"])
    (downloaded / "cifar10.1_v6_labels.npy").unlink()
    with pytest.raises(DataError, match=r"labels.npy cannot be read"):
        score(run, dataset=f"npy:{downloaded}/cifar10.1_v6_data.npy")


# CIFAR-10H ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def own_files(monkeypatch, tmp_path):
    """Return the labels of a small CIFAR-10's own files, whose test images are stored in TFDS's order."""
    order = cifar10.stored_order("test", len(TEST.labels))
    assert order != sorted(order)
    stored = Split(TEST.images[order], TEST.labels[order])
    monkeypatch.setattr(cifar10, "locate", lambda data_dir: tmp_path)
    monkeypatch.setattr(cifar10, "load", lambda directory, names, is_named: {"test": stored})
    return TEST.labels


def votes_on(labels):
    """Return 50 votes on each image: most for the label, but on every fifth image as many for the next class."""
    votes = np.zeros((len(labels), 10), int)
    rows = np.arange(len(labels))
    votes[rows, labels] = 40
    votes[rows, (labels + 1) % 10] += 10
    votes[::5] = 0
    votes[rows[::5], labels[::5]] = votes[rows[::5], (labels[::5] + 1) % 10] = 25
    votes[3, labels[3]], votes[3, (labels[3] + 1) % 10] = 10, 40  # people do not agree with the label
    return votes


def expected_people(run, votes, labels):
    """Return the scores against people's votes, worked out an image at a time."""
    outputs, shares = probabilities(run, TEST.images), votes / 50
    loss = -np.mean(
        [sum(q * np.log(p) for q, p in zip(*both, strict=True)) for both in zip(shares, outputs, strict=True)]
    )
    entropy = -np.mean([sum(q * np.log(q) for q in row if q) for row in shares])
    voted = labels.copy()
    voted[3] = (labels[3] + 1) % 10
    return {"accuracy": float((outputs.argmax(1) == voted).mean()), "loss": loss, "entropy": entropy}


def test_files_of_cifar10_h_are_votes_in_the_order_of_cifar10s_own_files(run, tmp_path, own_files):
    votes = votes_on(own_files)
    np.save(tmp_path / "cifar10h-probs.npy", votes / 50)
    np.save(tmp_path / "cifar10h-counts.npy", votes)
    record = score(run, dataset=f"npy:{tmp_path}")
    people = expected_people(run, votes, own_files)
    assert record["people"] == pytest.approx(people, rel=1e-5) and people["loss"] > people["entropy"] > 0.5
    assert record["count"] == 60 and record["accuracy"] == pytest.approx(accuracy(run, TEST.images, TEST.labels))
    output = evaluate_checkpoint(config_of(run, dataset=f"npy:{tmp_path}")).splitlines()
    (line,) = (line for line in output if line.startswith("people's votes: accuracy"))
    assert f" {100 * people['accuracy']:.2f} % for the class with most votes, cross entropy " in line
    assert line.endswith(f" {people['loss']:.4f}, at least {people['entropy']:.4f}")
    assert score(run, dataset=f"npy:{tmp_path}", num_images=10)["people"]["loss"] != people["loss"]
    for wrong in (votes[:, :9] / 50, votes[:-1] / 50, votes[::-1] / 50, np.zeros(60)):
        np.save(tmp_path / "cifar10h-probs.npy", wrong)
        with pytest.raises(DataError, match="cifar10h-probs.npy holds no votes on CIFAR-10's 60 test images; give a"):
            score(run, dataset=f"npy:{tmp_path}")
    with pytest.raises(UsageError, match="has no train examples"):
        np.save(tmp_path / "cifar10h-probs.npy", votes / 50)
        sources.load(sources.find(f"npy:{tmp_path}"))


def test_cifar10_h_of_tfds_has_votes_on_each_image(run, tmp_path):
    import tensorflow_datasets as tfds

    features = {**tfds.builder("cifar10_h", data_dir=tmp_path).info.features}
    assert {"image", "label", "soft_label", "human_labels"} < {*features}
    features["label"] = tfds.features.ClassLabel(names=CLASSES)
    votes = votes_on(TEST.labels)
    few = {name: [[]] * 60 for name in ("human_labels", "trial_indices", "annotator_ids", "reaction_times")}
    columns = {"id": [f"test_{n:05d}" for n in range(60)], "image": TEST.images, "label": TEST.labels, **few}
    examples = [
        {name: column[n] for name, column in columns.items()} | {"soft_label": votes[n] / 50} for n in range(60)
    ]
    kinds = tfds.features.FeaturesDict(features)
    dataset = tf.data.Dataset.from_generator(lambda: iter(examples), output_signature=kinds.get_tensor_spec())
    tfds.dataset_builders.store_as_tfds_dataset(
        "cifar10_h", "1.0.0", features=kinds, split_datasets={"test": dataset}, data_dir=tmp_path
    )
    record = score(run, dataset="cifar10_h", data_dir=str(tmp_path))
    assert record["people"] == pytest.approx(expected_people(run, votes, TEST.labels), rel=1e-5)
    assert record["accuracy"] == pytest.approx(accuracy(run, TEST.images, TEST.labels))
    assert "people" not in score(run)


def test_classes_of_votes_follow_those_of_the_run():
    classes = ("dog", "fox", "cat")
    trained = load_run.TrainedRun(
        None, None, None, None, Split(TEST.images, TEST.labels).info._replace(class_names=classes)
    )
    info = trained.info._replace(class_names=("cat", "dog"))
    split = Split(TEST.images[:2], np.array([0, 1]), info, votes=np.array([[0.7, 0.3], [0.2, 0.8]]))
    numbered = trained.number_labels(split, "votes", may_differ=True).take(np.array([1, 0]))
    assert numbered.labels.tolist() == [0, 2] and numbered.votes.tolist() == [[0.8, 0, 0.2], [0.3, 0, 0.7]]


# Computed corruptions -------------------------------------------------------------------------------------------------


def test_corruptions_of_the_runs_own_images_are_computed(run):
    own = sources.load_split(sources.find(load_run.open_run(run, TINY_NET).metadata["dataset"]))
    expected = {
        name: [accuracy(run, corruptions.corrupt(own.images, f"{name}_{n}"), own.labels) for n in range(1, 6)]
        for name in ("gaussian_blur", "defocus_blur")
    }
    record = score(run, corruptions="*_blur_*")
    check_table(record["accuracy"], expected)
    assert record["corruptions"] == "computed here, not the published files" and record["count"] == 60
    _, line, _, header, *rows = evaluate_checkpoint(config_of(run, corruptions="*_3", num_images=10)).splitlines()
    assert line == "accuracy (%) on 10 images by severity; corruptions computed here, not the published files"
    assert header.split() == ["corruption", "3", "mean"]
    assert [row.split()[0] for row in rows] == [*sorted(corruptions.CORRUPTIONS), "mean"]
    assert "mean without extra" not in score(run, corruptions="speckle_noise_*", num_images=5)["accuracy"]
    with pytest.raises(UsageError, match=r"corruptions=fog_\* matches none; write"):
        score(run, corruptions="fog_*")


def test_corruptions_of_images_of_another_size_and_two_classes_in_python(tmp_path):
    few = [split.take(split.labels < 2) for split in (TRAIN, TEST)]
    two = train(tmp_path / "two", *few, ["cat", "fox"], batch_size=10, epochs=1, image_size=20)
    settings = {"model": TINY_NET, "precision": "float32", "split": "train", "num_gpus": 3}
    record = cifar_towers.evaluate(two, corruptions="*_5", **settings)
    assert record["count"] == len(few[0].labels)
    assert len(record["accuracy"]) == len(corruptions.CORRUPTIONS) + 1
    assert record == cifar_towers.evaluate(two, corruptions="*_5", **settings)
    np.save(tmp_path / "two/y_test.npy", 1 - few[1].labels)
    with pytest.raises(DataError, match="was made with other test images than"):
        cifar_towers.evaluate(two, corruptions="*_5", model=TINY_NET)

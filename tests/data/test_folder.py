"""Data sets of one's own: folders of pictures, and TensorFlow Datasets' others."""

import os
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from cifar_towers.config import TrainConfig
from cifar_towers.data import dataset, sources, synthetic, tfds_source
from cifar_towers.data import folder as folders
from cifar_towers.data.dataset import DatasetInfo, Split, moments
from cifar_towers.errors import DataError, UsageError
from cifar_towers.training import build

SET = synthetic.make(60, 0, 0)


def fill(root, labels=range(4), split=SET):
    """Writes the split's pictures into a subfolder a class; the names of the classes."""
    for index, (image, label) in enumerate(zip(split.images, split.labels, strict=True)):
        if label in labels:
            folder = root / f"class {label}"
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(folder / f"{index}.png")
    return tuple(f"class {label}" for label in labels)


def test_a_split_folder_is_read_as_it_is(tmp_path):
    names = fill(tmp_path / "train")
    fill(tmp_path / "val", split=synthetic.make(40, 0, 1))
    source = sources.find(f"folder:{tmp_path}")
    _, data = sources.load(source)
    assert data.name == f"folder:{tmp_path}" and data.info.class_names == names
    assert (len(data.train.labels), len(data.test.labels)) == (24, 16)
    by_place = {image.tobytes(): label for image, label in zip(SET.images, SET.labels, strict=True)}
    assert [by_place[image.tobytes()] for image in data.train.images] == data.train.labels.tolist()
    pixels = data.train.images.reshape(-1, 3)
    np.testing.assert_allclose(data.info.mean, pixels.mean(0))
    np.testing.assert_allclose(data.info.std, pixels.std(0))
    assert data.test.info == data.train.info


def test_a_folder_that_is_not_split_is_split_alike_everywhere(tmp_path):
    for place in ("one", "other"):
        fill(tmp_path / place)
    one, other = (folders.find(tmp_path / place) for place in ("one", "other"))
    for name in one.train:
        assert len(one.test[name]) == round(0.2 * 6) and len(one.train[name]) == 5
        assert not {*one.train[name]} & {*one.test[name]}
        assert [path.name for path in one.test[name]] == [path.name for path in other.test[name]]


def test_a_run_may_not_write_among_the_classes_of_its_data(tmp_path, monkeypatch):
    for place in ("flat", "split/train", "split/val"):
        fill(tmp_path / place)
    (tmp_path / "link").symlink_to(tmp_path / "flat")
    monkeypatch.chdir(tmp_path)
    refused = {
        "flat": ("flat", "flat/run", "./flat/../flat/run", "link/run"),
        "link": ("flat/run",),
        "split": ("split", "split/train", "split/train/run", "split/val/run"),
    }
    for name, places in refused.items():
        for place in places:
            with pytest.raises(
                UsageError, match=f"train_dir={Path(place)} is among the pictures of folder:.*/{name}; give"
            ):
                config = TrainConfig(dataset=f"folder:{name}", train_dir=place)
                build.load_data(config, sources.find(config.dataset))
    assert not folders.find(tmp_path / "flat").contains(tmp_path / "flat-run")
    assert not folders.find(tmp_path / "split").contains(tmp_path / "split" / "runs" / "one")


def test_other_sizes_are_resized(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for index in range(5):
            Image.new("RGB", (50 + index, 40), "red").save(tmp_path / name / f"{index}.jpg")
    _, data = sources.load(sources.find(f"folder:{tmp_path}"), side=24)
    assert data.train.images.shape == (8, 24, 24, 3) and data.info.side == 24


def nothing(root):
    root.mkdir()


def one_class(root):
    fill(root, [3])


def class_missing_in_test(root):
    fill(root / "train")
    fill(root / "test", [0, 1, 3])


def class_only_in_test(root):
    fill(root / "train", [0, 1])
    fill(root / "test", [0, 1, 2])


def empty_class(root):
    fill(root)
    (root / "zebra").mkdir()


def train_beside_something_else(root):
    fill(root / "train")
    fill(root / "held out")


def train_and_test_of_other_names(root):
    fill(root / "Training")
    fill(root / "Testing")


def class_in_another_encoding(root):
    fill(root)
    (root / "class 3").rename(root / os.fsdecode("Möwe".encode("latin1")))


def damaged(root):
    fill(root)
    (root / "class 1" / "bad.png").write_bytes(b"no picture")


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (nothing, "two classes are the fewest, and there is none"),
        (one_class, "two classes are the fewest, and there is only class 3"),
        (class_missing_in_test, "no pictures of class 2 to test on"),
        (class_only_in_test, "class 2 in test, and not in train"),
        (empty_class, "no pictures of zebra to train on"),
        (
            train_beside_something_else,
            "train has no pictures of its own, so is no class; call it train and put test beside it",
        ),
        (
            train_and_test_of_other_names,
            "Training has no pictures .* or give --dataset=folder:.*/set/Training, of which",
        ),
        (class_in_another_encoding, r"M\\udcf6we cannot be written down, as it is not in UTF-8; rename it"),
        (damaged, "1 of 2[0-9] pictures cannot be read: .*bad.png is not a JPEG"),
        (lambda root: None, "No such file or directory; if it has moved, say where it is with --dataset=folder:<path>"),
    ],
)
def test_folders_that_are_no_data_set_are_told_in_a_line(tmp_path, make, told):
    make(tmp_path / "set")
    with pytest.raises(DataError, match=told) as caught:
        sources.load(sources.find(f"folder:{tmp_path / 'set'}"))
    assert "\n" not in str(caught.value)


def test_a_class_may_be_called_train(tmp_path):
    fill(tmp_path, [0, 1])
    (tmp_path / "class 1").rename(tmp_path / "train")
    assert set(folders.find(tmp_path).train) == {"class 0", "train"}


def test_folders_that_cannot_be_read_are_named(tmp_path, monkeypatch):
    fill(tmp_path)
    closed = tmp_path / "class 2" / "closed"
    closed.mkdir()
    scandir = os.scandir

    def refused(place):
        if os.fspath(place) == os.fspath(closed):
            raise PermissionError(13, "Permission denied", os.fspath(place))
        return scandir(place)

    monkeypatch.setattr(os, "scandir", refused)  # for root, no folder is closed
    with pytest.raises(DataError, match=r"cannot be read: .*class 2/closed \(Permission denied\)"):
        folders.find(tmp_path)


@pytest.mark.parametrize("data_dir", ["", "~nobody-of-this-name/data"])
def test_a_home_that_is_not_there_is_told_in_a_line(data_dir):
    with pytest.raises(DataError, match="~nobody-of-this-name"):
        sources.find("cifar100" if data_dir else "folder:~nobody-of-this-name/data", data_dir)


def test_names_cannot_write_to_the_terminal(tmp_path):
    fill(tmp_path)
    odd = os.fsdecode(b"a\n\x1b[31m\xff.png")
    (tmp_path / "class 1" / odd).write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"class 1/a\\n\\x1b\[31m\\udcff.png is not a JPEG") as caught:
        sources.load(sources.find(f"folder:{tmp_path}"))
    assert str(caught.value).isprintable()


def test_a_folder_is_looked_through_once(tmp_path):
    fill(tmp_path)
    source = sources.find(f"folder:{tmp_path}")
    (tmp_path / "class 9").mkdir()  # what is loaded is what was found
    assert sources.load(source)[1].info.class_names == tuple(source.folder.train)


@pytest.mark.parametrize("at_once", [1, 4])
def test_moments_by_hand(monkeypatch, at_once):
    monkeypatch.setattr(dataset, "PIXELS_PER_CHUNK", at_once)
    images = np.zeros((2, 1, 2, 2), np.uint8)
    images[0, 0, :, 0] = 10, 20
    images[1, 0, :, 0] = 30, 40
    mean, deviation = moments(images)
    assert mean == (25.0, 0.0) and deviation == (pytest.approx(np.sqrt(125)), 1.0)


def test_parts_have_so_many_pixels_together():
    images = np.arange(5 * 4 * 2).reshape(5, 4, 2, 1)
    for pixels, sizes in ((100, [5]), (40, [5]), (31, [3, 2]), (16, [2, 2, 1]), (1, [1] * 5)):
        parts = [*dataset.chunks(images, pixels)]
        assert [len(part) for part in parts] == sizes
        np.testing.assert_array_equal(np.concatenate(parts), images)


def test_traits_survive_json():
    import json

    info = DatasetInfo(("a", "b"), 24, (1.0, 2.0, 3.0), (4.0, 5.0, 6.0))
    assert DatasetInfo.from_json(json.loads(json.dumps(info.to_json()))) == info
    assert DatasetInfo.from_json({}) == Split(SET.images, SET.labels).info


def test_data_that_is_not_there_is_told_in_a_line(monkeypatch, tmp_path):
    monkeypatch.setattr(tfds_source, "reachable", lambda url: False)
    with pytest.raises(DataError, match=r"no cifar100 in .* and .*toronto.edu does not answer; put a prepared copy"):
        sources.load(sources.find("cifar100", str(tmp_path)))
    with pytest.raises(UsageError, match="dataset=cifar1O: TensorFlow Datasets has none of this name"):
        sources.load(sources.find("cifar1O", str(tmp_path)))


def test_a_builder_that_tells_no_addresses_may_try_to_download(tmp_path):
    class Builder:
        url_infos = None

    tfds_source._refuse_if_unreachable("shapes", tmp_path, Builder)


def prepare(root, names="xyz", **labels):
    """Prepares a set of TFDS's named `shapes`, with a split for each of `labels`; where its description is."""
    import tensorflow_datasets as tfds

    kinds = {"picture": tfds.features.Image(shape=(None, None, 3)), "kind": tfds.features.ClassLabel(names=names)}
    columns = {split: {"picture": SET.images[: len(of), :20], "kind": of} for split, of in labels.items()}
    tfds.dataset_builders.store_as_tfds_dataset(
        "shapes",
        "1.0.0",
        features=tfds.features.FeaturesDict(kinds),
        split_datasets={split: tf.data.Dataset.from_tensor_slices(column) for split, column in columns.items()},
        data_dir=root,
    )
    return root / "shapes" / "1.0.0"


def test_a_local_builder_is_read_as_any_other(tmp_path):
    prepare(tmp_path, train=np.arange(30) % 3)
    _, data = sources.load(sources.find("shapes", str(tmp_path)))
    assert data.info.class_names == ("x", "y", "z") and data.info.side == 32
    assert (len(data.train.labels), len(data.test.labels)) == (24, 6)


def test_where_the_test_has_no_classes_the_validation_is_tested_on(tmp_path):
    prepare(tmp_path, train=np.arange(9) % 3, test=[-1, -1, -1], validation=[2, 1])
    _, data = sources.load(sources.find("shapes", str(tmp_path)))
    assert sorted(data.test.labels) == [1, 2] and sorted(data.train.labels) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize(
    ("names", "labels", "told"),
    [
        ("xyz", {"train": [0, 1, 2], "test": [0, -1]}, r"its split test has images without a class \(label -1\)"),
        ("xyz", {"train": [0, -1], "test": [-1, -1]}, r"its split test has images without a class \(label -1\)"),
        (
            "xyz",
            {"train": [0, 1], "test": [-1, -1], "validation": [0, -1]},
            r"its split validation has images without a class \(label -1\)",
        ),
        ("x", {"train": [0, 0, 0]}, "dataset=shapes has one class; two are the fewest"),
    ],
)
def test_prepared_sets_that_cannot_be_learned_are_told_in_a_line(tmp_path, names, labels, told):
    prepare(tmp_path, names, **labels)
    with pytest.raises(UsageError, match=told):
        sources.load(sources.find("shapes", str(tmp_path)))


def test_a_description_that_is_broken_is_told_in_a_line(tmp_path):
    place = prepare(tmp_path, train=[0, 1, 2] * 5)
    for file, content in (
        ("dataset_info.json", b""),
        ("dataset_info.json", b"{}"),
        ("dataset_info.json", b"\xff"),
        ("dataset_info.json", b'{"name": 5}'),
        ("features.json", b"{"),
        ("features.json", None),
    ):
        whole = (place / file).read_bytes()
        (place / file).unlink()
        if content is not None:
            (place / file).write_bytes(content)
        with pytest.raises(DataError, match=r"cannot be read from .*/shapes \(.*delete it and let it be") as caught:
            sources.load(sources.find("shapes", str(tmp_path)))
        assert "\n" not in str(caught.value)
        (place / file).write_bytes(whole)
    sources.load(sources.find("shapes", str(tmp_path)))


def test_all_that_cannot_be_read_is_told_at_once_and_what_is_no_picture_is_counted(tmp_path, caplog):
    caplog.set_level("INFO", "cifar_towers")
    for part in ("train", "test"):
        for name in ("one", "two"):
            place = tmp_path / part / name
            place.mkdir(parents=True)
            Image.new("RGB", (8, 8)).save(place / "good.png")
            (place / "phone.heic").write_bytes(b"")
        (tmp_path / part / "one" / "bad.png").write_bytes(b"no picture")
    folder = folders.find(tmp_path)
    assert [line.partition(": ")[2] for line in caplog.messages] == [
        "2 files of other kinds left out (pictures are .jpg, .jpeg, .png, .gif, .bmp, .webp)"
    ] * 2
    with pytest.raises(DataError, match=r"2 of 6 pictures cannot be read: .*train/one/bad.png .*test/one/bad.png "):
        folders.load(folder, 8)

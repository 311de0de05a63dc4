"""Data sets of the user's own: folders of images, and those of TensorFlow Datasets."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from cifar_towers.config import TrainConfig
from cifar_towers.data import dataset, folder, sources, synthetic, tfds_source
from cifar_towers.data.dataset import DatasetInfo, Split, moments
from cifar_towers.errors import DataError, UsageError
from cifar_towers.training import build

SET = synthetic.make(60, 0, 0)


def fill(root, labels=range(4), split=SET):
    """Write the split's images into a subfolder for each class; return the names of the classes."""
    for index, (image, label) in enumerate(zip(split.images, split.labels, strict=True)):
        if label in labels:
            directory = root / f"class {label}"
            directory.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(directory / f"{index}.png")
    return tuple(f"class {label}" for label in labels)


def test_train_and_test_folders_are_read_as_they_are(tmp_path):
    names = fill(tmp_path / "train")
    fill(tmp_path / "val", split=synthetic.make(40, 0, 1))
    source = sources.find(f"folder:{tmp_path}")
    _, data = sources.load(source)
    assert data.name == f"folder:{tmp_path}" and data.info.class_names == names
    assert (len(data.train.labels), len(data.test.labels)) == (24, 16)
    label_of = {image.tobytes(): label for image, label in zip(SET.images, SET.labels, strict=True)}
    assert [label_of[image.tobytes()] for image in data.train.images] == data.train.labels.tolist()
    pixels = data.train.images.reshape(-1, 3)
    np.testing.assert_allclose(data.info.mean, pixels.mean(0))
    np.testing.assert_allclose(data.info.std, pixels.std(0))
    assert data.test.info == data.train.info


def test_folder_without_a_test_is_split_by_file_names(tmp_path):
    for place in ("one", "other"):
        fill(tmp_path / place)
    one, other = (folder.scan(tmp_path / place) for place in ("one", "other"))
    for name in one.train:
        assert len(one.test[name]) == round(0.2 * 6) and len(one.train[name]) == 5
        assert not {*one.train[name]} & {*one.test[name]}
        assert [path.name for path in one.test[name]] == [path.name for path in other.test[name]]


def test_train_dir_inside_the_data_is_refused(tmp_path, monkeypatch):
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
    assert not folder.scan(tmp_path / "flat").contains(tmp_path / "flat-run")
    assert not folder.scan(tmp_path / "split").contains(tmp_path / "split" / "runs" / "one")


def test_images_of_other_sizes_are_resized(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for index in range(5):
            Image.new("RGB", (50 + index, 40), "red").save(tmp_path / name / f"{index}.jpg")
    _, data = sources.load(sources.find(f"folder:{tmp_path}"), side=24)
    assert data.train.images.shape == (8, 24, 24, 3) and data.info.side == 24


def empty_folder(root):
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
    ("make", "message"),
    [
        (empty_folder, "at least two classes are needed, and there is none"),
        (one_class, "at least two classes are needed, and there is only class 3"),
        (class_missing_in_test, "no images of class 2 to test on"),
        (class_only_in_test, "class 2 in test, and not in train"),
        (empty_class, "no images of zebra to train on"),
        (
            train_beside_something_else,
            "train is no class, as no images lie directly in it; call it train and put test beside it",
        ),
        (
            train_and_test_of_other_names,
            "Training is no class, .* or give --dataset=folder:.*/set/Training, of which",
        ),
        (class_in_another_encoding, r"M\\udcf6we is not valid UTF-8, which config.json needs; rename it"),
        (damaged, "1 of 2[0-9] images cannot be read: .*bad.png is not a JPEG"),
        (lambda root: None, "No such file or directory; if it was moved, give its place by --dataset=folder:<path>"),
    ],
)
def test_unusable_folder_is_an_error_of_one_line(tmp_path, make, message):
    make(tmp_path / "set")
    with pytest.raises(DataError, match=message) as caught:
        sources.load(sources.find(f"folder:{tmp_path / 'set'}"))
    assert "\n" not in str(caught.value)


def test_class_may_be_called_train(tmp_path):
    fill(tmp_path, [0, 1])
    (tmp_path / "class 1").rename(tmp_path / "train")
    assert set(folder.scan(tmp_path).train) == {"class 0", "train"}


def test_unreadable_folders_are_named(tmp_path, monkeypatch):
    fill(tmp_path)
    closed = tmp_path / "class 2" / "closed"
    closed.mkdir()
    scandir = os.scandir

    def refused(place):
        if os.fspath(place) == os.fspath(closed):
            raise PermissionError(13, "Permission denied", os.fspath(place))
        return scandir(place)

    monkeypatch.setattr(os, "scandir", refused)  # root can read every folder
    with pytest.raises(DataError, match=r"cannot be read: .*class 2/closed \(Permission denied\)"):
        folder.scan(tmp_path)


@pytest.mark.parametrize("data_dir", ["", "~nobody-of-this-name/data"])
def test_missing_home_directory_is_an_error_of_one_line(data_dir):
    with pytest.raises(DataError, match="~nobody-of-this-name"):
        sources.find("cifar100" if data_dir else "folder:~nobody-of-this-name/data", data_dir)


def test_control_characters_in_file_names_are_escaped(tmp_path):
    fill(tmp_path)
    name = os.fsdecode(b"a\n\x1b[31m\xff.png")
    (tmp_path / "class 1" / name).write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"class 1/a\\n\\x1b\[31m\\udcff.png is not a JPEG") as caught:
        sources.load(sources.find(f"folder:{tmp_path}"))
    assert str(caught.value).isprintable()


def test_folder_is_scanned_once(tmp_path):
    fill(tmp_path)
    source = sources.find(f"folder:{tmp_path}")
    (tmp_path / "class 9").mkdir()  # after the scan
    assert sources.load(source)[1].info.class_names == tuple(source.folder.train)


@pytest.mark.parametrize("at_once", [1, 4])
def test_moments_by_hand(monkeypatch, at_once):
    monkeypatch.setattr(dataset, "PIXELS_PER_CHUNK", at_once)
    images = np.zeros((2, 1, 2, 2), np.uint8)
    images[0, 0, :, 0] = 10, 20
    images[1, 0, :, 0] = 30, 40
    mean, std = moments(images)
    assert mean == (25.0, 0.0) and std == (pytest.approx(np.sqrt(125)), 1.0)


def test_chunks_have_at_most_so_many_pixels():
    images = np.arange(5 * 4 * 2).reshape(5, 4, 2, 1)
    for pixels, sizes in ((100, [5]), (40, [5]), (31, [3, 2]), (16, [2, 2, 1]), (1, [1] * 5)):
        parts = [*dataset.chunks(images, pixels)]
        assert [len(part) for part in parts] == sizes
        np.testing.assert_array_equal(np.concatenate(parts), images)


def test_dataset_info_survives_json():
    info = DatasetInfo(("a", "b"), 24, (1.0, 2.0, 3.0), (4.0, 5.0, 6.0))
    saved = json.loads(json.dumps(info.to_json()))
    assert DatasetInfo.from_json(saved) == info
    assert saved["deviation"] == [4.0, 5.0, 6.0]  # the key that earlier runs wrote
    assert DatasetInfo.from_json(info._asdict()) == info
    assert DatasetInfo.from_json({}) == Split(SET.images, SET.labels).info


def test_missing_tfds_data_is_an_error_of_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(tfds_source, "reachable", lambda url: False)
    with pytest.raises(DataError, match=r"no cifar100 in .* and .*toronto.edu does not answer; put a prepared copy"):
        sources.load(sources.find("cifar100", str(tmp_path)))
    with pytest.raises(UsageError, match="dataset=cifar1O: neither .* has it; built in are cifar10, .*, folder:<path>"):
        sources.load(sources.find("cifar1O", str(tmp_path)))


def test_builder_without_urls_may_download(tmp_path):
    class Builder:
        url_infos = None

    tfds_source._check_reachable("shapes", tmp_path, Builder)


def prepare(root, names="xyz", **labels):
    """Prepare a TFDS data set `shapes` with a split for each of `labels`; return the directory of its metadata."""
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


def test_local_tfds_data_set_is_read(tmp_path):
    prepare(tmp_path, train=np.arange(30) % 3)
    _, data = sources.load(sources.find("shapes", str(tmp_path)))
    assert data.info.class_names == ("x", "y", "z") and data.info.side == 32
    assert (len(data.train.labels), len(data.test.labels)) == (24, 6)


def test_validation_replaces_an_unlabeled_test(tmp_path):
    prepare(tmp_path, train=np.arange(9) % 3, test=[-1, -1, -1], validation=[2, 1])
    _, data = sources.load(sources.find("shapes", str(tmp_path)))
    assert sorted(data.test.labels) == [1, 2] and sorted(data.train.labels) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize(
    ("names", "labels", "message"),
    [
        ("xyz", {"train": [0, 1, 2], "test": [0, -1]}, r"its split test has images without a class \(label -1\)"),
        ("xyz", {"train": [0, -1], "test": [-1, -1]}, r"its split test has images without a class \(label -1\)"),
        (
            "xyz",
            {"train": [0, 1], "test": [-1, -1], "validation": [0, -1]},
            r"its split validation has images without a class \(label -1\)",
        ),
        ("x", {"train": [0, 0, 0]}, "dataset=shapes has one class; at least two are needed"),
    ],
)
def test_unusable_tfds_data_set_is_an_error_of_one_line(tmp_path, names, labels, message):
    prepare(tmp_path, names, **labels)
    with pytest.raises(UsageError, match=message):
        sources.load(sources.find("shapes", str(tmp_path)))


def test_damaged_tfds_metadata_is_an_error_of_one_line(tmp_path):
    place = prepare(tmp_path, train=[0, 1, 2] * 5)
    for file, content in (
        ("dataset_info.json", b""),
        ("dataset_info.json", b"{}"),
        ("dataset_info.json", b"\xff"),
        ("dataset_info.json", b'{"name": 5}'),
        ("features.json", b"{"),
        ("features.json", None),
    ):
        original = (place / file).read_bytes()
        (place / file).unlink()
        if content is not None:
            (place / file).write_bytes(content)
        with pytest.raises(DataError, match=r"cannot be read from .*/shapes \(.*delete it, and it is") as caught:
            sources.load(sources.find("shapes", str(tmp_path)))
        assert "\n" not in str(caught.value)
        (place / file).write_bytes(original)
    sources.load(sources.find("shapes", str(tmp_path)))


def test_unreadable_images_are_listed_and_other_files_counted(tmp_path, caplog):
    caplog.set_level("INFO", "cifar_towers")
    for part in ("train", "test"):
        for name in ("one", "two"):
            place = tmp_path / part / name
            place.mkdir(parents=True)
            Image.new("RGB", (8, 8)).save(place / "good.png")
            (place / "phone.heic").write_bytes(b"")
        (tmp_path / part / "one" / "bad.png").write_bytes(b"no picture")
    files = folder.scan(tmp_path)
    assert [line.partition(": ")[2] for line in caplog.messages] == [
        "2 files of other types ignored (images are .jpg, .jpeg, .png, .gif, .bmp, .webp)"
    ] * 2
    with pytest.raises(DataError, match=r"2 of 6 images cannot be read: .*train/one/bad.png .*test/one/bad.png "):
        folder.load(files, 8)

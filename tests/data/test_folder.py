"""Data sets of the user's own: folders of images, and those of TensorFlow Datasets."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cifar_towers.config import TrainConfig
from cifar_towers.data import folder, sources, synthetic
from cifar_towers.errors import DataError, UsageError
from cifar_towers.training import build

SET = synthetic.make(60, 0, 0)


def fill(root, labels=range(4), split=SET):
    """Write the split's images into a subfolder per class; return the names of the classes."""
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


def test_folder_is_scanned_once_and_may_have_a_class_train(tmp_path):
    fill(tmp_path, [0, 1])
    (tmp_path / "class 1").rename(tmp_path / "train")
    source = sources.find(f"folder:{tmp_path}")
    (tmp_path / "class 9").mkdir()  # after the scan
    assert sources.load(source)[1].info.class_names == tuple(source.folder.train) == ("class 0", "train")


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
    for name, place in ((name, place) for name, places in refused.items() for place in places):
        config = TrainConfig(dataset=f"folder:{name}", train_dir=place)
        message = f"train_dir={Path(place)} is among the pictures of folder:.*/{name}; give"
        with pytest.raises(UsageError, match=message):
            build.load_data(config, sources.find(config.dataset))
    assert not folder.scan(tmp_path / "flat").contains(tmp_path / "flat-run")
    assert not folder.scan(tmp_path / "split").contains(tmp_path / "split" / "runs" / "one")


def test_images_of_other_sizes_are_resized(tmp_path):
    names = fill(tmp_path)
    for index, name in enumerate(names):
        Image.new("RGB", (50 + index, 40), "red").save(tmp_path / name / "large.jpg")
    _, data = sources.load(sources.find(f"folder:{tmp_path}"), image_size=24)
    assert data.train.images.shape[1:] == (24, 24, 3) and data.info.image_size == 24
    assert len(data.train.labels) + len(data.test.labels) == 7 * len(names)


ALL = range(4)
GULL = os.fsdecode("Möwe".encode("latin1"))


@pytest.mark.parametrize(
    ("folders", "message"),
    [
        ({".": []}, "at least two classes are needed, and there is none"),
        ({".": [3]}, "at least two classes are needed, and there is only class 3"),
        ({"train": ALL, "test": [0, 1, 3]}, "no images of class 2 to test on"),
        ({"train": [0, 1], "test": [0, 1, 2]}, "class 2 in test, and not in train"),
        ({".": ALL, "zebra": []}, "no images of zebra to train on"),
        ({"train": ALL, "held out": ALL}, "train is no class, .*; call it train and put test beside it"),
        ({"Training": ALL, "Testing": ALL}, "Training is no class, .* --dataset=folder:.*/set/Training, of which"),
        ({".": ALL, GULL: [0]}, r"M\\udcf6we is not valid UTF-8, which config.json needs; rename it"),
        ({}, "No such file or directory; if it was moved, give its place by --dataset=folder:<path>"),
    ],
)
def test_unusable_folder_is_an_error_of_one_line(tmp_path, folders, message):
    for name, labels in folders.items():
        (tmp_path / "set" / name).mkdir(parents=True, exist_ok=True)
        fill(tmp_path / "set" / name, labels)
    with pytest.raises(DataError, match=message) as caught:
        sources.load(sources.find(f"folder:{tmp_path / 'set'}"))
    assert "\n" not in str(caught.value)


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
        "2 files of other types ignored (images are .jpg, .jpeg, .jfif, .png, .gif, .bmp, .webp)"
    ] * 2
    with pytest.raises(DataError, match=r"2 of 6 images cannot be read: .*train/one/bad.png .*test/one/bad.png "):
        folder.load(files, 8)

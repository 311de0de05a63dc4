"""Data sets of the user's own: folders of images."""

import numpy as np
import pytest
from PIL import Image

from cifar_towers.data import sources, synthetic
from cifar_towers.errors import DataError, UsageError

SET = synthetic.make(60, 0, 0)


def fill(root, labels=range(4), split=SET):
    """Write the split's images into a subfolder per class; return the names of the classes."""
    for index, (image, label) in enumerate(zip(split.images, split.labels, strict=True)):
        if label in labels:
            directory = root / f"class {label}"
            directory.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(directory / f"{index}.png")
    return tuple(f"class {label}" for label in labels)


def put(path, level=0):
    """Write a small gray image."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), (level,) * 3).save(path, "PNG")


def load(root, image_size=32):
    """Return the data set in a folder."""
    return sources.load(sources.find(f"folder:{root}"), image_size=image_size)[1]


def test_folders_of_splits_are_read_as_they_are(tmp_path):
    names = fill(tmp_path / "train")
    fill(tmp_path / "test", split=synthetic.make(40, 0, 1))
    fill(tmp_path / "validation", [1], split=synthetic.make(20, 0, 2))
    data = load(tmp_path)
    assert data.name == f"folder:{tmp_path}" and data.info.class_names == names
    counts = {name: getattr(data, name).class_counts().tolist() for name in ("train", "validation", "test")}
    assert counts == {"train": [6] * 4, "validation": [0, 2, 0, 0], "test": [4] * 4}
    label_of = {image.tobytes(): label for image, label in zip(SET.images, SET.labels, strict=True)}
    assert [label_of[image.tobytes()] for image in data.train.images] == data.train.labels.tolist()
    pixels = data.train.images.reshape(-1, 3)
    np.testing.assert_allclose(data.info.mean, pixels.mean(0))
    np.testing.assert_allclose(data.info.std, pixels.std(0))
    assert data.test.info == data.train.info
    before = {"train_sha256": data.train.digest, "test_sha256": data.test.digest}
    assert data.changed_splits(before) == ["validation"]  # of a run that had no validation images


def test_order_and_division_stay_those_of_earlier_runs(tmp_path):
    fill(tmp_path / "split/train", [0, 1])
    fill(tmp_path / "split/test", [0, 1], synthetic.make(40, 0, 1))
    fill(tmp_path / "flat", [0, 1])
    (tmp_path / "flat/class 0/.DS_Store").touch()
    digests = {
        place: {name: digest[:16] for name, digest in load(tmp_path / place).digests().items()}
        for place in ("split", "flat")
    }
    assert digests == {
        "split": {"train": "9912d58f4ad61717", "test": "73ab70b0c940fc04"},
        "flat": {"train": "8bfbfa72518553e0", "test": "d28d946b5c7d59d3"},
    }


@pytest.mark.parametrize("place", ["", "train"])
def test_fifth_of_each_class_is_the_test_split_by_file_names(tmp_path, caplog, place):
    caplog.set_level("INFO", "cifar_towers")
    for root in ("one", "other"):
        fill(tmp_path / root / place)
    one, other = load(tmp_path / "one"), load(tmp_path / "other")
    assert one.digests() == other.digests()
    assert one.train.class_counts().tolist() == [5] * 4 and one.test.class_counts().tolist() == [1] * 4
    assert caplog.text.count("there is no test split, so a fifth of each class is the test split") == 2


def test_hidden_and_other_files_are_left_out_and_counted(tmp_path, caplog):
    caplog.set_level("INFO", "cifar_towers")
    for level, place in enumerate(("train/cat/1.PNG", "train/dog/2.jpeg", "test/cat/3.png", "test/dog/4.gif")):
        put(tmp_path / place, level)
    for place in ("loose.png", "train/loose.png", "train/cat/._1.png", "test/.trash/1.png", "test/cat/readme.txt"):
        put(tmp_path / place, 99)
    data = load(tmp_path, 8)
    assert [split.images.max() for split in (data.train, data.test)] == [1, 3] and len(data.train.labels) == 2
    assert "5 left out: hidden, of another type, or in no folder of a class" in caplog.messages[0]
    assert "train: 2 images (cat 1, dog 1)" in caplog.text


@pytest.mark.parametrize(
    ("pictures", "message"),
    [
        (["a/1.png", "b/c/2.png"], "b/c is a folder in the folder of a class; pictures must be <class>"),
        (["training_set/cats/1.png", "test_set/cats/2.png"], "test_set/cats is a folder in the folder of a class"),
        (["Train/cats/1.png", "Test/cats/2.png"], "Test/cats is a folder in the folder of a class"),
        (["photos/train/cats/1.png", "photos/test/cats/2.png"], "photos/test is a folder in the folder of a class"),
        (["train/a/1.png", "test/a/1.png", "val/a/1.png"], "val is beside the folder of a split; pictures must be"),
        (["cats/1.png", "test/2.png"], "cats is beside the folder of a split"),
        (["train/1.png", "test/2.png"], "test has no images|train has no images"),
        (["1.png", "2.png"], "train has no images"),
        (["train/a/1.png", "train/b/2.png", "test/A/3.png"], "test has the classes A, and train only a, b"),
        (["train/a/1.png", "train/b/2.txt", "test/a/3.png"], "there are no images of b to train on"),
        (["a/1.png", "b/2.png", "b/3.png"], "there are no images of a to train on"),
        ([], "No such file"),
    ],
)
def test_other_layouts_are_refused(tmp_path, pictures, message):
    for place in pictures:
        put(tmp_path / "data" / place)
    with pytest.raises(DataError, match=message):
        sources.find(f"folder:{tmp_path}/data")


def test_one_class_is_refused(tmp_path):
    fill(tmp_path, [0])
    with pytest.raises(UsageError, match="has one class; at least two are needed"):
        load(tmp_path)


def test_copies_of_training_images_in_the_test_are_counted(tmp_path, caplog):
    caplog.set_level("INFO", "cifar_towers")
    places = ("train/cat/1", "train/dog/2", "test/cat/3", "test/dog/4", "test/dog/5")
    for place, level in zip(places, (100, 150, 200, 100, 150), strict=True):
        put(tmp_path / f"{place}.png", level)
    load(tmp_path)
    assert caplog.messages[0].endswith(": 2 of 3 test images are copies of training images")


def test_unreadable_images_are_named(tmp_path):
    fill(tmp_path)
    (tmp_path / "class 1" / "a\n\x1b[31m.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"class 1/a\\n\\x1b\[31m.png cannot be read as an image") as caught:
        load(tmp_path)
    assert str(caught.value).isprintable()

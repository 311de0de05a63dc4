"""Data sets of the user's own: folders of images, and those of TensorFlow Datasets."""

import os
import unicodedata
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image

import cifar_towers
from cifar_towers.cli import main
from cifar_towers.config import TrainConfig
from cifar_towers.data import folder, own_data, sources, synthetic
from cifar_towers.errors import DataError, UsageError
from cifar_towers.shutdown import ShutdownHandler

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
    kind = {".jfif": "JPEG"}.get(path.suffix.lower())
    Image.new("RGB", (8, 8), (level,) * 3).save(path, kind)


def load(root, image_size=32):
    """Return the data set in a folder."""
    return sources.load(sources.find(f"folder:{root}"), image_size=image_size)[1]


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
    assert sources.load(source)[1].info.class_names == ("class 0", "train")


def test_folder_without_a_test_is_split_by_file_names(tmp_path):
    for place in ("one", "other"):
        fill(tmp_path / place)
    one, other = (own_data.divided(folder.scan(tmp_path / place)) for place in ("one", "other"))
    for (split, paths, labels), (_, others, other_labels) in zip(one, other, strict=True):
        assert np.bincount(labels).tolist() == [{"train": 5, "test": round(0.2 * 6)}[split]] * 4
        assert [(path.name, label) for path, label in zip(paths, labels, strict=True)] == [
            (path.name, label) for path, label in zip(others, other_labels, strict=True)
        ]


def test_order_and_division_stay_those_of_earlier_runs(tmp_path):
    fill(tmp_path / "split/train", [0, 1])
    fill(tmp_path / "split/val", [0, 1], synthetic.make(40, 0, 1))
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


@pytest.mark.parametrize(
    ("train", "test"), [("training_set", "test_set"), ("TRAIN", "Dev"), ("Training", "valid"), ("train", "Test")]
)
def test_common_names_of_splits_are_known(tmp_path, caplog, train, test):
    caplog.set_level("INFO", "cifar_towers")
    names = fill(tmp_path / train)
    fill(tmp_path / test, split=synthetic.make(40, 0, 1))
    data = load(tmp_path)
    assert data.info.class_names == names and not len(data.validation.labels)
    assert data.train.class_counts().tolist() == [6] * 4 and data.test.class_counts().tolist() == [4] * 4
    said = "there are no test examples: validation is used as the test split"
    assert caplog.messages.count(said) == (test in ("Dev", "valid"))


def test_validation_folder_beside_a_test_is_the_validation_split(tmp_path):
    for stream, name in enumerate(("train", "Valid", "test")):
        fill(tmp_path / name, [0, 1, 2][: 2 if name == "Valid" else 3], synthetic.make(20 + 10 * stream, 0, stream))
    data = load(tmp_path)
    counts = {name: getattr(data, name).class_counts().tolist() for name in ("train", "validation", "test")}
    assert counts == {"train": [2] * 3, "validation": [3, 3, 0], "test": [4] * 3}
    before = {"train_sha256": data.train.digest, "test_sha256": data.test.digest}
    assert data.changed_splits(before) == ["validation"]  # of a run that had no validation images
    with pytest.raises(UsageError, match="is among the pictures of"):
        cifar_towers.train(dataset=f"folder:{tmp_path}", train_dir=tmp_path / "Valid" / "run")


def test_folder_with_a_test_alone_is_scored_and_not_trained_on(tmp_path):
    fill(tmp_path / "test", [2])
    source = sources.find(f"folder:{tmp_path}")
    assert sources.load_split(source).info.class_names == ("class 2",)
    assert sources.load_split(source).class_counts().tolist() == [6]
    with pytest.raises(UsageError, match=r"dataset=folder:.* has no train examples"):
        sources.load(source)


def test_what_programs_leave_among_pictures_is_left_out_and_named(tmp_path, caplog):
    caplog.set_level("INFO", "cifar_towers")
    fill(tmp_path / "train", [0, 1])
    fill(tmp_path / "test", [0, 1], synthetic.make(40, 0, 1))
    expected = load(tmp_path).digests()
    caplog.clear()
    train = tmp_path / "train"
    for place in ("class 0/.ipynb_checkpoints", "class 0/@eaDir/SYNO", "@eaDir", "__MACOSX/class 0", ".cache"):
        put(train / place / "0-checkpoint.png")
    for file in ("class 0/._0.png", "class 1/Thumbs.db", ".DS_Store"):
        (train / file).write_bytes(b"no picture")
    (train / "class 1/labels.txt").touch()
    put(train / "cover.PNG")
    put(tmp_path / "annotated/one.png")
    assert load(tmp_path).digests() == expected
    assert [line.partition(": ")[2] for line in caplog.messages[:4]] == [
        "left out, as not in train, test: annotated",
        "1 file of other types ignored (images are .jpg, .jpeg, .jfif, .png, .gif, .bmp, .webp)",
        "left out, as in no class's folder: cover.PNG",
        "left out, as hidden, or of file managers, notebooks or archives: .DS_Store, ._0.png, .cache, "
        ".ipynb_checkpoints, @eaDir and 2 more",
    ]
    assert [line.partition(", ")[0] for line in caplog.messages[4:]] == [
        f"folder:{tmp_path} train: 12 images (class 0 6",
        f"folder:{tmp_path} test: 8 images (class 0 4",
    ]


def test_links_are_followed_and_circles_end(tmp_path, caplog):
    caplog.set_level("INFO", "cifar_towers")
    for place in ("cat/1.png", "cat/deep/2.png", "dog/3.png", "dog/6.png", "../pool/4.png", "../pool/more/5.png"):
        put(tmp_path / "set" / place)
    links = {"cat/a pool": "../../pool", "cat/circle": "../..", "dog/cats": "../cat", "dog/deep": "../cat/deep"}
    for link, target in links.items():
        (tmp_path / "set" / link).symlink_to(target)
    (tmp_path / "pool/again").symlink_to("../pool")
    paths, labels = folder.scan(tmp_path / "set").splits[own_data.ALL]
    names = sorted((label, path.name) for path, label in zip(paths, labels, strict=True))
    assert names == [(0, "1.png"), (0, "2.png"), (0, "4.png"), (0, "5.png"), (1, "3.png"), (1, "6.png")]
    (line,) = caplog.messages
    repeated = "cat/a pool/again, cat/circle, dog/cats, dog/deep"
    assert line.endswith(f": left out, as links to folders that are read anyway: {repeated}")


GULL = os.fsdecode("Möwe".encode("latin1"))


@pytest.mark.parametrize(
    ("pictures", "message"),
    [
        ((), "No such file or directory; if it was moved, give its place by --dataset=folder:<path>"),
        (("cat/1",), "at least two classes are needed, and there is cat"),
        (("cat/1", "cat/2", "dog/3", "dog/4", "zebra/"), "no images of zebra to train on"),
        (("train/a/1", "train/b/2", "test/a/3"), "no images of b to test on"),
        (("train/a/1", "train/b/2", "test/a/3", "test/b/4", "test/c/5"), "c in test is no class"),
        (("train/a/1", "train/b/2", "held out/a/3"), "train is no class, .*; call it train and put test beside it"),
        (("Training/a/1", "Testing/a/2"), "Training is no class, .* --dataset=folder:.*/set/Training, of which"),
        (
            ("cat/1", "cat/2", f"{GULL}/3", f"{GULL}/4"),
            r"M\\udcf6we is not valid UTF-8, which config.json needs; rename",
        ),
        (("train/1", "test1/2"), r"train is no class, but named as a split \(as test1\); call it train and put test"),
        (("train/a/1", "train/b/2", "test-data/a/3"), r"train is no class, .* \(as test-data\); call it train and"),
        (("cat/1", "dog/2", "test/cat/3"), "test is no class, but named as a split; call it test and put train"),
        (("cat/1", "dog/2", "Testing/3"), "Testing is no class, .* give --dataset=folder:.*/Testing, of which"),
        (("cat/1", "dog/2", "dev/cat/3"), "dev is no class"),
        (("train/a/1", "val/a/2", "valid/a/3"), "of train, val, valid, two are the same split; leave one"),
        (("data/train/a/1", "data/test/a/2"), r"is data; give --dataset=folder:.*/data, or move the folders in it"),
        (
            ("seg_train/seg_train/a/1", "seg_test/seg_test/a/2", "seg_pred/3"),
            r"seg_train is no class, .*\(as seg_test\)",
        ),
        (("train/1", "test/2"), "there is none; it needs a subfolder of images for each class"),
        (("1", "2"), "there is none; it needs a subfolder of images for each class"),
        (("train/Cat/1", "train/dog/2", "test/cat/3", "test/dog/4"), "cat in test is no class; did you mean Cat"),
        (
            ("cat/train/1", "cat/test/2", "dog/train/3", "dog/test/4"),
            "cat/test, cat/train, dog/test, dog/train are named as splits, .*; put splits outside, as test/cat, or re",
        ),
        (("cat/1", "cat/Testing/2", "dog/3", "dog/Testing/a/4"), "cat/Testing, dog/Testing are named as splits"),
        (("train/a/1", "train/b/2", "test/a/3", "test/b/4", "val/c/5"), "c in validation is no class"),
    ],
)
def test_layouts_that_are_refused(tmp_path, pictures, message):
    for picture in pictures:
        place = tmp_path / "set" / f"{picture}.png"
        place.parent.mkdir(parents=True) if place.name == ".png" else put(place)
    with pytest.raises(DataError, match=message) as caught:
        sources.find(f"folder:{tmp_path / 'set'}")
    assert "\n" not in str(caught.value)


def test_classes_may_be_named_almost_as_splits(tmp_path):
    names = ["bullet_train", "crash_test", "invalid", "test tube", "train", "wagon"]
    for name in names:
        put(tmp_path / name / "1.png")
        put(tmp_path / name / "2.png")
    assert [*folder.scan(tmp_path).class_names] == names
    (tmp_path / "train").rename(tmp_path / "valid")
    assert "valid" in folder.scan(tmp_path).class_names


def test_folders_in_folders_of_classes_are_no_classes_and_the_log_says_so_where_all_have_the_same(tmp_path, caplog):
    caplog.set_level("INFO", "cifar_towers")
    for place in ("2019/cat", "2019/dog/train", "2020/cat", "2020/dog"):
        put(tmp_path / place / "1.png")
    assert folder.scan(tmp_path).class_names == ("2019", "2020")
    said = "the classes are 2019, 2020, and not the folders in each of them, cat, dog"
    assert caplog.messages == [f"dataset=folder:{tmp_path}: {said}"]
    put(tmp_path / "2020/owl/train/1.png")
    put(tmp_path / "2020/train/2.png")  # one folder of pictures of trains
    caplog.clear()
    assert folder.scan(tmp_path).class_names == ("2019", "2020") and not caplog.messages


def test_accents_are_compared_by_their_letters(tmp_path):
    """macOS stores an accent after its letter; Linux and Windows store both as one character."""
    for split, form in (("train", "NFC"), ("test", "NFD")):
        for name in ("Möwe", "Storch"):
            put(tmp_path / split / unicodedata.normalize(form, name) / "1.png")
    data = load(tmp_path)
    assert data.info.class_names == ("Möwe", "Storch") and data.test.class_counts().tolist() == [1, 1]


def test_files_of_one_name_and_of_any_case_are_all_read(tmp_path):
    for level, place in enumerate(("a/x/1.PNG", "b/x/1.PNG", "1.Png")):
        put(tmp_path / "train/cat" / place, level)
    for level, place in enumerate(("train/dog/1.png", "test/cat/1.png", "test/dog/1.JFIF"), 3):
        put(tmp_path / place, level)
    data = load(tmp_path, 8)
    levels = dict(zip(data.train.images[:, 0, 0, 0].tolist(), data.train.labels.tolist(), strict=True))
    assert levels == {0: 0, 1: 0, 2: 0, 3: 1} and len(data.test.labels) == 2


def test_copies_of_training_images_in_the_test_are_counted(tmp_path, caplog):
    caplog.set_level("INFO", "cifar_towers")
    places = ("train/cat/1", "train/dog/2", "test/cat/3", "test/dog/4", "test/dog/5")
    for place, level in zip(places, (100, 150, 200, 100, 150), strict=True):
        put(tmp_path / f"{place}.png", level)
    load(tmp_path)
    assert caplog.messages[0].endswith(": 2 of 3 test images are copies of training images")


def test_train_dir_inside_the_data_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(main, "import_tensorflow", Mock(side_effect=ImportError))
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
            main.start_training(config, ShutdownHandler())
    assert not sources.find(f"folder:{tmp_path}/flat").is_among_pictures(tmp_path / "flat-run")
    assert not sources.find(f"folder:{tmp_path}/split").is_among_pictures(tmp_path / "split" / "runs" / "one")


def test_images_of_other_sizes_are_resized(tmp_path):
    names = fill(tmp_path)
    for index, name in enumerate(names):
        Image.new("RGB", (50 + index, 40), "red").save(tmp_path / name / "large.jpg")
    _, data = sources.load(sources.find(f"folder:{tmp_path}"), image_size=24)
    assert data.train.images.shape[1:] == (24, 24, 3) and data.info.image_size == 24
    assert len(data.train.labels) + len(data.test.labels) == 7 * len(names)


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
        sources.find(f"folder:{tmp_path}")


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
        own_data.load(files, 8, own_data.SPLITS)

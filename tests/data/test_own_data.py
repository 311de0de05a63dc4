"""Data sets of the user's own: folders of pictures, tables of pictures, and files of arrays."""

import numpy as np
import pytest
from PIL import Image

from cifar_towers.data import image_files, own_data, sources, synthetic
from cifar_towers.errors import DataError, UsageError
from cifar_towers.registry import PREFIXES
from tests.own_data import write_arrays, write_folder

TRAIN, TEST, VALIDATION = synthetic.make(60, 0, 0), synthetic.make(40, 0, 1), synthetic.make(20, 0, 2)
ARRAYS = {"x_train": TRAIN.images, "y_train": TRAIN.labels, "x_test": TEST.images, "y_test": TEST.labels}
FILES = ["a/1.png", "a/2.jpg", "3.png", "b/4.gif"]  # of the tables: pictures of the levels 10, 20, 30 and 40


def put(path, level=0):
    """Write a small gray picture."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), (level,) * 3).save(path)


def folder(root, places):
    """Write a folder of pictures; return its data set's name."""
    for place in places:
        put(root / place)
    return f"folder:{root}"


def table(root, lines):
    for level, place in enumerate(FILES, 1):
        put(root / place, 10 * level)
    (root / "labels.csv").write_text("\n".join(lines), "utf-8")
    return f"csv:{root / 'labels.csv'}"


def arrays(root, changes):
    """Write the file of `ARRAYS` with changes, None to leave one out."""
    root.mkdir(exist_ok=True)
    np.savez(root / "some.npz", **{name: array for name, array in (ARRAYS | changes).items() if array is not None})
    return f"npz:{root / 'some.npz'}"


def load(name, image_size=32):
    return sources.load(sources.find(name), image_size=image_size)


def examples(split):
    """Return (image, class) of each example, in an order that does not depend on theirs."""
    classes = [split.info.class_names[label] for label in split.labels]
    return sorted(zip((image.tobytes() for image in split.images), classes, strict=True))


def levels(split):
    """Return (level, class) of each example, sorted."""
    return sorted((int(i[0, 0, 0]), split.info.class_names[n]) for i, n in zip(split.images, split.labels, strict=True))


# What all layouts have in common --------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", [write_folder, write_arrays])
def test_splits_are_read_as_they_are(tmp_path, write):
    name = write(tmp_path, train=TRAIN, test=TEST, validation=VALIDATION)
    data = load(name)
    assert data.name == name and {*data.info.class_names} == {*synthetic.CLASSES}
    for split, written in (("train", TRAIN), ("test", TEST), ("validation", VALIDATION)):
        assert examples(getattr(data, split)) == examples(written)
    pixels = TRAIN.images.reshape(-1, 3)
    np.testing.assert_allclose([data.info.mean, data.info.std], [pixels.mean(0), pixels.std(0)])
    assert data.test.info == data.train.info


def test_order_and_division_stay_those_of_earlier_runs(tmp_path):
    for name, split in {"split/train": TRAIN, "split/test": TEST, "flat": TRAIN}.items():
        for index in np.flatnonzero(split.labels < 2):
            path = tmp_path / name / f"class {split.labels[index]}" / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(split.images[index]).save(path)
    rows = [f"flat/class {n}/{path.name},{n}" for n in (0, 1) for path in (tmp_path / f"flat/class {n}").iterdir()]
    (tmp_path / "labels.csv").write_text("\n".join(["file,label", *rows]))
    names = f"folder:{tmp_path}/split", f"folder:{tmp_path}/flat", f"csv:{tmp_path}/labels.csv", arrays(tmp_path, {})
    divided = {"train": "8bfbfa72518553e0", "test": "d28d946b5c7d59d3"}
    assert [{split: digest[:16] for split, digest in load(name).digests().items()} for name in names] == [
        {"train": "9912d58f4ad61717", "test": "73ab70b0c940fc04"},
        divided,
        divided,
        {"train": "cacdfd3a60b395dd", "test": "0b6997814409316e"},
    ]


@pytest.mark.parametrize("write", [write_folder, write_arrays])
def test_fifth_of_each_class_is_the_test_split_wherever_the_data_lie(tmp_path, caplog, write):
    caplog.set_level("INFO", "cifar_towers")
    one, other = (load(write(tmp_path / place, train=TRAIN)) for place in ("one", "other"))
    assert one.digests() == other.digests()
    assert (one.train.class_counts() == 5).all() and (one.test.class_counts() == 1).all()
    assert sorted(examples(one.train) + examples(one.test)) == examples(TRAIN)
    assert caplog.text.count("there is no test split, so a fifth of each class is") == 2


@pytest.mark.parametrize("write", [write_folder, write_arrays])
def test_test_split_alone_is_scored_and_not_trained_on(tmp_path, write):
    source = sources.find(write(tmp_path, test=TEST))
    assert examples(sources.load_split(source)) == examples(TEST)
    with pytest.raises(UsageError, match="has no train examples"):
        sources.load(source)


REFUSALS = [  # how to write the data, what to write, what the error names
    (folder, ["a/1.png", "b/c/2.png"], "b/c is a folder .* pictures must be <class>"),
    (folder, ["training_set/cats/1.png", "test_set/cats/2.png"], "test_set/cats is a folder"),
    (folder, ["Train/cats/1.png", "Test/cats/2.png"], "Test/cats is a folder"),
    (folder, ["photos/train/cats/1.png", "photos/test/cats/2.png"], "photos/test is a folder"),
    (folder, ["train/a/1.png", "test/a/1.png", "val/a/1.png"], "val is beside .* pictures must be"),
    (folder, ["cats/1.png", "test/2.png"], "cats is beside"),
    (folder, ["train/1.png", "test/2.png"], "train has no images"),
    (folder, ["1.png", "2.png"], "train has no images"),
    (folder, ["train/a/1.png", "train/b/2.png", "test/A/3.png"], "test has the classes A, .* a, b"),
    (folder, ["train/a/1.png", "train/b/.2.png", "test/a/3.png"], "no images of b to train on"),
    (folder, ["a/1.png", "b/2.png", "b/3.png"], "no images of a to train on"),
    (folder, [], "No such file"),
    (table, [], "its columns are ; the columns of the first line must be"),
    (table, ["a/1.png,cat"], "its columns are a/1.png, cat;"),
    (table, ["file;label", "a/1.png;cat"], "its columns are file;label;"),
    (table, ["file,label,is_valid", "a/1.png,cat,True"], "its columns are file, label, is_valid;"),
    (table, ["file,label,label", "a/1.png,cat,dog"], "its columns are file, label, label;"),
    (table, ["file,label", "a/1.png,cat", "a/2.jpg"], "line 3 .* each row must have"),
    (table, ["file,label", "a/1.png,cat", "a/2.jpg,dog,big"], "line 3 "),
    (table, ["file,label,split", "a/1.png,cat,"], "line 2 "),
    (table, ["file,label,split", "a/1.png,cat,val"], "line 2 is a/1.png,cat,val; .* train, validation or test"),
    (table, ["file,label", "a/1.png,cat", "a/1.png,dog"], "line 3 is a/1.png,dog; .* another file"),
    (table, ["file,label,split", "a/1.png,cat,train", "3.png,Cat,test"], "test has the classes Cat, .* cat"),
    (table, ["file,label", *(f"{name},{name[0]}" for name in FILES)], "no images of 3, b to train on"),
    (arrays, {"x_val": TEST.images}, "its arrays are .*x_val; the arrays must be x_train, y_train"),
    (arrays, {"y_test": None}, "its arrays are x_train, y_train, x_test;"),
    (arrays, dict.fromkeys(ARRAYS), "its arrays are ;"),
    (arrays, {"x_train": TRAIN.images / 255}, "x_train is float64 .*; images must be uint8"),
    (arrays, {"x_train": TRAIN.images // 255}, "x_train is uint8 .* up to 1; .* from 0 to 255"),
    (arrays, {"x_train": TRAIN.images.reshape(60, 3, 1024)}, r"x_train is uint8 \(60, 3, 1024\)"),
    (arrays, {"x_train": TRAIN.images.transpose(0, 3, 1, 2)}, r"x_train is uint8 \(60, 3, 32, 32\)"),
    (arrays, {"x_train": TRAIN.images[:, :16]}, r"x_train is uint8 \(60, 16, 32, 3\)"),
    (arrays, {"x_train": TRAIN.images[1:]}, r"y_train is int64 \(60,\); labels must be"),
    (arrays, {"y_train": np.eye(10)[TRAIN.labels]}, r"y_train is float64 \(60, 10\)"),
    (arrays, {"y_train": TRAIN.labels.astype(str)}, r"y_train is <U21 \(60,\)"),
    (arrays, {"y_train": TRAIN.labels - 1}, "y_train is -1 to 8, of 9 classes"),
    (arrays, {"y_train": TRAIN.labels + 1}, "no images of 0 to train on"),
    (arrays, {"y_test": TEST.labels + 1}, "y_test is 1 to 10, of 10 classes"),
    (arrays, {"class_names": list("abc")}, "y_train is 0 to 9, of 3 classes"),
    (arrays, {"class_names": list("abcdefghijk")}, "no images of k to train on"),
    (arrays, {"class_names": list("abcdefghia")}, "class_names"),
    (arrays, {"x_test": TEST.images[:0], "y_test": TEST.labels[:0]}, "zero-size array"),
    (arrays, {"y_train": TRAIN.labels.astype(object)}, "Object arrays cannot be loaded"),
]


@pytest.mark.parametrize(("write", "content", "message"), REFUSALS)
def test_other_layouts_are_an_error_of_one_line(tmp_path, write, content, message):
    name = write(tmp_path / "data", content)
    with pytest.raises(DataError, match=message) as caught:
        sources.find(name)
    assert str(caught.value).startswith(f"dataset={name}: ") and str(caught.value).isprintable()


def test_every_prefix_has_a_layout():
    assert {*own_data.SCANS} == {*PREFIXES}


# Pictures -------------------------------------------------------------------------------------------------------------


def test_hidden_and_other_files_are_left_out_and_counted(tmp_path, caplog):
    caplog.set_level("INFO", "cifar_towers")
    for level, place in enumerate(("train/cat/1.PNG", "train/dog/2.jpeg", "test/cat/3.png", "test/dog/4.gif")):
        put(tmp_path / place, level)
    for place in ("loose.png", "train/loose.png", "train/cat/._1.png", "test/.trash/1.png"):
        put(tmp_path / place, 99)
    (tmp_path / "test/cat/readme.txt").touch()
    data = load(f"folder:{tmp_path}", 8)
    assert [split.images.max() for split in (data.train, data.test)] == [1, 3] and len(data.train.labels) == 2
    assert "5 left out" in caplog.messages[0] and "train: 2 images (cat 1, dog 1)" in caplog.text


def test_one_class_is_refused(tmp_path):
    with pytest.raises(UsageError, match="has one class"):
        load(folder(tmp_path, ["cat/1.png", "cat/2.png"]))


def test_copies_of_training_images_in_the_test_are_counted(tmp_path, caplog):
    caplog.set_level("INFO", "cifar_towers")
    places = ("train/cat/1", "train/dog/2", "test/cat/3", "test/dog/4", "test/dog/5")
    for place, level in zip(places, (100, 150, 200, 100, 150), strict=True):
        put(tmp_path / f"{place}.png", level)
    load(f"folder:{tmp_path}")
    assert caplog.messages[0].endswith(": 2 of 3 test images are copies of training images")


def test_files_of_a_table_are_relative_to_it(tmp_path):
    rows = ["a/1.png,été,train", 'a/2.jpg," cat, big",train', "3.png,été,test", "", "b/4.gif,été ,validation"]
    data = load(table(tmp_path, ["\ufefffile,label,split", *rows]), 8)
    assert data.info.class_names == ("cat, big", "été")
    assert levels(data.train) == [(10, "été"), (20, "cat, big")]
    assert (levels(data.test), levels(data.validation)) == ([(30, "été")], [(40, "été")])


def test_missing_and_unreadable_files_are_named(tmp_path):
    name = table(tmp_path, ["file,label,split", "a/1.png,cat,train", "a/2.jpg,dog,train", "a/5.png,dog,test"])
    with pytest.raises(DataError, match=r"a/5.png cannot be read as an image: No such file"):
        load(name)
    with pytest.raises(DataError, match=r"none.csv: .*No such file"):
        sources.find(f"csv:{tmp_path}/none.csv")
    (tmp_path / "labels.csv").write_bytes("file,label\na/1.png,été".encode("latin-1"))
    with pytest.raises(DataError, match="utf-8"):
        sources.find(name)
    name = folder(tmp_path / "photos", [f"{label}/{index}.png" for label in "ab" for index in range(2)])
    (tmp_path / "photos/b/a\n\x1b[31m.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"b/a\\n\\x1b\[31m.png cannot be read as an image") as caught:
        load(name)
    assert str(caught.value).isprintable()


# Arrays ---------------------------------------------------------------------------------------------------------------


def test_classes_without_names_are_called_by_their_numbers(tmp_path):
    assert load(arrays(tmp_path, {})).info.class_names == tuple("0123456789")


def test_first_images_are_a_sample_of_all_classes(tmp_path):
    order = TRAIN.labels.argsort()
    data = load(arrays(tmp_path, {"x_train": TRAIN.images[order], "y_train": TRAIN.labels[order]}))
    assert len({*data.train.labels[:15]}) > 5


def test_grey_images_get_three_channels_and_are_resized(tmp_path):
    grey = {name: array[..., 0] if array.ndim == 4 else array.astype(np.uint8) for name, array in ARRAYS.items()}
    data = load(arrays(tmp_path, grey), 20)
    expected = image_files.resize_all(np.repeat(TEST.images[..., :1], 3, axis=3), 20)
    assert {image.tobytes() for image in data.test.images} == {image.tobytes() for image in expected}

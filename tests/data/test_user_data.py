"""Data sets of the user's own: folders of pictures, tables of pictures, and files of arrays."""

import unicodedata

import numpy as np
import pytest
from PIL import Image

from cifar_towers.data import image_files, sources, synthetic
from cifar_towers.errors import DataError, UsageError
from cifar_towers.registry import PREFIXES
from tests.helpers.messages import lines_with
from tests.helpers.user_data import write_arrays, write_folder, write_table

TRAIN = synthetic.make(60, 0, 0)
TEST = synthetic.make(40, 0, 1)
VALIDATION = synthetic.make(20, 0, 2)
ARRAYS = {
    "x_train": TRAIN.images,
    "y_train": TRAIN.labels,
    "x_test": TEST.images,
    "y_test": TEST.labels,
}
# of the tables: pictures of the levels 10, 20, 30 and 40
FILES = ["a/1.png", "a/2.jpg", "3.png", "b/4.gif"]
DIVIDED = {  # the digests of train and test where a fifth of `TRAIN` becomes the test split
    write_folder: ("1e1213e949f5f315", "f2b08e552352c5c3"),
    write_table: ("1e1213e949f5f315", "f2b08e552352c5c3"),
    write_arrays: ("b19811b0db4d3664", "54596b4fed680f72"),
}


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
    changed = ARRAYS | changes
    kept = {name: array for name, array in changed.items() if array is not None}
    root.mkdir(exist_ok=True)
    np.savez(root / "some.npz", **kept)
    return f"npz:{root / 'some.npz'}"


def load(name, image_size=32):
    return sources.load(sources.find(name), image_size=image_size)


def examples(split):
    """Return (image, class) of each example, in an order that does not depend on theirs."""
    classes = [split.info.class_names[label] for label in split.labels]
    return sorted(zip((image.tobytes() for image in split.images), classes, strict=True))


def levels(split):
    """Return (level, class) of each example, sorted."""
    classes = [split.info.class_names[label] for label in split.labels]
    return sorted(zip((int(image[0, 0, 0]) for image in split.images), classes, strict=True))


# What the three sources promise -------------------------------------------------------------------


@pytest.fixture(params=DIVIDED, ids=lambda write: write.__name__)
def write(request):
    return request.param


def test_splits_are_read_as_they_are(tmp_path, write):
    name = write(tmp_path, train=TRAIN, test=TEST, validation=VALIDATION)
    data = load(name)

    assert data.name == name
    assert {*data.info.class_names} == {*synthetic.CLASSES}

    for split, written in (("train", TRAIN), ("test", TEST), ("validation", VALIDATION)):
        assert examples(getattr(data, split)) == examples(written)

    pixels = TRAIN.images.reshape(-1, 3)
    np.testing.assert_allclose([data.info.mean, data.info.std], [pixels.mean(0), pixels.std(0)])
    assert data.test.info == data.train.info


def test_a_fifth_of_each_class_is_the_test_split_in_the_order_of_earlier_runs(
    tmp_path, caplog, write
):
    caplog.set_level("INFO", "cifar_towers")
    one = load(write(tmp_path / "one", train=TRAIN))
    other = load(write(tmp_path / "other", train=TRAIN))

    assert one.digests() == other.digests()  # wherever the data lie
    assert tuple(digest[:16] for digest in one.digests().values()) == DIVIDED[write]
    assert (one.train.class_counts() == 5).all()
    assert (one.test.class_counts() == 1).all()
    assert sorted(examples(one.train) + examples(one.test)) == examples(TRAIN)
    assert lines_with(caplog.text, one.name, "no test split")


def test_test_split_alone_is_scored_and_not_trained_on(tmp_path, write):
    source = sources.find(write(tmp_path, test=TEST))
    assert examples(sources.load_split(source)) == examples(TEST)
    with pytest.raises(UsageError, match="train"):
        sources.load(source)


def test_first_examples_are_a_sample_of_all_classes(tmp_path, write):
    data = load(write(tmp_path, train=TRAIN.take(TRAIN.labels.argsort()), test=TEST))
    assert len({*data.train.labels[:15]}) > 5


def test_copies_of_training_images_in_the_test_are_counted(tmp_path, caplog, write):
    caplog.set_level("INFO", "cifar_towers")
    load(write(tmp_path, train=TRAIN, test=TRAIN.take(slice(7))))
    assert lines_with(caplog.text, "7 of 7 test images")


REFUSALS = [  # how to write the data, what to write, what the error names
    (folder, ["a/1.png", "b/c/2.png"], "b/c"),
    (folder, ["Train/cats/1.png", "Test/cats/2.png"], "Test/cats"),
    (folder, ["train/a/1.png", "test/a/1.png", "val/a/1.png"], "val "),
    (folder, ["train/1.png", "test/2.png"], "train"),
    (
        folder,
        ["train/a/1.png", "train/b/2.png", "test/A/3.png"],
        "test has classes that train lacks: A",
    ),
    (folder, ["train/a/1.png", "train/b/.2.png", "test/a/3.png"], "images of b"),
    (folder, ["a/1.png", "b/2.png", "b/3.png"], "images of a"),
    (table, ["a/1.png,cat"], "a/1.png, cat"),
    (table, ["file;label", "a/1.png;cat"], "file;label"),
    (table, ["file,label,is_valid", "a/1.png,cat,True"], "is_valid"),
    (table, ["file,label", "a/1.png,cat", "a/2.jpg"], "line 3"),
    (table, ["file,label,split", "a/1.png,cat,"], "line 2"),
    (table, ["file,label,split", "a/1.png,cat,val"], "line 2"),
    (table, ["file,label", "a/1.png,cat", "a/1.png,dog"], "line 3"),
    (
        table,
        ["file,label,split", "a/1.png,cat,train", "3.png,Cat,test"],
        "test has classes that train lacks: Cat",
    ),
    (table, ["file,label", *(f"{name},{name[0]}" for name in FILES)], "images of 3, b"),
    (table, ["file,label", 'a/1.png,"cat', "a/2.jpg,dog"], "unexpected end of data"),
    (table, ["file,label", 'a/1.png,"cat', 'a/2.jpg,dog"', "b/3.gif,dog"], "line 3"),
    (
        folder,
        ["train/a/1.png", b"train/b\xff/2.png".decode("utf-8", "surrogateescape")],
        "not UTF-8",
    ),
    (arrays, {"x_val": TEST.images}, "x_val"),
    (arrays, {"y_test": None}, "x_train, y_train, x_test;"),
    (arrays, {"x_train": TRAIN.images / 255}, "x_train is float64"),
    (arrays, {"x_train": TRAIN.images // 255}, "up to 1;"),
    (arrays, {"x_train": TRAIN.images.transpose(0, 3, 1, 2)}, "(60, 3, 32, 32)"),
    (arrays, {"x_train": TRAIN.images[1:]}, "y_train"),
    (arrays, {"y_train": np.eye(10)[TRAIN.labels]}, "y_train is float64"),
    (arrays, {"y_train": TRAIN.labels - 1}, "y_train has labels from -1 to 8"),
    (arrays, {"y_train": TRAIN.labels + 1}, "images of 0"),
    (arrays, {"y_test": TEST.labels + 1}, "y_test has labels from 1 to 10"),
    (arrays, {"class_names": list("abcdefghijk")}, "images of k"),
    (arrays, {"class_names": list("abcdefghia")}, "class_names"),
    (arrays, {"class_names": np.array([*"abcdefghij"], "S")}, "class_names is |S1"),
    (arrays, {"y_train": TRAIN.labels.astype(object)}, "Object arrays"),
]


@pytest.mark.parametrize(("write_layout", "content", "mention"), REFUSALS)
def test_other_layouts_are_refused(tmp_path, write_layout, content, mention):
    name = write_layout(tmp_path / "data", content)
    with pytest.raises(DataError) as caught:
        sources.find(name)
    told = str(caught.value)
    assert told.startswith(f"dataset={name}: ")
    assert mention in told.removeprefix(f"dataset={name}")
    assert told.isprintable()


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_path_without_data_is_refused(tmp_path, prefix):
    with pytest.raises(DataError, match=f"{prefix}{tmp_path}/none"):
        sources.find(f"{prefix}{tmp_path}/none")


@pytest.mark.parametrize(
    ("content", "mention"),
    [
        (b"no archive", "not an .npz file"),
        (b"\x93NUMPY", "not an .npz file"),  # an .npy file
        (None, "damaged"),
    ],
)
def test_a_file_that_is_no_npz_is_refused(tmp_path, content, mention):
    name = arrays(tmp_path, {})
    path = tmp_path / "some.npz"
    intact = path.read_bytes()
    middle = len(intact) // 2
    path.write_bytes(content or intact[:middle] + b"damaged!" + intact[middle + 8 :])
    with pytest.raises(DataError, match=mention):
        sources.find(name)


def test_one_class_is_refused(tmp_path):
    with pytest.raises(UsageError, match="one class"):
        load(folder(tmp_path, ["cat/1.png", "cat/2.png"]))


# Pictures -----------------------------------------------------------------------------------------


def test_hidden_and_other_files_are_left_out_and_counted(tmp_path, caplog):
    caplog.set_level("INFO", "cifar_towers")
    places = ("train/cat/1.PNG", "train/dog/2.jpeg", "test/cat/3.png", "test/dog/4.gif")
    for level, place in enumerate(places):
        put(tmp_path / place, level)
    for place in ("loose.png", "train/loose.png", "train/cat/._1.png", "test/.trash/1.png"):
        put(tmp_path / place, 99)
    (tmp_path / "test/cat/readme.txt").touch()
    data = load(f"folder:{tmp_path}", 8)

    assert levels(data.train) == [(0, "cat"), (1, "dog")]
    assert levels(data.test) == [(2, "cat"), (3, "dog")]
    assert lines_with(caplog.text, f"folder:{tmp_path}", "5 files ignored")
    assert lines_with(caplog.text, "cat 1, dog 1")


def test_files_of_a_table_are_relative_to_it(tmp_path):
    rows = [
        "a/1.png,été,train",
        'a/2.jpg," cat, big",train',
        "3.png,été,test",
        "",
        f"b/4.gif,{unicodedata.normalize('NFD', 'été')} ,validation",
    ]
    data = load(table(tmp_path, ["\ufefffile,label,split", *rows]), 8)

    assert data.info.class_names == ("cat, big", "été")
    assert levels(data.train) == [(10, "été"), (20, "cat, big")]
    assert sorted(data.train.names) == ["a/1.png", "a/2.jpg"]
    assert (levels(data.test), levels(data.validation)) == ([(30, "été")], [(40, "été")])


def test_missing_and_unreadable_files_are_named(tmp_path):
    rows = ["a/1.png,cat,train", "a/2.jpg,dog,train", "a/5.png,dog,test"]
    name = table(tmp_path, ["file,label,split", *rows])
    with pytest.raises(DataError, match="a/5.png"):
        load(name)

    (tmp_path / "labels.csv").write_bytes("file,label\na/1.png,été".encode("latin-1"))
    with pytest.raises(DataError, match="utf-8"):
        sources.find(name)

    name = folder(tmp_path / "photos", ["a/0.png", "a/1.png", "b/0.png", "b/1.png"])
    (tmp_path / "photos/b/a\n\x1b[31m.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"b/a\\n\\x1b\[31m.png") as caught:
        load(name)

    assert str(caught.value).isprintable()


# Arrays -------------------------------------------------------------------------------------------


def test_grey_arrays_without_names_get_three_channels_and_are_resized(tmp_path):
    grey = {
        name: array[..., 0] if array.ndim == 4 else array.astype(np.uint8)
        for name, array in ARRAYS.items()
    }
    data = load(arrays(tmp_path, grey), 20)
    row = int(data.train.describe(3).removeprefix("row "))

    assert data.train.labels[3] == TRAIN.labels[row]
    assert data.info.class_names == tuple("0123456789")

    expected = image_files.resize_all(np.repeat(TEST.images[..., :1], 3, axis=3), 20)
    found = {image.tobytes() for image in data.test.images}
    assert found == {image.tobytes() for image in expected}

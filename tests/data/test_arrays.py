"""Data sets of the user's own: NumPy arrays in files."""

import os
import pickle
import tracemalloc

import numpy as np
import pytest

from cifar_towers.data import image_files, sources, synthetic
from cifar_towers.errors import DataError

TRAIN, TEST = synthetic.make(30, 0, 0), synthetic.make(20, 0, 1)
ARRAYS = {"x_train": TRAIN.images, "y_train": TRAIN.labels, "x_test": TEST.images, "y_test": TEST.labels}
NOT_FINITE = np.where(TRAIN.images == TRAIN.images[0, 0, 0, 0], np.nan, TRAIN.images / 255)


def save(root, arrays):
    root.mkdir(exist_ok=True)
    for name, array in arrays.items():
        np.save(root / f"{name}.npy", array)
    return f"npy:{root}"


def load(name, image_size=32):
    return sources.load(sources.find(name), image_size=image_size)[1]


def examples(split):
    """Return (bytes of the image, name of the class) of each example, sorted."""
    images, labels = split.images, split.labels
    return sorted((i.tobytes(), split.info.class_names[n]) for i, n in zip(images, labels, strict=True))


def expected(split, names=None):
    names = names or [str(number) for number in range(10)]
    return sorted((i.tobytes(), names[n]) for i, n in zip(split.images, split.labels, strict=True))


def test_arrays_of_a_folder_or_a_file_are_the_same_data_set(tmp_path):
    data = load(save(tmp_path / "set", ARRAYS | {"other": np.array(["any", None])}))
    upper = load(save(tmp_path / "upper", {name.upper(): array for name, array in ARRAYS.items()}))
    assert upper.digests() == data.digests()
    assert data.name == f"npy:{tmp_path / 'set'}" and data.info.class_names == tuple("0123456789")
    assert examples(data.train) == expected(TRAIN) and examples(data.test) == expected(TEST)
    assert data.train.labels.dtype == np.int64
    np.testing.assert_allclose(data.info.mean, TRAIN.images.mean((0, 1, 2)))
    medmnist = {"train_images": TRAIN.images, "train_labels": TRAIN.labels[:, None].astype(np.uint8)}
    medmnist |= {"test_images": TEST.images, "test_labels": TEST.labels[:, None].astype(np.uint8)}
    medmnist |= {"val_images": TEST.images[:7], "val_labels": TEST.labels[:7, None]}
    np.savez_compressed(tmp_path / "set.npz", **medmnist)
    (tmp_path / "one").mkdir()
    (tmp_path / "set.npz").rename(tmp_path / "one/set.npz")
    for path in ("one/set.npz", "one"):
        other = load(f"npy:{tmp_path / path}")
        assert other.info == data.info and examples(other.validation) == expected(TEST.take(slice(7)))
        assert other.digests() | {"validation": ""} == data.digests() | {"validation": ""}


def test_arrays_that_are_left_out_are_named_with_the_names_that_are_read(tmp_path, caplog):
    caplog.set_level("INFO", "cifar_towers")
    others = {"x_valid": TEST.images, "y_valid": TEST.labels}
    name, file = save(tmp_path / "set", ARRAYS | others | {"x_val": TEST.images}), tmp_path / "set.npz"
    np.savez(file, **ARRAYS | others)
    for source, names in ((name, "x_val, x_valid, y_valid"), (f"npy:{file}", "x_valid, y_valid")):
        data = load(source)
        said = [message for message in caplog.messages if "left out" in message]
        assert not len(data.validation.labels) and len(said) == 1
        assert said[0].startswith(f"dataset={source}: left out: {names}; images and labels are called x_train and y_tr")
        caplog.clear()
    load(save(tmp_path / "all", ARRAYS | {"x_val": TEST.images, "y_val": TEST.labels}))
    assert "left out" not in caplog.text


def test_names_of_the_classes_are_text_labels_or_in_a_file(tmp_path):
    text = np.array(synthetic.CLASSES)
    data = load(save(tmp_path / "text", ARRAYS | {"y_train": text[TRAIN.labels], "y_test": text[TEST.labels]}))
    assert data.info.class_names == tuple(sorted(synthetic.CLASSES))
    assert examples(data.test) == expected(TEST, synthetic.CLASSES)
    name = save(tmp_path / "file", ARRAYS)
    (tmp_path / "file/classes.txt").write_text("\n".join(synthetic.CLASSES) + "\n")
    data = load(name)
    assert data.info.class_names == tuple(synthetic.CLASSES)
    np.testing.assert_array_equal(np.sort(data.train.labels), np.sort(TRAIN.labels))
    assert examples(data.train) == expected(TRAIN, synthetic.CLASSES)


def test_fifth_of_each_class_is_the_test_split_by_hashes_of_the_images(tmp_path):
    images = np.concatenate([TRAIN.images, TEST.images])
    labels = np.concatenate([TRAIN.labels, TEST.labels])  # five images of each class
    data = load(save(tmp_path / "one", {"images": images, "labels": labels}))
    assert data.train.class_counts().tolist() == [4] * 10 and data.test.class_counts().tolist() == [1] * 10
    assert sorted(examples(data.train) + examples(data.test)) == sorted(expected(TRAIN) + expected(TEST))
    order = np.random.default_rng(0).permutation(len(labels))
    shuffled = load(save(tmp_path / "other", {"images": images[order], "labels": labels[order]}))
    assert shuffled.digests() == data.digests()


@pytest.mark.parametrize("shape", [(28, 28), (28, 28, 1), (40, 28)])
def test_grey_images_get_three_channels_and_their_square_is_resized(tmp_path, shape):
    grey = np.random.default_rng(0).integers(0, 256, (30, *shape), np.uint8)
    data = load(save(tmp_path, {"images": grey, "labels": np.arange(30) % 3}), image_size=20)
    square = grey.reshape(30, *shape[:2])[:, (shape[0] - 28) // 2 :][:, :28, :, None]
    resized = image_files.resize_all(np.repeat(square, 3, axis=3), 20)
    assert {image.tobytes() for image in resized} == {i.tobytes() for s in (data.train, data.test) for i in s.images}


def test_large_images_are_made_small_one_by_one(tmp_path):
    """40 images of 256 pixels have 7.9 MB, and 0.1 MB when resized."""
    images = np.random.default_rng(0).integers(0, 256, (40, 256, 256, 3), np.uint8)
    source = sources.find(save(tmp_path, {"images": images, "labels": np.arange(40) % 2}))
    tracemalloc.start()
    try:
        data = sources.load(source, image_size=32)[1]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(data.train.labels) == 32 and peak < 2e6


@pytest.mark.parametrize("suffix", ["npy", "npz"])
def test_labels_saved_as_objects_are_refused_with_what_saves_them_as_text(tmp_path, suffix):
    labels = np.array(synthetic.CLASSES, object)[TRAIN.labels]  # as pandas has them
    name, arrays = save(tmp_path, ARRAYS | {"y_train": labels}), ARRAYS | {"y_train": labels}
    if suffix == "npz":
        np.savez(tmp_path / "set.npz", **arrays)
        name = f"npy:{tmp_path / 'set.npz'}"
    with pytest.raises(DataError, match=r"cannot be read \(.*\); save it again, text by .astype\('str'\) and images"):
        sources.find(name)


def test_test_arrays_alone_are_scored(tmp_path):
    name = save(tmp_path, {"x_test": TEST.images[:4], "y_test": np.array(["cat", "dog", "cat", "cat"])})
    split = sources.load_split(sources.find(name))
    assert split.info.class_names == ("cat", "dog") and sorted(split.labels) == [0, 0, 0, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"x_train": TRAIN.images / 255},
            r"x_train is float64, .* save \(255 \* x_train\).round\(\).astype\('uint8'\)",
        ),
        ({"x_train": TRAIN.images.astype("f4")}, r"x_train is float32, .* save x_train.round\(\).astype\('uint8'\)"),
        ({"x_train": TRAIN.images / 128 - 1}, "x_train is float64, .*; scale its -.* to 0 to 255 first"),
        ({"x_train": TRAIN.images.astype("u2") * 257}, "x_train is uint16, .*; scale its .* to 0 to 255 first"),
        ({"x_train": np.array(["1.png"] * 30)}, r"x_train has the shape \(30,\), and must have \(n, size, size, 3\)"),
        ({"y_train": TRAIN.labels.astype("S")}, r"y_train is \|S21, .* save y_train.astype\('str'\)"),
        ({"y_train": TRAIN.labels.astype("f4")}, r"y_train is float32, .* save y_train.astype\('int64'\)"),
        ({"x_train": TRAIN.images.astype(int)}, r"x_train is int64, .* save x_train.astype\('uint8'\)"),
        (
            {"x_test": TEST.images.transpose(0, 3, 1, 2)},
            r"x_test .*\(20, 3, 32, 32\), .*; save x_test.transpose\(0, 2, 3, 1\)",
        ),
        (
            {"x_test": TEST.images[..., :2]},
            r"x_test has the shape \(20, 32, 32, 2\), and must have \(n, size, size, 3\)",
        ),
        ({"y_train": TRAIN.labels[1:]}, r"y_train has the shape \(29,\), and must have \(30,\)"),
        ({"y_train": np.eye(10)[TRAIN.labels]}, r"y_train has the shape \(30, 10\), .*; save y_train.argmax\(1\)"),
        ({"y_train": TRAIN.labels.astype(float)}, r"y_train is float64, .* save y_train.astype\('int64'\)"),
        ({"y_test": TEST.labels + 1}, "10 in test is no class"),
        ({"x_train": NOT_FINITE}, r"is float64, .* finite first, as by np.nan_to_num\(x_train, posinf=0, neginf=0\)"),
        ({"y_train": np.where(TRAIN.labels == 3, " ", "cat")}, "3 of 30 in y_train are empty; leave out images"),
        (
            {"y_train": TRAIN.labels - 1},
            "y_train has the label -1; number the classes from 0, and leave out images without a class",
        ),
        ({"y_train": TRAIN.labels * 0}, "at least two classes are needed, and there is 0"),
        (
            dict.fromkeys(ARRAYS) | {"images": TEST.images[:3], "labels": np.array([0, 1, 1])},
            "no images of 0 to train on",
        ),
        ({"x_test": TEST.images[:0]}, "x_test is empty"),
        (
            {"x_train": None, "y_train": None, "images": TRAIN.images, "labels": TRAIN.labels},
            "some examples are of test, and others have no split; give all a split, or none",
        ),
        (
            {"test_images": TEST.images, "test_labels": TEST.labels},
            "its images are x_train, x_test, test_images; keep one array of a split",
        ),
        (
            {"x_train": None, "x_test": None},
            "its arrays are y_test, y_train; call images and labels x_train and y_train or",
        ),
    ],
)
def test_unusable_arrays_are_an_error_of_one_line(tmp_path, change, message):
    name = save(tmp_path, {key: array for key, array in (ARRAYS | change).items() if array is not None})
    with pytest.raises(DataError, match=message) as caught:
        sources.find(name)
    assert str(caught.value).startswith(f"dataset={name}") and "\n" not in str(caught.value)


def test_one_array_or_a_missing_path_is_answered_with_what_to_give(tmp_path):
    name = save(tmp_path / "set", ARRAYS | {"fog": TEST.images})
    for file in ("x_test", "fog"):
        with pytest.raises(DataError, match=f"it is one array; give the folder of .*, as --dataset={name}$"):
            sources.find(f"{name}/{file}.npy")
    for missing in ("moved", "moved.npz", "moved/x_test.npy"):
        with pytest.raises(DataError, match=f"{missing} cannot be read: No such file .* was moved, give its place by"):
            sources.find(f"npy:{tmp_path}/{missing}")


def test_validation_arrays_without_a_test_are_the_test_split_and_the_log_says_so(tmp_path, caplog):
    caplog.set_level("INFO", "cifar_towers")
    names = {"x_val": "x_test", "y_val": "y_test", "x_train": "x_train", "y_train": "y_train"}
    data = load(save(tmp_path, {name: ARRAYS[of] for name, of in names.items()}))
    assert examples(data.test) == expected(TEST) and not len(data.validation.labels)
    assert "there are no test examples: validation is used as the test split" in caplog.messages


def test_names_of_the_classes_must_fit_the_labels(tmp_path):
    name = save(tmp_path, ARRAYS)
    for names, message in (
        ("abcdefghi", "9 in train is no class"),
        ("abcdefghijk", "no images of k"),
        ("ababababab", "a, b is the name of several classes; give each class a name of its own"),
    ):
        (tmp_path / "classes.txt").write_text("\n".join(names))
        with pytest.raises(DataError, match=message):
            sources.find(name)
    name = save(tmp_path, ARRAYS | {"y_train": TRAIN.labels + 1, "y_test": TEST.labels + 1})
    (tmp_path / "classes.txt").write_text("\n".join("abcdefghij"))
    with pytest.raises(
        DataError, match="labels are 1 to 10, and the first line of classes.txt names class 0; save lab"
    ):
        sources.find(name)


def test_images_that_are_nearly_black_are_said_to_be(tmp_path, caplog):
    caplog.set_level("INFO", "cifar_towers")
    for brightest, said in ((31, True), (32, False)):
        images = np.minimum(TRAIN.images // 4, brightest)
        caplog.clear()
        load(save(tmp_path, {"images": images, "labels": TRAIN.labels % 2}))
        assert (f"the brightest pixel of 24 images is {brightest} of 255" in caplog.text) == said


def test_array_that_two_files_have_is_refused(tmp_path):
    name = save(tmp_path, ARRAYS)
    for other in ("mnist", "mnist_64"):
        np.savez(tmp_path / f"{other}.npz", x_val=TEST.images, y_val=TEST.labels)
    with pytest.raises(DataError, match="x_val is in mnist_64.npz and in another file; give one file, as npy:.*/mnist"):
        sources.find(name)


class Canary:
    def __reduce__(self):
        return os.mkdir, ("executed",)


@pytest.mark.parametrize("damage", ["pickle", "objects", "truncated", "missing", "no zip"])
def test_damaged_or_pickled_files_are_named_and_nothing_is_executed(tmp_path, monkeypatch, damage):
    monkeypatch.chdir(tmp_path)
    name = save(tmp_path / "set", ARRAYS)
    path = tmp_path / "set/x_train.npy"
    if damage == "pickle":
        path.write_bytes(pickle.dumps(Canary()))
    elif damage == "objects":
        np.save(path, np.array([Canary()]), allow_pickle=True)
    elif damage == "truncated":
        path.write_bytes(path.read_bytes()[:-1])
    elif damage == "missing":
        name = f"npy:{tmp_path / 'nothing.npz'}"
    else:
        (tmp_path / "set.npz").write_bytes(b"PK\3\4 no zip")
        name = f"npy:{tmp_path / 'set.npz'}"
    file = {"missing": tmp_path / "nothing.npz", "no zip": "set.npz"}.get(damage, "x_train.npy")
    with pytest.raises(DataError, match=f"^dataset={name}: {file} cannot be read") as caught:
        sources.find(name)
    assert "\n" not in str(caught.value) and not (tmp_path / "executed").exists()

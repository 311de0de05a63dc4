"""Data sets of the user's own: files of NumPy arrays."""

import numpy as np
import pytest

from cifar_towers.data import image_files, sources, synthetic
from cifar_towers.errors import DataError, UsageError
from tests.own_data import write_arrays

TRAIN, TEST, VALIDATION = synthetic.make(40, 0, 0), synthetic.make(20, 0, 1), synthetic.make(10, 0, 2)
ARRAYS = {"x_train": TRAIN.images, "y_train": TRAIN.labels, "x_test": TEST.images, "y_test": TEST.labels}


def save(tmp_path, arrays):
    np.savez(tmp_path / "some.npz", **arrays)
    return f"npz:{tmp_path / 'some.npz'}"


def load(name, image_size=32):
    return sources.load(sources.find(name), image_size=image_size)[1]


def examples(split):
    """Return the examples in an order that does not depend on theirs."""
    return sorted(zip((image.tobytes() for image in split.images), split.labels.tolist(), strict=True))


def test_arrays_are_read_as_they_are(tmp_path):
    data = load(write_arrays(tmp_path, train=TRAIN, test=TEST, validation=VALIDATION))
    assert data.info.class_names == synthetic.CLASSES
    for name, split in (("train", TRAIN), ("test", TEST), ("validation", VALIDATION)):
        assert examples(getattr(data, name)) == examples(split)
    np.testing.assert_allclose(data.info.mean, TRAIN.images.mean((0, 1, 2)))
    assert load(save(tmp_path, ARRAYS)).info.class_names == tuple("0123456789")


def test_first_images_are_a_sample_of_all_classes(tmp_path):
    order = TRAIN.labels.argsort()
    data = load(save(tmp_path, ARRAYS | {"x_train": TRAIN.images[order], "y_train": TRAIN.labels[order]}))
    assert len({*data.train.labels[:15]}) > 5


def test_fifth_of_each_class_is_the_test_split_if_there_is_none(tmp_path, caplog):
    caplog.set_level("INFO", "cifar_towers")
    data = load(write_arrays(tmp_path, train=synthetic.make(100, 0, 0)))
    assert (data.test.class_counts() == 2).all() and (data.train.class_counts() == 8).all()
    assert sources.count_copies(data.test, data.train) == 0
    assert "there is no test split, so a fifth of each class is the test split" in caplog.text


def test_grey_images_get_three_channels_and_are_resized(tmp_path):
    grey = {name: array[..., 0] if array.ndim == 4 else array.astype(np.uint8) for name, array in ARRAYS.items()}
    data = load(save(tmp_path, grey), 20)
    expected = image_files.resize_all(np.repeat(TEST.images[..., :1], 3, axis=3), 20)
    assert {image.tobytes() for image in data.test.images} == {image.tobytes() for image in expected}


def test_test_arrays_alone_are_scored_and_not_trained_on(tmp_path):
    source = sources.find(write_arrays(tmp_path, test=TEST))
    assert examples(sources.load_split(source)) == examples(TEST)
    with pytest.raises(UsageError, match="has no train examples"):
        sources.load(source)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x_val": TEST.images}, "its arrays are .*x_val; the arrays must be x_train, y_train"),
        ({"y_test": None}, "its arrays are x_train, y_train, x_test; the arrays must be"),
        (dict.fromkeys(ARRAYS), "its arrays are .*; the arrays must be"),
        ({"x_train": TRAIN.images / 255}, "x_train is float64 .*; images must be uint8"),
        ({"x_train": TRAIN.images // 255}, "x_train is uint8 .* up to 1; images must be .* from 0 to 255"),
        ({"x_train": TRAIN.images.reshape(40, 3, 1024)}, r"x_train is uint8 \(40, 3, 1024\)"),
        ({"x_train": TRAIN.images.reshape(40, 1024, 3)}, r"x_train is uint8 \(40, 1024, 3\)"),
        ({"x_train": TRAIN.images.transpose(0, 3, 1, 2)}, r"x_train is uint8 \(40, 3, 32, 32\)"),
        ({"x_train": TRAIN.images[:, :16]}, r"x_train is uint8 \(40, 16, 32, 3\)"),
        ({"x_train": TRAIN.images[1:]}, r"y_train is int64 \(40,\); labels must be"),
        ({"y_train": TRAIN.labels[:, None]}, r"y_train is int64 \(40, 1\); labels must be"),
        ({"y_train": np.eye(10)[TRAIN.labels]}, r"y_train is float64 \(40, 10\); labels must be"),
        ({"y_train": TRAIN.labels.astype(str)}, r"y_train is <U21 \(40,\); labels must be"),
        ({"y_train": TRAIN.labels - 1}, "y_train is -1 to 8, of 9 classes; labels must be"),
        ({"y_train": TRAIN.labels + 1}, "there are no images of 0 to train on"),
        ({"y_test": TEST.labels + 1}, "y_test is 1 to 10, of 10 classes"),
        ({"class_names": list("abc")}, "y_train is 0 to 9, of 3 classes"),
        ({"class_names": list("abcdefghijk")}, "there are no images of k to train on"),
        ({"class_names": list("abcdefghia")}, "class_names has a name twice"),
        ({"x_test": TEST.images[:0], "y_test": TEST.labels[:0]}, "zero-size array"),
        ({"y_train": TRAIN.labels.astype(object)}, "Object arrays cannot be loaded"),
    ],
)
def test_unusable_arrays_are_an_error_of_one_line(tmp_path, change, message):
    arrays = {name: array for name, array in (ARRAYS | change).items() if array is not None}
    with pytest.raises(DataError, match=message) as caught:
        sources.find(save(tmp_path, arrays))
    assert "\n" not in str(caught.value)

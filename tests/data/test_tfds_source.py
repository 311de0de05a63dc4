"""Data sets of TensorFlow Datasets."""

import numpy as np
import pytest
import tensorflow as tf

from cifar_towers.data import sources, synthetic, tfds_source
from cifar_towers.data.dataset import CLASSES
from cifar_towers.errors import DataError, UsageError
from tests.helpers.messages import lines_with

IMAGES = synthetic.make(60, 0, 0).images[:, :20]


def prepare(root, names="xyz", images=IMAGES, **labels):
    """Prepare a TFDS data set `shapes` with a split for each of `labels`; return the directory of
    its metadata.
    """
    import tensorflow_datasets as tfds

    image = tfds.features.Image(shape=(None, None, images.shape[3]), dtype=images.dtype)
    kinds = {"picture": image, "kind": tfds.features.ClassLabel(names=names)}
    columns = {split: {"picture": images[: len(of)], "kind": of} for split, of in labels.items()}
    tfds.dataset_builders.store_as_tfds_dataset(
        "shapes",
        "1.0.0",
        features=tfds.features.FeaturesDict(kinds),
        split_datasets={
            split: tf.data.Dataset.from_tensor_slices(column) for split, column in columns.items()
        },
        data_dir=root,
    )
    return root / "shapes" / "1.0.0"


@pytest.mark.parametrize(
    ("labels", "sizes", "test_split"),
    [
        ({"train": np.arange(30) // 10}, (24, 6), ""),
        ({"train": np.arange(9) % 3, "validation": [2, 1]}, (9, 2), "validation"),
        ({"train": np.arange(9) % 3, "validation": [2, 1], "test": [0, 1, 2]}, (9, 3), ""),
    ],
    ids=["without a test", "validation", "with a test"],
)
def test_local_tfds_data_set_is_read(caplog, tmp_path, labels, sizes, test_split):
    caplog.set_level("INFO")
    prepare(tmp_path, **labels)
    data = sources.load(sources.find("shapes", str(tmp_path)))

    assert data.info.class_names == ("x", "y", "z")
    assert data.info.image_size == 32
    assert (len(data.train.labels), len(data.test.labels)) == sizes

    if "test" not in labels and not test_split:  # stored by class, and a fifth of each is the test
        assert data.test.class_counts().tolist() == [2, 2, 2]
        assert sources.load_split(sources.find("shapes", str(tmp_path))).digest == data.test.digest
    used = [labels["train"], labels.get(test_split or "test", [])]

    assert sorted(np.concatenate([data.train.labels, data.test.labels])) == sorted(
        np.concatenate(used)
    )
    assert bool(lines_with(caplog.text, f"dataset=shapes: its {test_split}")) == bool(test_split)


@pytest.mark.parametrize("split", ["test", "validation"])
def test_tfds_data_set_with_a_test_split_alone_is_scored_and_not_trained_on(tmp_path, split):
    prepare(tmp_path, **{split: [2, 0, 1, 1]})
    source = sources.find("shapes", str(tmp_path))
    test = sources.load_split(source)
    assert test.info.class_names == ("x", "y", "z")
    assert sorted(test.labels) == [0, 1, 1, 2]
    with pytest.raises(UsageError, match="dataset=shapes .*train"):
        sources.load(source)


def test_a_set_of_corrupted_images_has_the_classes_of_cifar10(tmp_path, monkeypatch):
    """TFDS numbers its classes and does not name them. The images come in two batches."""
    import tensorflow_datasets as tfds

    monkeypatch.setattr(tfds_source, "BATCH_SIZE", 3)
    labels = [3, 9, 0, 3]
    columns = {"image": synthetic.make(10, 0, 1).images[:4], "label": labels}
    kinds = {
        "image": tfds.features.Image(shape=(32, 32, 3)),
        "label": tfds.features.ClassLabel(num_classes=10),
    }
    tfds.dataset_builders.store_as_tfds_dataset(
        "cifar10_corrupted",
        "1.0.0",
        config="fog_3",
        features=tfds.features.FeaturesDict(kinds),
        split_datasets={"test": tf.data.Dataset.from_tensor_slices(columns)},
        data_dir=tmp_path,
    )
    test = sources.load_split(sources.find("cifar10_corrupted/fog_3", str(tmp_path)))

    assert test.info.class_names == CLASSES
    assert sorted(test.labels) == sorted(labels)


@pytest.mark.parametrize("channels", [1, 4])
def test_grey_and_transparent_images_get_three_channels(tmp_path, channels):
    prepare(tmp_path, images=np.full((9, 20, 20, channels), 99, np.uint8), train=[0, 1, 2] * 3)
    data = sources.load(sources.find("shapes", str(tmp_path)))
    assert data.train.images.shape[1:] == (32, 32, 3)
    assert np.unique(data.train.images).tolist() == [99 if channels == 1 else 194]  # on white


@pytest.mark.parametrize(
    ("names", "images", "labels", "error", "message"),
    [
        (
            "xyz",
            IMAGES,
            {"train": [0, 1, 2], "test": [0, -1]},
            DataError,
            "test has examples without a label",
        ),
        ("xyz", IMAGES.astype(np.uint16), {"train": [0, 1, 2] * 5}, DataError, "dataset=shapes"),
        ("x", IMAGES, {"train": [0] * 9}, UsageError, "dataset=shapes .*one class"),
        ("xyz", IMAGES, {"extra": [0, 1]}, UsageError, "dataset=shapes .*train or test"),
    ],
)
def test_unusable_tfds_data_set_is_refused(tmp_path, names, images, labels, error, message):
    prepare(tmp_path, names, images, **labels)
    with pytest.raises(error, match=message):
        sources.load(sources.find("shapes", str(tmp_path)))


def test_unknown_names_and_damaged_copies_are_tfdss_error_in_one_line(tmp_path):
    with pytest.raises(DataError, match=r"^dataset=cifar1O .*$"):
        sources.find("cifar1O", str(tmp_path))
    with pytest.raises(DataError, match="ag_news_subset .*label"):
        sources.load(sources.find("ag_news_subset", str(tmp_path)))
    (prepare(tmp_path, train=[0, 1, 2] * 5) / "dataset_info.json").write_text("{")
    with pytest.raises(DataError, match=r"^dataset=shapes .*$"):
        sources.load(sources.find("shapes", str(tmp_path)))

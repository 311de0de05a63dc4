"""Data sets of TensorFlow Datasets."""

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import tensorflow as tf

from cifar_towers.data import sources, synthetic, tfds_source
from cifar_towers.errors import DataError, UsageError

ROOT = Path(__file__).parents[2]
IMAGES = synthetic.make(60, 0, 0).images[:, :20]


def test_missing_tfds_data_is_an_error_of_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(tfds_source, "reachable", lambda url: False)
    with pytest.raises(DataError, match=r"no cifar100 in .* and .*toronto.edu does not answer; put a prepared copy"):
        sources.load(sources.find("cifar100", str(tmp_path)))


def test_unknown_name_is_answered_with_a_similar_one_and_without_tensorflow(tmp_path):
    (tmp_path / "photos").mkdir()
    similar = {"mnits": "mnist", "mnits/plain:3.0.1": "mnist", "sintetic": "synthetic", "photos": "folder:photos"}
    code = f"import sys; from cifar_towers.data import sources\nfor name in {[*similar]}:\n"
    code += "    try: sources.find(name)\n"
    code += "    except Exception as error: print(type(error).__name__, error, 'tensorflow' in sys.modules)"
    run = {"capture_output": True, "text": True, "cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(ROOT)}}
    answers = subprocess.run([sys.executable, "-c", code], **run).stdout.splitlines()
    for answer, (name, meant) in zip(answers, similar.items(), strict=True):
        assert answer.startswith(f"UsageError dataset={name}: did you mean {meant}? neither TensorFlow Datasets nor ")
        assert answer.endswith("False")


@pytest.mark.parametrize(("name", "hint"), [("zzqq", ""), ("cifar1O", "did you mean cifar10. ")])
def test_unknown_name_is_answered_with_the_built_in_ones(tmp_path, name, hint):
    with pytest.raises(
        UsageError, match=f"dataset={name}: {hint}neither .* has it; built in are cifar10, .*, folder:<"
    ):
        sources.find(name, str(tmp_path))


def test_builder_without_urls_may_download(tmp_path):
    class Builder:
        url_infos = None

    tfds_source._check_reachable("shapes", tmp_path, Builder)


def prepare(root, names="xyz", **labels):
    """Prepare a TFDS data set `shapes` with a split for each of `labels`; return the directory of its metadata."""
    import tensorflow_datasets as tfds

    kinds = {"picture": tfds.features.Image(shape=(None, None, 3)), "kind": tfds.features.ClassLabel(names=names)}
    columns = {split: {"picture": IMAGES[: len(of)], "kind": of} for split, of in labels.items()}
    tfds.dataset_builders.store_as_tfds_dataset(
        "shapes",
        "1.0.0",
        features=tfds.features.FeaturesDict(kinds),
        split_datasets={split: tf.data.Dataset.from_tensor_slices(column) for split, column in columns.items()},
        data_dir=root,
    )
    return root / "shapes" / "1.0.0"


@pytest.mark.parametrize(
    ("labels", "sizes", "test_split"),
    [
        ({"train": np.arange(30) % 3}, (24, 6), "train[80%:]"),
        ({"train": np.arange(9) % 3, "test": [-1, -1, -1], "validation": [2, 1]}, (9, 2), "validation"),
        ({"train": np.arange(9) % 3, "test": [0, 1, 2]}, (9, 3), ""),
    ],
    ids=["without a test", "validation replaces an unlabeled test", "with a test"],
)
def test_local_tfds_data_set_is_read(caplog, tmp_path, labels, sizes, test_split):
    caplog.set_level("INFO")
    prepare(tmp_path, **labels)
    _, data = sources.load(sources.find("shapes", str(tmp_path)))
    assert data.info.class_names == ("x", "y", "z") and data.info.image_size == 32
    assert (len(data.train.labels), len(data.test.labels)) == sizes
    both = np.concatenate([data.train.labels, data.test.labels])
    assert sorted(both) == sorted(label for split in labels.values() for label in split if label >= 0)
    assert test_split != "validation" or sorted(data.test.labels) == [1, 2]
    said = [message for message in caplog.messages if "is used as the test split" in message]
    assert said == [f"dataset=shapes: its {test_split} is used as the test split"] * bool(test_split)


def test_validation_split_beside_a_test_split_is_not_used_and_the_log_says_so(caplog, tmp_path):
    caplog.set_level("INFO")
    prepare(tmp_path, train=np.arange(9) % 3, validation=[0, 1], test=[2, 1, 0])
    source = sources.find("shapes", str(tmp_path))
    _, data = sources.load(source)
    assert len(data.test.labels) == 3 and not len(data.validation.labels)
    assert "dataset=shapes: its validation is not used; validation_examples holds out some of train" in caplog.messages
    caplog.clear()
    sources.load_split(source)
    assert "not used" not in caplog.text


@pytest.mark.parametrize("split", ["test", "validation"])
def test_tfds_data_set_with_a_test_split_alone(tmp_path, split):
    prepare(tmp_path, **{split: [2, 0, 1, 1]})
    source = sources.find("shapes", str(tmp_path))
    test = sources.load_split(source)
    assert test.info.class_names == ("x", "y", "z") and sorted(test.labels) == [0, 1, 1, 2]
    with pytest.raises(UsageError, match="dataset=shapes has no train examples"):
        sources.load(source)


UNLABELED = r"has images without a class \(label -1\)"


@pytest.mark.parametrize(
    ("names", "labels", "message"),
    [
        ("xyz", {"train": [0, 1, 2], "test": [0, -1]}, f"its split test {UNLABELED}"),
        ("xyz", {"train": [0, -1], "test": [-1, -1]}, f"its split test {UNLABELED}"),
        ("xyz", {"train": [0, 1], "test": [-1, -1], "validation": [0, -1]}, f"its split validation {UNLABELED}"),
        ("x", {"train": [0, 0, 0]}, "dataset=shapes has one class; at least two are needed"),
        ("xyz", {"extra": [0, 1]}, "dataset=shapes has no split train, test or validation; its splits are extra"),
    ],
)
def test_unusable_tfds_data_set_is_an_error_of_one_line(tmp_path, names, labels, message):
    prepare(tmp_path, names, **labels)
    with pytest.raises(UsageError, match=message):
        sources.load(sources.find("shapes", str(tmp_path)))


@pytest.mark.parametrize(("dtype", "channels"), [("uint8", 1), ("uint8", 3), ("uint8", 4), ("uint16", 1)])
def test_levels_of_8_bits_and_grey_ones_of_16_are_read(monkeypatch, dtype, channels):
    levels = np.full((20, 20, channels), np.iinfo(dtype).max, dtype)
    monkeypatch.setattr(tfds_source, "in_stored_order", lambda *_: [{"picture": levels, "kind": 0}])
    assert (tfds_source._read(Mock(), "test", "picture", "kind", 20).images == 255).all()


@pytest.mark.parametrize(("dtype", "channels"), [("float32", 1), ("float32", 3), ("uint16", 3)])
def test_images_of_other_types_are_refused(monkeypatch, dtype, channels):
    example = {"picture": np.ones((20, 20, channels), dtype), "kind": 0}
    monkeypatch.setattr(tfds_source, "in_stored_order", lambda *_: [example])
    with pytest.raises(UsageError, match=f"its images are {dtype}, and must be uint8, or uint16 if they are grey"):
        tfds_source._read(Mock(), "test", "picture", "kind", 20)


def test_damaged_tfds_metadata_is_an_error_of_one_line(tmp_path):
    place = prepare(tmp_path, train=[0, 1, 2] * 5)
    contents = {"dataset_info.json": (b"", b"{}", b"\xff", b'{"name": 5}'), "features.json": (b"{", None)}
    for path, content in [(place / name, content) for name, damaged in contents.items() for content in damaged]:
        original = path.read_bytes()
        path.unlink()
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(DataError, match=r"cannot be read from .*/shapes \(.*delete it, and it is") as caught:
            sources.load(sources.find("shapes", str(tmp_path)))
        assert "\n" not in str(caught.value)
        path.write_bytes(original)
    sources.load(sources.find("shapes", str(tmp_path)))

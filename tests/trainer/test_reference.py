"""The records of a run and what callbacks get: the tables of docs/reference.md, and examples/."""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from PIL import Image

from cifar_towers.callbacks import Callbacks
from cifar_towers.data import sources, synthetic
from cifar_towers.runs.run import load_run
from tests.helpers.short_runs import records_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/reference.md").read_text()


def documented_keys(title):
    """Return {key: name in a callback} of a table; an empty name if callbacks do not get it."""
    lines = PAGE.split(f"## {title}\n")[1].split("\n## ")[0].splitlines()
    names = {}
    for line in lines:
        if line.startswith("| `"):
            cells = [cell.strip(" `") for cell in line.split("|")]
            key, name = cells[1:3]
            names[key] = name
    return names


def import_example(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / f"examples/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_of_records_have_every_key_and_no_other(tiny_run):
    directory, _, recorder = tiny_run
    for kind, title in (("train", "Training records"), ("eval", "Evaluation records")):
        keys = set()
        for record in records_of(directory, kind):
            of_towers = record.pop("towers", {})
            keys |= record.keys() | {f"towers.{name}" for name in of_towers}
        assert keys == documented_keys(title).keys()

    last = {name: told for name, _, told in recorder.calls[1:]}
    of_steps = {name for name in documented_keys("Training records").values() if name}
    of_scores = {name for name in documented_keys("Evaluation records").values() if name}

    of_steps |= {name.replace("tower_0", "tower_1") for name in of_steps}
    assert last["step"].keys() == of_steps
    assert last["evaluation"].keys() == of_scores


@pytest.mark.parametrize(("library", "log"), [("wandb", "init().log"), ("mlflow", "log_metrics")])
def test_a_tracker_gets_every_record(tiny_run, monkeypatch, library, log):
    tracker = MagicMock()
    monkeypatch.setitem(sys.modules, library, tracker)
    steps = records_of(tiny_run.directory, "train")
    scores = records_of(tiny_run.directory, "eval")
    example = import_example(f"track_with_{library}").Tracker()
    callbacks = Callbacks([example], load_run(tiny_run.directory))
    with callbacks.until_end():
        callbacks.start()
        for record in steps:
            callbacks.step(record["step"], record)
        for record in scores:
            callbacks.evaluation(record["step"], record)
    logged = [call.args for call in tracker.mock_calls if call[0] == log]
    of_steps = logged[: len(steps)]
    of_scores = logged[len(steps) :]

    for (metrics, step), record in zip(of_steps, steps, strict=True):
        assert (metrics["loss"], step) == (record["loss"], record["step"])

    names = set()
    for (metrics, step), record in zip(of_scores, scores, strict=True):
        assert list(metrics.values()) == [record["accuracy"], record["loss"], record["ece"]]
        assert step == record["step"]
        names |= metrics.keys()
    # three, without and with TTA
    assert len(names) == 6
    assert tracker.mock_calls[-1][0] in ("init().finish", "end_run")


def test_a_hugging_face_data_set_becomes_arrays(tmp_path, monkeypatch):
    """With a stand-in for the library that reads as the library does: columns by name, class names
    in `features`.
    """
    splits = {"train": synthetic.make(20, 0, 0), "test": synthetic.make(10, 0, 1)}

    class Rows(dict):
        features = {"fine_label": SimpleNamespace(names=list(synthetic.CLASSES))}

    def load_dataset(name, split):
        images = list(map(Image.fromarray, splits[split].images))
        return Rows(img=images, fine_label=splits[split].labels.tolist())

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    import_example("from_hugging_face").save(
        "some/name", "img", "fine_label", tmp_path / "arrays.npz"
    )
    dataset = sources.load(sources.find(f"npz:{tmp_path / 'arrays.npz'}"))

    assert dataset.train.info.class_names == synthetic.CLASSES

    for name, split in splits.items():
        assert sorted_examples(getattr(dataset, name)) == sorted_examples(split)


def sorted_examples(split):
    return sorted(zip([image.tobytes() for image in split.images], split.labels, strict=True))

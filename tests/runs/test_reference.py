"""The records of a run and what callbacks get: the tables of docs/reference.md, and examples/."""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
from PIL import Image

from cifar_towers.data import sources, synthetic
from tests.runs.short_runs import TINY, records_of, run

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/reference.md").read_text()


def documented_keys(title):
    """Return {key: name in a callback} of a table; an empty name if callbacks do not get it."""
    lines = PAGE.split(f"## {title}\n")[1].split("\n## ")[0].splitlines()
    rows = [[cell.strip(" `") for cell in line.split("|")] for line in lines if line.startswith("| `")]
    return {key: name for _, key, name, *_ in rows}


def import_example(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / f"examples/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_of_records_have_every_key_and_no_other(tmp_path):
    steps, evaluations = {}, []
    recorder = SimpleNamespace(
        on_step=lambda step, metrics: steps.update({step: metrics}),
        on_evaluation=lambda step, evaluation: evaluations.append(evaluation),
    )
    run(TINY, tmp_path, num_gpus=2, callbacks=[recorder])
    for kind, title in (("train", "Training records"), ("eval", "Evaluation records")):
        keys = set()
        for record in records_of(tmp_path, kind):
            keys |= record.keys() - {"towers"} | {f"towers.{name}" for name in record.get("towers", {})}
        assert keys == documented_keys(title).keys()
    names = {name for name in documented_keys("Training records").values() if name}
    last = records_of(tmp_path, "train")[-1]
    assert steps[last["step"]].keys() == names | {name.replace("tower_0", "tower_1") for name in names}
    assert steps[last["step"]]["tower_1/cosine"] == last["towers"]["cosine"][1]
    assert evaluations[-1].keys() == {name for name in documented_keys("Evaluation records").values() if name}


@pytest.mark.parametrize(("library", "log"), [("wandb", "init().log"), ("mlflow", "log_metrics")])
def test_a_tracker_gets_every_record(tmp_path, monkeypatch, library, log):
    tracker = MagicMock()
    monkeypatch.setitem(sys.modules, library, tracker)
    run(TINY, tmp_path, max_steps=2, callbacks=[import_example(f"track_with_{library}").Tracker()])
    logged = {name: call.args for call in tracker.mock_calls for name in call.args[0] if call[0] == log}
    last, score = records_of(tmp_path, "train")[-1], records_of(tmp_path, "eval")[-1]
    assert logged["loss"][0]["loss"] == last["loss"] and logged["loss"][1] == last["step"] == 2
    (name,) = (name for name in logged if "ema" in name and "accuracy" in name)
    assert logged[name][0][name] == score["accuracy"]
    assert tracker.mock_calls[-1][0] in ("init().finish", "end_run")


def test_a_hugging_face_data_set_becomes_arrays(tmp_path, monkeypatch):
    """With a stand-in for the library that reads as the library does: columns by name, class names in `features`."""
    splits = dict(zip(("train", "test"), (synthetic.make(20, 0, 0), synthetic.make(10, 0, 1)), strict=True))

    class Rows(dict):
        features = {"fine_label": SimpleNamespace(names=list(synthetic.CLASSES))}

    def load_dataset(name, split):
        images = list(map(Image.fromarray, splits[split].images))
        return Rows(img=images, fine_label=splits[split].labels.tolist())

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    import_example("from_hugging_face").save("some/name", "img", "fine_label", tmp_path / "arrays.npz")
    dataset = sources.load(sources.find(f"npz:{tmp_path / 'arrays.npz'}"))
    assert dataset.train.info.class_names == synthetic.CLASSES
    for name, split in splits.items():
        np.testing.assert_array_equal(getattr(dataset, name).images, split.images)
        np.testing.assert_array_equal(getattr(dataset, name).labels, split.labels)

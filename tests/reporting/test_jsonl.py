import json
from pathlib import Path

import numpy as np

from cifar_towers.files import run_files
from cifar_towers.reporting import jsonl


def test_a_resumed_run_drops_the_records_after_its_step(tmp_path):
    metrics = jsonl.JsonlWriter(tmp_path)
    for step in (5, 10, 15):
        metrics.write(kind="train", step=step)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "tr')  # a crash in the middle of a line
    metrics = jsonl.JsonlWriter(tmp_path)
    metrics.keep(lambda record: record["step"] <= 10)
    metrics.write(kind="train", step=11)
    metrics.write(kind="eval", step=11, accuracy=np.float32(np.nan))
    assert [record["step"] for record in jsonl.read(tmp_path / "metrics.jsonl")] == [5, 10, 11, 11]
    assert metrics.of("eval") == [{"kind": "eval", "step": 11, "accuracy": None}]


def test_a_record_that_was_cut_short_takes_no_other_with_it(tmp_path, monkeypatch):
    metrics = jsonl.JsonlWriter(tmp_path)
    metrics.write(kind="train", step=1)
    path = tmp_path / "metrics.jsonl"

    def full(self, mode="r"):
        with open(path, "a") as file:
            file.write('{"kind": "tra')
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", full)
        metrics.write(kind="train", step=2)
    metrics.write(kind="train", step=3)
    path.write_bytes(path.read_bytes() + b'\xff\xfe\n{"step": 4}\n[]\n')
    assert [record["step"] for record in jsonl.read(path)] == [1, 3]


def test_json_holds_no_numbers_that_are_not_finite(tmp_path):
    value = {"a": [np.nan, (1, -np.inf)], "b": {"c": np.float32(np.inf), "d": np.int64(3), "e": Path("x")}, "f": True}
    told = {"a": [None, [1, None]], "b": {"c": None, "d": 3, "e": "x"}, "f": True}
    assert json.loads(run_files.to_json(value)) == told
    run_files.write_json(tmp_path / "a.json", value)
    assert run_files.read_json(tmp_path / "a.json") == told
    jsonl.JsonlWriter(tmp_path).write(kind="train", step=1, towers={"loss": [np.nan, 1.0]})
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()


def test_json_is_replaced_whole(tmp_path):
    run_files.write_json(tmp_path / "a.json", {"x": 1})
    run_files.write_json(tmp_path / "a.json", {"x": 2})
    assert run_files.read_json(tmp_path / "a.json") == {"x": 2} and len(list(tmp_path.iterdir())) == 1

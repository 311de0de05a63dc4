import json
from pathlib import Path

import numpy as np

from cifar_towers import files
from cifar_towers.reporting import jsonl


def test_resuming_removes_later_records_and_incomplete_lines(tmp_path):
    metrics = jsonl.JsonlWriter(tmp_path)
    for step in (5, 10, 15):
        metrics.write(kind="train", step=step)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "tr')  # a crash in the middle of a line
    metrics = jsonl.JsonlWriter(tmp_path)
    metrics.keep(lambda record: record["step"] <= 10)
    metrics.write(kind="train", step=11)
    metrics.write(kind="eval", step=11, accuracy=np.float32(np.nan))
    assert [record["step"] for record in jsonl.read_records(tmp_path / "metrics.jsonl")] == [5, 10, 11, 11]
    assert metrics.records("eval") == [{"kind": "eval", "step": 11, "accuracy": None}]


def test_incomplete_line_damages_no_other_record(tmp_path, monkeypatch):
    metrics = jsonl.JsonlWriter(tmp_path)
    metrics.write(kind="train", step=1)
    path = tmp_path / "metrics.jsonl"

    def open_on_full_disk(self, mode="r"):
        with open(path, "a") as file:
            file.write('{"kind": "tra')
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", open_on_full_disk)
        metrics.write(kind="train", step=2)
    metrics.write(kind="train", step=3)
    path.write_bytes(path.read_bytes() + b'\xff\xfe\n{"step": 4}\n[]\n')
    assert [record["step"] for record in jsonl.read_records(path)] == [1, 3]


def test_nonfinite_numbers_become_null(tmp_path):
    value = {"a": [np.nan, (1, -np.inf)], "b": {"c": np.float32(np.inf), "d": np.int64(3), "e": Path("x")}, "f": True}
    expected = {"a": [None, [1, None]], "b": {"c": None, "d": 3, "e": "x"}, "f": True}
    assert json.loads(files.to_json(value)) == expected
    for content in ({"x": 1}, value):
        files.write_json(tmp_path / "a.json", content)  # replaced atomically
    assert files.read_json(tmp_path / "a.json") == expected and len(list(tmp_path.iterdir())) == 1
    jsonl.JsonlWriter(tmp_path).write(kind="train", step=1, towers={"loss": [np.nan, 1.0]})
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()

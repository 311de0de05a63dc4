"""The program behind `make test-gpu`: without GPUs it says so, and what it adds to the docs."""

import sys

import pytest

from tests import on_gpus

JUNIT = (
    '<testsuites><testsuite name="pytest" errors="1" failures="2" skipped="0" tests="60"/>'
    "</testsuites>"
)
RATES = {
    net: {"ours": [100_000.0], "ours-xla": [400_000.0, 600_000.0], "keras": []}
    for net in on_gpus.STEPS
}
RESULT = {
    "seconds": {"train": 9.0, "input": 0.5, "report": 0.25, "compile": 21.5, "evaluate": 3.0},
    "evaluations": [{"tta": False, "accuracy": 0.9333}, {"tta": True, "accuracy": 0.9405}],
}


def test_without_gpus_nothing_is_run_and_that_is_said(monkeypatch, capsys):
    page = on_gpus.TABLE.read_text()
    monkeypatch.setattr(sys, "argv", ["on_gpus"])
    monkeypatch.setattr(
        on_gpus, "_devices", lambda: {"gpus": [], "driver": "", "tensorflow": "2.21.0"}
    )
    monkeypatch.setattr(on_gpus, "_run", lambda command, **_: pytest.fail(f"{command} was run"))

    assert on_gpus.main() == 0
    assert capsys.readouterr().out == f"{on_gpus.NO_GPU}\n"
    assert on_gpus.TABLE.read_text() == page


def test_row_of_the_table():
    devices = {"gpus": ["A", "A"], "driver": "570.1", "tensorflow": "2.21.0"}
    row = on_gpus.make_row(devices, on_gpus.read_counts(JUNIT), [{}, RESULT], RATES, ["tests"])
    for cell in (
        "2 x A",
        "570.1",
        "2.21.0",
        "57 passed",
        "3 failed",
        "| - | 94.05 %, 93.33 %",
        "9.8 s",
        "21.5 s",
    ):
        assert cell in row

    # of 1,024 and of 128 images
    assert "speed94 at 32x32: ours 10.2, ours-xla 2.0 |" in row
    assert "cifarnet: ours 1.3, ours-xla 0.3; resnet20: " in row

    page = on_gpus.add_row(on_gpus.TABLE.read_text(), row)
    assert f"\n{on_gpus.HEADER}\n| --- |" in page
    assert f"| --- |\n{row}\n|" in page

    failed = on_gpus.make_row(
        devices | {"driver": ""}, "not run", [{}, {}], {}, ["tests", "speed94"]
    )

    assert failed.count(" | ") == on_gpus.HEADER.count(" | ")
    assert failed.endswith("| tests, speed94 |")

"""The program behind `make test-gpu`: without GPUs it says so, and what it adds to the docs."""

import os
import subprocess
import sys

from tests import on_gpus

JUNIT = '<testsuites><testsuite name="pytest" errors="1" failures="2" skipped="0" tests="60"/></testsuites>'
RESULT = {
    "seconds": {"train": 9.0, "input": 0.5, "report": 0.25, "compile": 21.5, "evaluate": 3.0},
    "images_per_sec": 48123.4,
    "evaluations": [{"tta": 0, "accuracy": 0.9333}, {"tta": 2, "accuracy": 0.9405}],
}


def test_without_gpus_nothing_is_run_and_that_is_said():
    page = on_gpus.TABLE.read_text()
    command = [sys.executable, "-m", "tests.on_gpus"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "-1"}
    done = subprocess.run(command, cwd=on_gpus.ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{on_gpus.NO_GPU}\n"), done.stderr
    assert on_gpus.TABLE.read_text() == page


def test_row_of_the_table():
    devices = {"gpus": ["A", "A"], "driver": "570.1", "tensorflow": "2.21.0"}
    row = on_gpus.make_row(devices, on_gpus.read_counts(JUNIT), RESULT, ["tests"])
    cells = row.strip("| ").split(" | ")
    assert cells[0].startswith("2 x A, 20") and cells[1:] == [
        "570.1, 2.21.0", "57 passed, 3 failed", "94.05 %, 93.33 %", "9.8 s + 21.5 s of compilation",
        "48,123 images/s", "tests",
    ]  # fmt: skip
    page = on_gpus.add_row(on_gpus.TABLE.read_text(), row)
    assert f"\n{on_gpus.HEADER}\n| --- |" in page and f"| --- |\n{row}\n|" in page
    failed = on_gpus.make_row(devices | {"driver": ""}, "not run", {}, ["tests", "speed94"])
    assert failed.count(" | ") == on_gpus.HEADER.count(" | ") and failed.endswith("| tests, speed94 |")

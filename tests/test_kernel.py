"""The package in a notebook: docs/training.md's example in a real Jupyter kernel."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from jupyter_client.manager import start_new_kernel

from tests.messages import lines_with

ROOT = Path(__file__).parents[1]
EXAMPLE = (ROOT / "docs/training.md").read_text().split("```python\n")[1].split("```")[0]
DEFINITIONS, TRAIN, RESULT = re.split(r"^(run = cifar_towers.train.*\n)", EXAMPLE, maxsplit=1, flags=re.M)


@pytest.mark.slow
def test_a_training_is_interrupted_and_goes_on_to_the_bits_of_the_command_line(tmp_path):
    records = tmp_path / "runs/first/metrics.jsonl"
    kernel, client = start_new_kernel(cwd=str(tmp_path), env=os.environ | {"PYTHONPATH": str(ROOT)})

    def printed(cell):
        """Execute a cell, and return what it prints."""
        parts = []
        reply = client.execute_interactive(cell, output_hook=lambda output: parts.append(output["content"].get("text")))
        assert reply["content"]["status"] == "ok", reply["content"]
        return "".join(filter(None, parts))

    def interrupt_step_20():
        while not records.exists() or '"step": 20,' not in records.read_text():
            time.sleep(0.05)
        kernel.interrupt_kernel()

    try:
        printed(DEFINITIONS)
        thread = threading.Thread(target=interrupt_step_20, daemon=True)
        thread.start()
        saved = int(re.search(r"saved step (\d+)", printed(TRAIN))[1])
        assert 20 <= saved < 100
        assert printed("print(run.result, run.history[-1]['step'] // 10)") == f"None {saved // 10}\n"
        assert lines_with(printed(TRAIN), "resuming", f"step {saved}") and 0 <= float(printed(RESULT).split()[0]) <= 1
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)

    flags = ["--recipe=smoke", "--epochs=1", "--batch_size=100", f"--train_dir={tmp_path / 'command'}"]
    subprocess.run([sys.executable, "scripts/train.py", *flags], cwd=ROOT, check=True, capture_output=True)
    results = [json.loads((place / "result.json").read_text()) for place in (records.parent, tmp_path / "command")]
    assert results[0]["weights_sha256"] == results[1]["weights_sha256"]
    assert results[0]["evaluations"] == results[1]["evaluations"]

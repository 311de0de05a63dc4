"""The package in a notebook: docs/training.md's example in a real Jupyter kernel, and what its cells show."""

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.configs import TINY_NET

ROOT = Path(__file__).parents[1]
EXAMPLE = (ROOT / "docs/training.md").read_text().split("```python\n")[1].split("```")[0]
DEFINITIONS, TRAIN, RESULT = re.split(r"^(run = cifar_towers.train.*\n)", EXAMPLE, maxsplit=1, flags=re.M)
TINY = (
    f"model={TINY_NET!r}, dataset='synthetic', shift=0, batch_size=500, precision='float32', tta=0, max_steps=4, "
    "summary_every_steps=10"
)


def execute(place, *cells, interrupt_when=lambda: False):
    """Execute cells in a kernel that starts in a directory; interrupt the second cell once. Return the cells."""
    notebook = nbformat.v4.new_notebook(cells=list(map(nbformat.v4.new_code_cell, cells)))
    resources = {"metadata": {"path": str(place)}}
    client = NotebookClient(notebook, timeout=900, resources=resources, allow_errors=True, coalesce_streams=True)

    async def execute_cells():
        async with client.async_setup_kernel(env=os.environ | {"PYTHONPATH": str(ROOT)}):
            for index, cell in enumerate(notebook.cells):
                running = asyncio.ensure_future(client.async_execute_cell(cell, index))
                while index == 1 and not running.done():
                    await asyncio.sleep(0.05)
                    if interrupt_when():
                        await client.km.interrupt_kernel()
                        break
                await running

    asyncio.run(execute_cells())
    return notebook.cells


def printed(cell):
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


def error_of(cell):
    """Return the error that a cell shows."""
    (error,) = (output for output in cell.outputs if output.output_type == "error")
    return f"{error.ename}: {error.evalue}"


@pytest.mark.slow
def test_a_training_is_interrupted_and_goes_on_to_the_bits_of_the_command_line(tmp_path):
    records = tmp_path / "runs/first/metrics.jsonl"
    asked = "print(run.directory, run.result, run.history[-1]['step'] // 10)"
    again = f"again = cifar_towers.train({TINY}, train_dir='runs/second')\nprint(again.result['step'])"

    def is_training():
        return records.exists() and '"step": 20,' in records.read_text()

    cells = execute(tmp_path, DEFINITIONS, TRAIN, asked, TRAIN, RESULT, again, interrupt_when=is_training)
    assert [output for cell in cells for output in cell.outputs if output.output_type != "stream"] == []  # no error

    interrupted, state, resumed, result = map(printed, cells[1:5])
    lines = interrupted.splitlines()
    assert lines[-2].startswith("SIGINT: saving after this step")
    saved = int(
        re.fullmatch(r"interrupted: saved step (\d+): the same command resumes, without --overwrite", lines[-1])[1]
    )
    assert 20 <= saved < 100 and state == f"{records.parent} None {saved // 10}\n"  # of every tenth step
    assert f"resuming from step {saved}" in resumed and 0 <= float(result.split()[0]) <= 1
    for text in (interrupted, resumed):
        assert "\x1b" not in text and max(map(len, text.splitlines())) < 300
        assert len(re.findall(r"step +\d+/100|images/s +\S+ left", text)) <= 1  # one line, of which the last text stays

    flags = ["--recipe=smoke", "--epochs=1", "--batch_size=100", f"--train_dir={tmp_path / 'command'}"]
    subprocess.run([sys.executable, "scripts/train.py", *flags], cwd=ROOT, check=True, capture_output=True)
    results = [json.loads((place / "result.json").read_text()) for place in (records.parent, tmp_path / "command")]
    assert results[0]["weights_sha256"] == results[1]["weights_sha256"]
    assert results[0]["evaluations"] == results[1]["evaluations"]
    assert printed(cells[5]).endswith("\n4\n")


@pytest.mark.slow
def test_a_cell_shows_the_sentence(tmp_path):
    cells = execute(
        tmp_path,
        "import cifar_towers",
        "cifar_towers.train('smok')",
        "cifar_towers.train('smoke', epoch=1)",
        "cifar_towers.load_run('nothere')",
        "cifar_towers.evaluate('nothere', tta=3)",
    )
    sentences = (
        "UsageError: recipe=smok is not one of .*",
        "TypeError: .* got an unexpected keyword argument 'epoch'",
        "UsageError: nothere is not the directory of a run: it has no config.json",
        "UsageError: tta=3 is too large; the maximum is 2",
    )
    for cell, sentence in zip(cells[1:], sentences, strict=True):
        assert re.fullmatch(sentence, error_of(cell))

"""docs/towers.ipynb: its outputs are those of its code. After a change, run all its cells in Jupyter and save it."""

import base64
import contextlib
import io
import json
import re
import time
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import pytest

NOTEBOOK = Path(__file__).parents[1] / "docs/towers.ipynb"
CELLS = json.loads(NOTEBOOK.read_text())["cells"]
CODE = [cell for cell in CELLS if cell["cell_type"] == "code"]
OUTPUTS = [output for cell in CODE for output in cell["outputs"]]
NUMBER = r"-?\d[\d,]*\.?\d*(?:e[+-]\d+)?"
MAX_SECONDS, MAX_BYTES, MAX_PICTURE_BYTES = 120, 400_000, 40_000


def kept_text(cell):
    return "".join(line for output in cell["outputs"] for line in output.get("text", ()))


def test_outputs_are_those_of_one_run_from_top_to_bottom():
    assert [cell["execution_count"] for cell in CODE] == list(range(1, len(CODE) + 1))
    assert {output["output_type"] for output in OUTPUTS} == {"stream", "display_data"}  # no error
    assert {output["name"] for output in OUTPUTS if output["output_type"] == "stream"} == {"stdout"}


def test_notebook_is_small_and_names_no_place_of_a_machine():
    assert NOTEBOOK.stat().st_size < MAX_BYTES
    for picture in (output["data"]["image/png"] for output in OUTPUTS if "data" in output):
        assert len(base64.b64decode(picture)) < MAX_PICTURE_BYTES
    text = "".join(line for cell in CELLS for line in cell["source"]) + "".join(map(kept_text, CODE))
    assert re.findall(r"(?<![\w.)\]])/(?!(?:CPU|GPU):)[A-Za-z][\w.-]*", text) == []


def test_links_resolve():
    text = "".join(line for cell in CELLS if cell["cell_type"] == "markdown" for line in cell["source"])
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert links and [link for link in links if not (NOTEBOOK.parent / link).exists()] == []


def test_comparison_detects_other_numbers():
    assert differing_lines("loss 2.32, error 2e-07\n", "loss 2.31, error 5e-08\n") == []
    for other in ("loss 1.9, error 2e-07\n", "loss 2.32, error 2e-03\n", "cost 2.32, error 2e-07\n", "loss 2.32\n", ""):
        assert differing_lines("loss 2.32, error 2e-07\n", other)


@pytest.mark.slow
def test_cells_print_their_outputs(monkeypatch):
    """All cells, one after another, in two minutes; they draw a figure where one is kept."""
    monkeypatch.setattr(plt, "show", lambda: None)
    started, names = time.monotonic(), {}
    plt.switch_backend("Agg")
    with matplotlib.rc_context():
        for number, cell in enumerate(CODE, 1):
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile("".join(cell["source"]), f"docs/towers.ipynb, code cell {number}", "exec"), names)
            assert differing_lines(kept_text(cell), printed.getvalue()) == [], f"code cell {number}"
            assert len(plt.get_fignums()) == sum("data" in output for output in cell["outputs"])
            plt.close("all")
    assert time.monotonic() - started < MAX_SECONDS


def differing_lines(kept, printed):
    """Pairs of lines that differ in their words, or in their numbers as `agree` says."""
    lines = list(zip(kept.splitlines(), printed.splitlines(), strict=False))
    missing = [(kept, printed)] if kept.count("\n") != printed.count("\n") else []
    return missing + [
        (one, other)
        for one, other in lines
        if words(one) != words(other) or not all(map(agree, re.findall(NUMBER, one), re.findall(NUMBER, other)))
    ]


def words(line):
    return re.sub(NUMBER, "n", line).split()


def agree(kept, printed):
    """Whether numbers agree to 5 %; a rounding error, which has an exponent, to a factor of 100."""
    one, other = (float(number.replace(",", "")) for number in (kept, printed))
    if "e" in kept and one < 1e-5:
        return one / 100 < other < one * 100
    return other == pytest.approx(one, rel=0.05, abs=2e-3)

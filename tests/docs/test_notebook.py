"""docs/towers.ipynb: its outputs are those of its code. After a change, run all its cells in
Jupyter and save it.
"""

import contextlib
import io
import json
import re
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import pytest

from tests.helpers.messages import assert_prints_the_same

NOTEBOOK = Path(__file__).parents[2] / "docs/towers.ipynb"
CELLS = json.loads(NOTEBOOK.read_text())["cells"]
CODE = [cell for cell in CELLS if cell["cell_type"] == "code"]


def kept_text(cell):
    lines = []
    for output in cell["outputs"]:
        lines += output.get("text", ())
    return "".join(lines)


def test_links_resolve():
    pages = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "markdown"]
    text = "".join(pages)
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert links
    assert [link for link in links if not (NOTEBOOK.parent / link).exists()] == []


@pytest.mark.slow
def test_cells_print_their_outputs(monkeypatch):
    """All cells, one after another; numbers agree to 5 %. The cells draw a figure where one is
    kept.
    """
    monkeypatch.setattr(plt, "show", lambda: None)
    names = {}
    plt.switch_backend("Agg")
    with matplotlib.rc_context():
        for number, cell in enumerate(CODE, 1):
            source = "".join(cell["source"])
            code = compile(source, f"docs/towers.ipynb, code cell {number}", "exec")
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(code, names)

            assert_prints_the_same(printed.getvalue(), kept_text(cell), rel=0.05)
            assert len(plt.get_fignums()) == sum("data" in output for output in cell["outputs"])
            plt.close("all")

"""What the README says is so, and what docs/scale.md computes."""

import re
from pathlib import Path

import pytest

from cifar_towers.program_configs import (
    BenchmarkConfig,
    EvaluateConfig,
    ExportConfig,
    LaunchConfig,
    PredictConfig,
    ReportConfig,
    SpeedrunConfig,
)

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = README + "".join((ROOT / "docs" / f"{name}.md").read_text() for name in ("benchmark", "cluster", "faults"))
OTHERS = {"build", "job", "long", "only"}  # flags of docker, sbatch and tests.faults, to a hyphen

EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.S)
NUMBER = r"-?\d[\d,]*\.?\d*"


@pytest.mark.parametrize(
    "code", [pytest.param(code, marks=pytest.mark.slow if "41,157,101" in code else ()) for code in EXAMPLES]
)
def test_examples_run_as_printed(code, capsys):
    """What a block prints is what the comments at its end say, numbers to the last digit but one; the large perceptron
    learns the same on one tower and on two."""
    exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    expected = [line.removeprefix("# ") for line in code.splitlines() if line.startswith("# ")]
    assert [re.sub(NUMBER, "n", line) for line in printed] == [re.sub(NUMBER, "n", line) for line in expected]
    for line, wanted in zip(printed, expected, strict=True):
        found, told = ([float(n.replace(",", "")) for n in re.findall(NUMBER, text)] for text in (line, wanted))
        assert found == pytest.approx(told, rel=1e-3, abs=2e-3)
    if "41,157,101" in code:
        one, two = (line.split(":")[1] for line in printed)
        assert one == two


def test_every_flag_target_and_file_it_names_exists():
    configs = (BenchmarkConfig, EvaluateConfig, ExportConfig, LaunchConfig, PredictConfig, ReportConfig, SpeedrunConfig)
    known = {"flagfile", "help"}.union(*(config.__dataclass_fields__ for config in configs))
    flags = set(re.findall(r"--([a-z_]+)", PAGES)) - OTHERS
    assert {flag for flag in flags if flag not in known and flag.removeprefix("no") not in known} == set()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"(?:`|^)make ([a-z-]+)", PAGES, re.M)) <= targets
    for path in re.findall(r"\b(?:cifar_towers|configs|scripts)/[\w/.]*\w", PAGES):
        assert (ROOT / path).exists(), path


def test_the_tables_of_docs_scale_are_what_its_lines_print(capsys):
    """Each block of Python is followed by what it prints, where the blocks before it have run."""
    page, names = (ROOT / "docs/scale.md").read_text(), {}
    blocks = re.findall(r"```python\n(.*?)```\n\n((?:\|[^\n]*\n)+)\n", page, re.S)
    assert len(blocks) == page.count("```python")
    for code, table in blocks:
        exec(compile(code, "docs/scale.md", "exec"), names)
        assert capsys.readouterr().out == table

"""What the README says is so."""

import re
from pathlib import Path

from cifar_towers.config import EvaluateConfig, TrainConfig

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_example_runs_as_printed(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    exec(compile(code, "README.md", "exec"), {})
    (number,) = re.findall(r"\[\[(.*)\]\]", capsys.readouterr().out)
    assert abs(float(number) - 3) < 1e-3


def test_every_flag_target_and_file_it_names_exists():
    known = {*TrainConfig.__dataclass_fields__, *EvaluateConfig.__dataclass_fields__, "flagfile", "help"}
    flags = set(re.findall(r"--([a-z_]+)", README))
    assert {flag for flag in flags if flag not in known and flag.removeprefix("no") not in known} == set()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"make ([a-z-]+)", README)) <= targets
    for path in re.findall(r"\b(?:cifar_towers|configs|scripts)/[\w/.]*\w", README):
        assert (ROOT / path).exists(), path

"""The Makefile: its menu, and the commands behind its targets."""

import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from cifar_towers.cli.main import parse_command_line
from cifar_towers.config import TrainConfig
from cifar_towers.config.programs import BenchmarkConfig

ROOT = Path(__file__).parents[1]


OUTER_MAKE = {"MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "ARGS", "CONFIG", "NUM_GPUS"}  # under `make test`


def run(*arguments):
    environment = {name: value for name, value in os.environ.items() if name not in OUTER_MAKE}
    return subprocess.run(["make", *arguments], cwd=ROOT, capture_output=True, text=True, env=environment)


def make(*arguments):
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_menu_has_three_groups_of_all_targets_in_lines_of_100_characters():
    menu = make()
    assert re.findall(r"^\w+$", menu, re.M) == ["Use", "Measure", "Develop"]
    assert [line for line in menu.splitlines() if len(line) > 100] == []
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert re.findall(r"^  make ([a-z-]+)  ", menu, re.M) == [target for target in targets if target != "help"]


@pytest.mark.parametrize(("target", "config_class"), [("train", TrainConfig), ("bench", BenchmarkConfig)])
@pytest.mark.parametrize("recipe", ["speed94", "smoke"])
def test_targets_take_their_recipe_from_config(target, config_class, recipe):
    command = make("-n", target, f"CONFIG={recipe}", "ARGS=--epochs=3").splitlines()[-1]
    _, *program = shlex.split(command)
    config = parse_command_line(config_class, program[1:])
    trained = config if config_class is TrainConfig else config.recipe
    assert (trained.recipe, trained.epochs) == (recipe, 3)
    assert trained.dataset == ("synthetic" if recipe == "smoke" else "auto")


@pytest.mark.parametrize(
    ("target", "extras"),
    [
        *(("train", []), ("predict", []), ("test", ["dev"]), ("lint", ["dev"]), ("test-browser", ["dev", "browser"])),
        *(("export", []), ("export --format=keras", []), ("export --format=onnx", ["export"])),
        *(("export --format=litert", ["export"]), ("docs", ["docs"])),
    ],
)
def test_targets_install_no_more_than_they_need(target, extras):
    target, *flags = target.split()
    commands = make("--dry-run", "--always-make", target, "NVIDIA=", f"ARGS={' '.join(flags)}")
    assert re.findall(r"pip install .* -e '\.(.*)'", commands) == ["", *(f"[{extra}]" for extra in extras)]
    with_gpus = make("--dry-run", "--always-make", target, "NVIDIA=driver")
    assert "pip install" in with_gpus and "-e '.[gpu]'" in with_gpus


def test_api_pages_are_of_packages_with_public_names():
    (command,) = (line for line in make("-n", "docs").replace("\\\n", "").splitlines() if " -m pdoc " in line)
    *_, output, package, towers, excluded = shlex.split(command)
    assert [importlib.import_module(name).__all__ != [] for name in (package, towers)] == [True, True]
    assert importlib.import_module(towers).make_parallel.__module__ == excluded.removeprefix("!")
    ignored = subprocess.run(["git", "check-ignore", output], cwd=ROOT, capture_output=True, text=True)
    assert ignored.stdout.strip() == output


def test_exit_code_of_a_program_is_in_the_last_line_as_the_menu_says():
    ready = ["-o", ".venv/ready", f"BIN={Path(sys.executable).parent}"]
    failed = run(*ready, "train", "ARGS=--dataset=folder:nowhere")
    assert failed.returncode == 2 and re.search(r"Error 3$", failed.stderr.splitlines()[-1])
    assert "make exits with 2; the program's exit code is the number after Error" in make()

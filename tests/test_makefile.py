"""The Makefile: the commands behind its targets."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from cifar_towers.config import TrainConfig
from cifar_towers.config.flags import parse_command_line

ROOT = Path(__file__).parents[1]
# under `make test`
OUTER_MAKE = {
    "MAKEFLAGS",
    "MFLAGS",
    "MAKEOVERRIDES",
    "MAKELEVEL",
    "ARGS",
    "CONFIG",
    "NUM_GPUS",
}


def make(*arguments):
    """Return what `make` prints."""
    environment = {name: value for name, value in os.environ.items() if name not in OUTER_MAKE}
    done = subprocess.run(
        ["make", *arguments], cwd=ROOT, capture_output=True, text=True, env=environment, check=True
    )
    return done.stdout


@pytest.mark.parametrize(("target", "recipe"), [("train", "speed94"), ("bench", "smoke")])
def test_targets_take_their_recipe_from_config(target, recipe):
    command = make("-n", target, f"CONFIG={recipe}", "ARGS=--epochs=3").splitlines()[-1]
    flags = [word for word in shlex.split(command) if word.startswith("--")]
    trained = parse_command_line(TrainConfig, flags)
    assert (trained.recipe, trained.epochs) == (recipe, 3)
    assert trained.dataset == ("synthetic" if recipe == "smoke" else "auto")


@pytest.mark.parametrize(
    ("target", "extras"),
    [
        *(
            ("train", []),
            ("test", ["dev"]),
            ("test-browser", ["dev", "browser"]),
            ("docs", ["docs"]),
        ),
        *(
            ("export --format=keras", []),
            ("export --format=onnx", ["export"]),
            ("export --format=litert", ["export"]),
        ),
    ],
)
def test_targets_install_no_more_than_they_need(target, extras):
    target, *flags = target.split()
    for nvidia, of_programs in (("", ""), ("driver", "[gpu]")):
        commands = make(
            "--dry-run", "--always-make", target, f"NVIDIA={nvidia}", f"ARGS={' '.join(flags)}"
        )
        installed = re.findall(r"pip install .* -e '\.(.*)'", commands)
        assert installed == [of_programs, *(f"[{extra}]" for extra in extras)]

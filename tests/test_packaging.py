"""An installed wheel is complete: every program runs outside of a checkout, with the recipes."""

import configparser
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from PIL import Image

from cifar_towers.cli.main import PROGRAMS

ROOT = Path(__file__).parents[1]
SOURCES = ("cifar_towers", "configs", "setup.cfg", "pyproject.toml", "README.md", "LICENSE")
SMALL = ["--recipe=smoke", "--max_steps=2", "--batch_size=100", "--notta", "--precision=float32"]
RUN = "--train_dir=runs/smoke-synthetic-seed0"
CLUSTER = "--train_dir=runs/two-workers"
COMMANDS = {  # in this order: the first two train what the others read
    "train": [*SMALL, "--num_gpus=2"],
    "launch": ["--num_workers=2", "--", *SMALL, CLUSTER],
    "evaluate": [RUN, "--dataset=synthetic"],
    "predict": [RUN, "picture.png"],
    "export": [RUN, "--format=keras"],
    "report": ["runs/smoke-synthetic-seed0", "--out=report.html"],
    "runs": [],
}


def test_every_folder_of_the_package_is_installed():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    folders = {path.parent for path in (ROOT / "cifar_towers").rglob("__init__.py")}
    names = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert {*setup["options"]["packages"].split()} == names | {"cifar_towers.configs"}


@pytest.fixture
def environment(tmp_path):
    """Install a wheel into an environment that has the libraries of this one, and nothing of the
    checkout.
    """
    source = tmp_path / "source"
    environment = tmp_path / "environment"
    source.mkdir()
    for name in SOURCES:  # a copy, as building leaves files beside the sources
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    alone = ["--no-deps", "--no-index"]
    subprocess.run(
        [*pip, "wheel", *alone, "--no-build-isolation", f"--wheel-dir={tmp_path}", source],
        check=True,
    )
    shutil.rmtree(source)
    venv.create(environment, with_pip=False)
    python = environment / "bin/python"
    subprocess.run(
        [*pip, f"--python={python}", "install", *alone, *tmp_path.glob("*.whl")], check=True
    )
    (site,) = environment.glob("lib/python*/site-packages")
    # its own .pth files are not read
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    return environment


@pytest.mark.slow
def test_every_program_runs_from_a_wheel_in_an_empty_folder(environment, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    Image.new("RGB", (32, 32)).save(folder / "picture.png")
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(program, *flags):
        command = [environment / "bin" / program, *flags]
        done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert {*COMMANDS} == {*PROGRAMS}

    printed = {program: run("cifar-towers", program, *flags) for program, flags in COMMANDS.items()}
    for place in ("smoke-synthetic-seed0", "two-workers"):
        saved = folder / "runs" / place
        config = json.loads((saved / "config.json").read_text())
        result = json.loads((saved / "result.json").read_text())
        assert (config["recipe"], config["model"], result["step"]) == ("smoke", "speednet93", 2)

    assert "picture.png" in printed["predict"]
    assert "smoke" in printed["runs"]
    assert (folder / "report.html").exists()

    place = run("python", "-c", "import cifar_towers; print(cifar_towers.__file__)")
    assert place.startswith(str(environment))

    help_text = run("cifar-towers", "train", "--help")
    assert all(path.stem in help_text for path in (ROOT / "configs").glob("*.cfg"))

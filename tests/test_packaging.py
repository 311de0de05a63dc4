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
SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")


def test_every_folder_of_the_package_is_installed():
    folders = {path.parent for path in (ROOT / "cifar_towers").rglob("__init__.py")}
    names = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert {*SETUP["options"]["packages"].split()} == names | {"cifar_towers.configs"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """run(program, flags): a program of a wheel in a fresh environment, in one folder that was empty at first.

    The environment has the libraries of the one that runs the tests, and nothing of the checkout.
    """
    directory = tmp_path_factory.mktemp("wheel")
    source, wheels, environment, folder = (directory / name for name in ("source", "wheels", "environment", "folder"))
    source.mkdir()
    folder.mkdir()
    for name in SOURCES:  # a copy, as building leaves files beside the sources
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    alone = ["--no-deps", "--no-index"]
    subprocess.run([*pip, "wheel", *alone, "--no-build-isolation", f"--wheel-dir={wheels}", source], check=True)
    shutil.rmtree(source)
    venv.create(environment, with_pip=False)
    python = environment / "bin/python"
    subprocess.run([*pip, f"--python={python}", "install", *alone, *wheels.glob("*.whl")], check=True)
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib"))  # its own .pth files are not read
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(program, *flags):
        command = [environment / "bin" / program, *map(str, flags)]
        done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def paste(line):
        subprocess.run(line, shell=True, cwd=folder, env=variables, check=True, timeout=300)

    run.folder, run.paste = folder, paste
    return run


SMALL = ["--recipe=smoke", "--max_steps=2", "--batch_size=100", "--tta=0", "--precision=float32"]
RUN, CLUSTER = "--train_dir=runs/smoke-seed0", "--train_dir=runs/two-workers"
COMMANDS = {  # in this order: the first two train what the others read
    "train": [*SMALL, "--num_gpus=2"],
    "launch": ["--num_workers=2", "--", *SMALL, CLUSTER],
    "evaluate": [RUN, "--dataset=synthetic"],
    "predict": [RUN, "picture.png"],
    "export": [RUN, "--format=keras"],
    "compare-runs": ["runs/smoke-seed0", "runs/smoke-seed0"],
    "report": ["runs/smoke-seed0", "--out=report.html"],
    "runs": [],
    "benchmark": [*SMALL, "--towers=1", "--minutes=0"],
}


@pytest.mark.slow
def test_every_program_runs_from_a_wheel_in_an_empty_folder(run):
    assert {*COMMANDS} == {*PROGRAMS}
    for name in ("picture.png", "picture.jpg"):
        Image.new("RGB", (32, 32)).save(run.folder / name)
    printed = {program: run("cifar-towers", program, *flags) for program, flags in COMMANDS.items()}
    place = run("python", "-c", "import cifar_towers; print(cifar_towers.__file__)")
    assert place.startswith(str(run.folder.parent))
    config, result = (
        json.loads((run.folder / f"runs/smoke-seed0/{name}.json").read_text()) for name in ("config", "result")
    )
    assert (config["recipe"], config["model"], config["learning_rate"]) == ("smoke", "speednet93", 1.5)
    assert result["step"] == 2
    assert json.loads((run.folder / "runs/two-workers/result.json").read_text())["step"] == 2
    command = json.loads((run.folder / "runs/two-workers/environment.json").read_text())["command"]
    assert command[:2] == ["cifar-towers", "train"]
    assert "picture.png" in printed["predict"] and "smoke" in printed["runs"]
    assert (run.folder / "report.html").exists()
    _, *next_lines = printed["train"].partition("next:\n")[2].splitlines()
    words = [line.rpartition("/bin/")[2].split()[:2] for line in next_lines]
    assert words == [["cifar-towers", "evaluate"], ["cifar-towers", "predict"]]
    for line in next_lines:
        run.paste(line)
    assert all(path.stem in run("cifar-towers", "train", "--help") for path in (ROOT / "configs").glob("*.cfg"))

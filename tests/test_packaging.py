"""An installed wheel is complete: the programs and the recipes, outside of a checkout."""

import configparser
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = ("cifar_towers", "configs", "setup.cfg", "pyproject.toml", "README.md", "LICENSE")


def test_every_folder_of_the_package_is_installed():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    folders = {path.parent for path in (ROOT / "cifar_towers").rglob("__init__.py")}
    names = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert {*setup["options"]["packages"].split()} == names | {"cifar_towers.configs"}


def pip(*arguments):
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-index"]
    subprocess.run([sys.executable, "-m", "pip", *arguments[:1], *options, *arguments[1:]], check=True)


@pytest.mark.slow
def test_installed_wheel_trains_a_recipe_in_an_empty_folder(tmp_path):
    source, wheels, site, empty = (tmp_path / name for name in ("source", "wheels", "site", "empty"))
    source.mkdir()
    empty.mkdir()
    for name in SOURCES:  # a copy, as building leaves files beside the sources
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    pip("wheel", "--no-build-isolation", f"--wheel-dir={wheels}", str(source))
    pip("install", "--no-compile", f"--target={site}", *map(str, wheels.glob("*.whl")))
    shutil.rmtree(source)

    def run(*flags):
        program, environment = site / "bin" / "cifar-towers-train", {**os.environ, "PYTHONPATH": str(site)}
        return subprocess.run(
            [program, *flags], cwd=empty, env=environment, capture_output=True, text=True, timeout=300
        )

    listed = run("--help").stdout
    assert all(path.stem in listed for path in (ROOT / "configs").glob("*.cfg"))
    done = run("--recipe=smoke", "--max_steps=1", "--batch_size=100", "--tta=0", "--num_gpus=2")
    assert done.returncode == 0, done.stderr
    config = json.loads((empty / "runs/smoke-seed0/config.json").read_text())
    assert (config["recipe"], config["model"], config["learning_rate"]) == ("smoke", "speednet93", 1.5)
    assert json.loads((empty / "runs/smoke-seed0/result.json").read_text())["step"] == 1

"""The commands that programs print run when they are pasted into a shell."""

import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from cifar_towers.config import TrainConfig
from cifar_towers.errors import command, name_programs
from cifar_towers.reporting.run_logger import next_commands
from tests.programs import call

ROOT = Path(__file__).parents[1]
NET = """
import keras

def net(image_size, num_classes):
    images = keras.Input((image_size, image_size, 3))
    return keras.Model(images, keras.layers.Dense(num_classes)(keras.layers.GlobalAveragePooling2D()(images)))
"""


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Return an environment below a directory with a space, whose programs print the arguments that they get."""
    programs = tmp_path / "my env" / "bin"
    programs.mkdir(parents=True)
    for name in ("python", "tensorboard", "cifar-towers-train", "cifar-towers-compare-runs"):
        (programs / name).write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
        (programs / name).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    return programs


def test_printed_commands_run_when_pasted(tmp_path, small_folder, programs, monkeypatch, capsys):
    """Train a net and pictures of the user's own in a directory with a space."""
    place = tmp_path / "my work"
    place.mkdir()
    (place / "my net.py").write_text(NET)
    Image.new("RGB", (32, 32), "red").save(place / "picture.jpg")
    (place / "the pictures").symlink_to(small_folder.removeprefix("folder:"))
    monkeypatch.chdir(place)
    flags = ["--model=my net.py:net", "--dataset=folder:the pictures", "--train_dir=a run"]
    flags += ["--max_steps=1", "--batch_size=40", "--precision=float32", "--eval_every_epochs=0", "--num_gpus=2"]

    def run(script, *arguments):
        assert Path(script).samefile(ROOT / "scripts" / Path(script).name)
        assert call(monkeypatch, script, *arguments) == 0
        return capsys.readouterr().out

    out = run(ROOT / "scripts/train.py", *flags)
    printed = [line.strip() for line in out.partition("next:\n")[2].splitlines()]
    pasted = [subprocess.run(line, shell=True, capture_output=True, text=True, check=True).stdout for line in printed]
    board, evaluate, predict = map(str.splitlines, pasted)
    assert board == ["--logdir=a run"] and list(Path("a run/train").glob("events*"))
    assert "--dataset=folder:the pictures" in evaluate
    out = run(*evaluate)
    assert "a run at step 1: folder:" in out and "most often taken for" in out
    out = run(*predict)
    assert "picture.jpg" in out and out.count(" %") == 3


def test_data_dir_is_printed_where_it_is_read():
    config = TrainConfig(dataset="auto", data_dir="prepared sets")
    assert "'--data_dir=prepared sets'" in next_commands(config, "")[1]
    assert "--data_dir" not in next_commands(config, "SYNTHETIC DATA, NOT CIFAR-10")[1]


def test_console_scripts_are_named_if_one_was_started(programs, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(programs / "cifar-towers-train")])
    monkeypatch.chdir(programs.parent)
    assert command("compare_runs.py", "runs/one", "a b") == "bin/cifar-towers-compare-runs runs/one 'a b'"
    monkeypatch.chdir(ROOT)
    assert command("compare_runs.py") == f"'{programs}/cifar-towers-compare-runs'"
    monkeypatch.setenv("PATH", str(programs))
    assert command("compare_runs.py") == "cifar-towers-compare-runs"
    text = "write: {} --model=mine/train.py:net, or {}; train.py:net"
    assert name_programs(text.format("train.py", "compare_runs.py")) == text.format(
        "cifar-towers-train", "cifar-towers-compare-runs"
    )


def test_scripts_of_a_checkout_are_named_otherwise(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "executable", f"{ROOT}/.venv/bin/python")
    monkeypatch.setattr(sys, "argv", ["/elsewhere/my.py"])  # a program of the user's own
    assert command("evaluate.py", "--train_dir=a b") == ".venv/bin/python scripts/evaluate.py '--train_dir=a b'"
    assert name_programs("write: predict.py") == "write: predict.py"

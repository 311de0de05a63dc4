"""The commands that programs print run when they are pasted into a shell."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from cifar_towers.config import TrainConfig
from cifar_towers.errors import command, name_programs
from cifar_towers.reporting.run_logger import next_commands

ROOT = Path(__file__).parents[1]
NET = """
import keras

def net(image_size, num_classes):
    images = keras.Input((image_size, image_size, 3))
    return keras.Model(images, keras.layers.Dense(num_classes)(keras.layers.GlobalAveragePooling2D()(images)))
"""


def test_printed_commands_run_when_pasted(tmp_path, small_folder):
    """Train a net and pictures of the user's own in a directory with a space."""
    place = tmp_path / "my work"
    place.mkdir()
    (place / "my net.py").write_text(NET)
    Image.new("RGB", (32, 32), "red").save(place / "picture.jpg")
    (place / "the pictures").symlink_to(small_folder.removeprefix("folder:"))
    flags = ["--model=my net.py:net", "--dataset=folder:the pictures", "--train_dir=a run"]
    flags += ["--max_steps=1", "--batch_size=40", "--precision=float32", "--eval_every_epochs=0", "--num_gpus=2"]

    def start(text):
        environment = os.environ | {"PYTHONPATH": ""}
        return subprocess.Popen(text, shell=True, cwd=place, env=environment, stdout=-1, stderr=-2, text=True)

    training = start(shlex.join([sys.executable, str(ROOT / "scripts/train.py"), *flags]))
    out, _ = training.communicate(timeout=100)
    assert training.returncode == 0, out
    board, evaluate, predict = (line.strip() for line in out.partition("next:\n")[2].splitlines())
    assert "'--dataset=folder:the pictures'" in evaluate
    pasted = [start(f"{board} --inspect"), start(evaluate), start(predict)]
    outputs = [process.communicate(timeout=100)[0] for process in pasted]
    assert [process.returncode for process in pasted] == [0, 0, 0], outputs
    assert "a run/train" in outputs[0]
    assert "a run at step 1: folder:" in outputs[1] and "most often taken for" in outputs[1]
    assert "picture.jpg" in outputs[2] and outputs[2].count(" %") == 3


def test_data_dir_is_printed_where_it_is_read():
    config = TrainConfig(dataset="auto", data_dir="prepared sets")
    assert "'--data_dir=prepared sets'" in next_commands(config, "")[1]
    assert "--data_dir" not in next_commands(config, "SYNTHETIC DATA, NOT CIFAR-10")[1]


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Return the programs of an environment below a directory with a space; this process is its cifar-towers-train."""
    programs = tmp_path / "my env" / "bin"
    programs.mkdir(parents=True)
    for name in ("python", "cifar-towers-train", "cifar-towers-compare-runs"):
        (programs / name).touch(0o755)
    monkeypatch.setattr(sys, "argv", [str(programs / "cifar-towers-train")])
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    return programs


def test_console_scripts_are_named_if_one_was_started(programs, monkeypatch):
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

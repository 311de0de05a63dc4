"""The commands that programs print run when they are pasted into a shell."""

import shutil
import subprocess
import sys
from pathlib import Path

from PIL import Image

from cifar_towers.config import TrainConfig
from cifar_towers.reporting.run_logger import next_commands
from tests.helpers.programs import call

ROOT = Path(__file__).parents[2]


def test_printed_commands_run_when_pasted(tmp_path, small_folder, monkeypatch, capsys):
    """Train a net and pictures of the user's own in a directory with a space."""
    place = tmp_path / "my work"
    bin = tmp_path / "my env/bin"
    for directory in (place, bin):
        directory.mkdir(parents=True)
    for name in ("tensorboard", "cifar-towers"):
        (bin / name).write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
        (bin / name).chmod(0o755)
    # of an environment that is not activated
    monkeypatch.setattr(sys, "executable", str(bin / "python"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    shutil.copy(ROOT / "tests/helpers/nets.py", place / "my net.py")
    Image.new("RGB", (32, 32), "red").save(place / "picture.jpg")
    (place / "the pictures").symlink_to(small_folder.removeprefix("folder:"))
    monkeypatch.chdir(place)
    flags = ["--model=my net.py:plain", "--dataset=folder:the pictures", "--train_dir=a run"]
    flags += [
        "--max_steps=1",
        "--batch_size=40",
        "--precision=float32",
        "--eval_every_epochs=0",
        "--num_gpus=1",
    ]

    def run(*arguments):
        assert call(monkeypatch, *arguments) == 0
        return capsys.readouterr().out

    printed = [line.strip() for line in run("train", *flags).partition("next:\n")[2].splitlines()]
    pasted = [
        subprocess.run(line, shell=True, capture_output=True, text=True, check=True).stdout
        for line in printed
    ]
    board, evaluate, predict = map(str.splitlines, pasted)

    assert board == ["--logdir=a run"]
    assert list(Path("a run/train").glob("events*"))
    assert "--dataset=folder:the pictures" in evaluate
    assert "folder:" in run(*evaluate)
    assert "picture.jpg" in run(*predict)


def test_data_dir_is_printed_where_it_is_read():
    config = TrainConfig(data_dir="prepared sets")
    assert "'--data_dir=prepared sets'" in next_commands(config)[1]
    config = TrainConfig(data_dir="prepared sets", dataset="synthetic")
    assert "--data_dir" not in next_commands(config)[1]

"""The programs as a user starts them: exit codes, messages, signals."""

import json
import logging
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from cifar_towers.cli import main
from cifar_towers.config.programs import RunsConfig
from cifar_towers.errors import (
    DataError,
    DivergedError,
    Interrupted,
    RunError,
    UsageError,
    WorkerLostError,
)
from tests.helpers.configs import net
from tests.helpers.messages import lines_with
from tests.helpers.programs import call, finish, start

ROOT = Path(__file__).parents[2]
MODEL = f"--model={net('plain')}"
TINY = [
    "--dataset=synthetic",
    MODEL,
    "--shift=0",
    "--learning_rate=0.001",
    "--batch_size=40",
    "--precision=float32",
]


@pytest.fixture
def tiny(small_folder):
    """Return flags of a run that starts quickly."""
    return [*TINY, f"--dataset={small_folder}", "--epochs=10000", "--eval_every_epochs=0"]


@pytest.fixture
def main_here(monkeypatch):
    """Return `main.main`, which leaves the signals and the logging of this process as they are."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    logger = logging.getLogger("cifar_towers")
    level = logger.level
    yield main.main
    logger.setLevel(level)


def wait_until(happened, timeout=90):
    deadline = time.monotonic() + timeout
    while not happened():
        assert time.monotonic() < deadline, f"nothing happened within {timeout} seconds"
        time.sleep(0.05)


REFUSALS = [  # arguments, exit code, what the message must mention
    (["trian"], 2, "'trian'"),
    (["train", "--batch_sise=3"], 2, "batch_size"),
    (["train", "--model=nowhere.py:make"], 2, "/nowhere.py"),
    (["train", "--model=no_such_package.nets:make"], 2, "no_such_package.nets"),
    (["predict", "picture.png"], 2, "--train_dir"),
    (["predict", "--train_dir=runs/nowhere", "picture.png"], 2, "runs/nowhere"),
    (["launch", "speed94"], 2, "'speed94'"),
    (["train", "--dataset=folder:nowhere"], 3, "/nowhere"),
]


@pytest.mark.parametrize(("arguments", "code", "mention"), REFUSALS)
def test_error_is_one_line_and_an_exit_code(main_here, capsys, arguments, code, mention):
    assert main_here(arguments) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert mention in line


def test_help_and_refusals_import_nothing_slow():
    asked = [
        ["--help"],
        *([name, "--help"] for name in main.PROGRAMS),
        *(arguments for arguments, *_ in REFUSALS[:-1]),
    ]
    code = f"""
import contextlib, sys
from cifar_towers.cli.main import main
for arguments in {asked}:
    with contextlib.suppress(SystemExit):
        main(arguments)
sys.exit(bool({{"numpy", "tensorflow", "keras", "matplotlib", "rich"}} & {{*sys.modules}}))
"""
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, cwd=ROOT)


def test_docs_list_the_exit_codes_of_the_help_text(main_here, capsys):
    assert main_here(["--help"]) == 0

    page = (ROOT / "docs/reference.md").read_text().partition("## Exit codes")[2]
    codes = {
        str(error.exit_code)
        for error in (RunError, UsageError, DataError, DivergedError, WorkerLostError)
    }
    for text in (capsys.readouterr().out.partition("Exit codes:")[2], page):
        assert {"0", *codes, "130", "138", "143"} <= {*re.findall(r"\d+", text)}


def test_an_interrupted_program_says_where_and_exits_as_a_shell_does(
    main_here, monkeypatch, capsys
):
    program = Mock(side_effect=Interrupted(signal.SIGTERM, "saved step 3"), __doc__="Stop.")
    monkeypatch.setitem(main.PROGRAMS, "runs", (program, RunsConfig))
    assert main_here(["runs"]) == 143
    assert lines_with(capsys.readouterr().err, "step 3")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_saves_and_the_same_command_resumes(tmp_path, tiny, number, code):
    flags = [*tiny, f"--train_dir={tmp_path}", "--num_gpus=2", "--summary_every_steps=10"]
    process = start("train", *flags)
    metrics = tmp_path / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 3)
    process.send_signal(number)
    exit_code, out, err = finish(process)

    assert exit_code == code
    assert "Traceback" not in err
    # a pipe gets plain lines
    assert "\x1b" not in out
    assert "\r" not in out

    saved = int(re.search(r"saved step (\d+)", err)[1])
    exit_code, out, err = finish(start("train", *flags, f"--max_steps={saved + 4}"))

    assert exit_code == 0, err
    assert lines_with(out, "resuming", f"step {saved}"), err


@pytest.mark.slow
def test_another_process_gives_the_same_accuracy_though_the_output_disk_was_full(tmp_path, tiny):
    flags = ["--num_gpus=2", f"--train_dir={tmp_path}"]
    with open("/dev/full", "w") as full:
        code, _, err = finish(start("train", *tiny, "--max_steps=4", *flags, stdout=full))

    assert code == 0, err

    result = json.loads((tmp_path / "result.json").read_text())
    # loading the data must not initialize TensorFlow before the towers are set up
    code, out, err = finish(start("evaluate", *flags, MODEL, "--json", "--precision=float32"))

    assert code == 0, err
    assert json.loads(out)["accuracy"] == pytest.approx(
        result["evaluations"][0]["accuracy"], abs=0.001
    )


def test_an_abort_while_tensorflow_is_imported_loses_no_message(tmp_path):
    """TensorFlow ends the process in native code if the processor lacks instructions that it is
    compiled for.
    """
    library = "import os\nos.write(2, b'compiled to use AVX2\\n')\nos.abort()\n"
    (tmp_path / "tensorflow.py").write_text(library)
    flags = [*TINY, f"--train_dir={tmp_path / 'run'}"]
    code, _, err = finish(start("train", *flags, PYTHONPATH=f"{tmp_path}:{ROOT}"))

    assert code == -signal.SIGABRT
    assert "compiled to use AVX2" in err


@pytest.mark.parametrize(
    ("arguments", "mention"),
    [
        (["--num_workers=3"], "batch_size=1024"),
        (["--num_workers=5", "--", "--batch_size=999"], "995 and 1000"),
        (["--", "--strategy=multi_worker"], "TF_CONFIG='{"),
        (["--", "--seeds=0,x"], "seeds=0,x"),
        (["--", "--overwrite"], "--overwrite"),
        (["--num_workers=2", "--", "--strategy=mirrored"], "strategy=mirrored"),
    ],
)
def test_launcher_checks_the_flags_of_the_training(monkeypatch, arguments, mention):
    with pytest.raises(UsageError, match=mention):
        call(monkeypatch, "launch", *arguments)


def test_workers_train_the_default_recipe(monkeypatch):
    commands = []
    monkeypatch.setattr(
        main.launcher, "launch", lambda command, *others: commands.append(command) or 0
    )
    assert call(monkeypatch, "launch", "--num_workers=2") == 0
    # the program then chooses the recipe
    assert commands == [[sys.executable, "-m", "cifar_towers", "train", "--strategy=multi_worker"]]

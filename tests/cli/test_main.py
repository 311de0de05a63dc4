"""The programs as a user starts them: exit codes, messages, signals."""

import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cifar_towers.cli import main
from cifar_towers.errors import DataError, DivergedError, RunError, UsageError, WorkerLostError
from tests.messages import lines_with
from tests.programs import call, finish, start

ROOT = Path(__file__).parents[2]
SLOW = pytest.mark.slow
TINY = ["--dataset=synthetic", "--model=cifarnet", "--crop=24", "--shift=0", "--batch_size=40", "--precision=float32"]
TOO_LARGE_BATCH = ["--batch_size=20000", "--dataset=synthetic"]


@pytest.fixture
def tiny(small_folder):
    """Return flags of a run that starts quickly."""
    return [*TINY, f"--dataset={small_folder}", "--epochs=1000", "--eval_every_epochs=0"]


def test_warnings_are_printed_to_what_standard_error_is_then(monkeypatch):
    """A live progress line replaces it, and prints above the line what is written there."""
    handler = main.StderrHandler()
    for message in ("disk full", "disk still full"):
        monkeypatch.setattr(sys, "stderr", written := io.StringIO())
        handler.handle(logging.makeLogRecord({"msg": message}))
        assert written.getvalue() == f"{message}\n"


def wait_until(happened, timeout=90):
    deadline = time.monotonic() + timeout
    while not happened() and time.monotonic() < deadline:
        time.sleep(0.05)


def answers(process, number):
    """Return whether a process has a handler for a signal, as the kernel has it."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt")).split()[1]
    return bool(int(caught, 16) >> number - 1 & 1)


@pytest.mark.parametrize("flags", [["--help"], *([name, "--help"] for name in main.PROGRAMS)], ids=" ".join)
def test_help_imports_nothing_slow(flags):
    slow = "{'numpy', 'tensorflow', 'keras', 'matplotlib', 'rich'} & {*sys.modules}"
    source = f"import sys; from cifar_towers.cli.main import main; main({flags})"
    checked = f"try:\n {source}\nfinally: print({slow})"
    done = subprocess.run([sys.executable, "-c", checked], capture_output=True, text=True, cwd=ROOT)
    assert "cifar-towers" in done.stdout and done.stdout.endswith("\nset()\n") and not done.stderr


@pytest.mark.parametrize(
    ("program", "arguments", "code", "message"),
    [
        ("trian", [], 2, "'trian' is no program; write: cifar-towers <program>, one of train, evaluate"),
        ("train", ["--batch_sise=3"], 2, "Did you mean: batch_size"),
        pytest.param("train", [*TOO_LARGE_BATCH, "--train_dir={}"], 2, "more than the 10000", marks=SLOW),
        ("predict", ["picture.png"], 2, "which run? give --train_dir"),
        ("predict", ["--train_dir=runs/nowhere", "picture.png"], 2, "runs/nowhere is not the directory of a run"),
        ("train", ["--dataset=folder:nowhere"], 3, "No such file or directory"),
        ("train", ["--dataset=mnits"], 3, "Dataset mnits not found."),
        ("launch", ["speed94"], 2, "'speed94' is not a flag; settings are given as --name=value; --help lists them"),
        ("train", ["--model=nowhere.py:make"], 2, f"there is no file {Path.cwd()}/nowhere.py"),
        ("train", ["--model=no_such_package.nets:make"], 2, "there is no module no_such_package.nets"),
        ("evaluate", ["--train_dir=runs/one", "--model=nowhere.py:make"], 2, f"there is no file {Path.cwd()}/nowhere"),
        pytest.param("compare-runs", ["docs", "docs"], 2, "docs is not the directory of a run: it has", marks=SLOW),
    ],
)
def test_error_is_one_line_and_an_exit_code(tmp_path, program, arguments, code, message):
    """A wrong command line is refused before TensorFlow is imported; these here end in its import."""
    variables = {}
    if code == 2 and program != "compare-runs" and arguments[:2] != TOO_LARGE_BATCH:
        (tmp_path / "tensorflow.py").write_text("import os\nos.abort()\n")
        variables = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    exit_code, out, err = finish(start(program, *(word.format(tmp_path) for word in arguments), **variables))
    assert exit_code == code and message in err
    assert "Traceback" not in out + err
    assert len([line for line in err.splitlines() if line.startswith(("usage:", "data:"))]) == 1


def test_the_script_is_the_program(tmp_path):
    done = subprocess.run([sys.executable, ROOT / "scripts/train.py", "--epochs=-1"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr == "usage: epochs=-1.0 is too small; the minimum is 0\n"


def test_docs_list_the_exit_codes_of_the_help_text(capsys):
    assert main.main(["--help"]) == 0
    listed = dict(re.findall(r"(\d+(?:/\d+)*) ([a-z ]+)[,.]", capsys.readouterr().out.partition("Exit codes:")[2]))
    errors = {str(error.exit_code) for error in (RunError, UsageError, DataError, DivergedError, WorkerLostError)}
    assert set(listed) == {"0", *errors, "130/138/143"}
    rows = re.findall(r"^\| ([\d, ]+) \|", (ROOT / "docs/reference.md").read_text(), re.M)
    assert {row.strip().replace(", ", "/") for row in rows} >= set(listed)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=SLOW)])
def test_signal_saves_and_the_same_command_resumes(tmp_path, tiny, number, code):
    steps = 4000 if number == signal.SIGINT else 60
    flags = [f"--max_steps={steps}", f"--train_dir={tmp_path}", "--num_gpus=2", "--summary_every_steps=1"]
    process = start("train", *tiny, *flags)
    metrics = tmp_path / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 3)
    process.send_signal(number)
    exit_code, _, err = finish(process)
    assert exit_code == code and lines_with(err, "saved", "step ") and "Traceback" not in err
    if number == signal.SIGTERM:  # resuming is the same
        exit_code, out, err = finish(start("train", *tiny, *flags))
        assert exit_code == 0 and lines_with(out, "resuming", "step "), err


def test_a_short_run_prints_no_control_characters(tmp_path, tiny):
    code, out, err = finish(start("train", *tiny, "--max_steps=4", f"--train_dir={tmp_path}", "--num_gpus=2"))
    assert code == 0 and "Traceback" not in err
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["step"] == 4 and f"sha256 {result['weights_sha256'][:16]}\n" in out
    assert "\x1b" not in out and "\r" not in out
    assert lines_with(out, "4 steps", "40") and lines_with(out, "2 towers", "20 images", "/CPU:0, /CPU:1")
    assert re.search(r"^evaluating on \d+ test images$", out, re.MULTILINE)  # so that a pipe is not silent meanwhile
    assert lines_with(err, "no GPU", "2 towers")


@pytest.mark.slow
def test_another_process_gives_the_same_weights_though_the_output_disk_is_full(tmp_path, tiny):
    code, _, err = finish(start("train", *tiny, "--max_steps=4", f"--train_dir={tmp_path / 'one'}"))
    assert code == 0, err
    with open("/dev/full", "w") as full:
        process = start("train", *tiny, "--max_steps=4", f"--train_dir={tmp_path / 'other'}", stdout=full)
        code, _, err = finish(process)
    assert code == 0, err
    first, second = (json.loads((tmp_path / name / "result.json").read_text()) for name in ("one", "other"))
    assert first["step"] == second["step"] == 4
    assert first["weights_sha256"] == second["weights_sha256"]
    assert first["evaluations"] == second["evaluations"]
    # loading the data must not initialize TensorFlow before the towers are set up
    flags = [f"--train_dir={tmp_path / 'one'}", "--json", "--precision=float32", "--num_gpus=2"]
    code, out, err = finish(start("evaluate", *flags))
    assert code == 0, err
    assert json.loads(out)["accuracy"] == pytest.approx(first["evaluations"][0]["accuracy"], abs=0.001)


def test_an_abort_while_tensorflow_is_imported_loses_no_message(tmp_path):
    """TensorFlow ends the process in native code if the processor lacks instructions that it is compiled for."""
    library = "import os\nos.write(2, b'compiled to use AVX2\\n')\nos.abort()\n"
    (tmp_path / "tensorflow.py").write_text(library)
    code, _, err = finish(start("train", *TINY, PYTHONPATH=f"{tmp_path}:{ROOT}"))
    assert code == -signal.SIGABRT and "compiled to use AVX2" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num_workers=5", "--", "--batch_size=999"], "cannot be shared by 5 towers; 995 and 1000 can"),
        (["--num_workers=2", "--", "--strategy=multi_worker", "--workers=a:5000,b:5000"], "workers on this machine"),
        (["--", "--seeds=0,x"], "seeds=0,x is not a list of different"),
    ],
)
def test_launcher_checks_the_flags_of_the_training(monkeypatch, arguments, message):
    with pytest.raises(UsageError) as caught:
        call(monkeypatch, "launch", *arguments)
    assert message in str(caught.value)


def test_workers_train_the_default_recipe(monkeypatch):
    commands = []
    monkeypatch.setattr(main.launcher, "launch", lambda command, *others: commands.append(command) or 0)
    assert call(monkeypatch, "launch", "--num_workers=2") == 0
    (command,) = commands
    assert command == [sys.executable, "-m", "cifar_towers", "train"]  # no flags: the program then chooses the recipe
    with pytest.raises(UsageError, match="batch_size=1024 .*3 towers"):
        call(monkeypatch, "launch", "--num_workers=3")


def test_a_closed_pipe_ends_a_program_in_silence(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    code, _, err = finish(start("runs", f"--runs_dir={tmp_path}", stdout=writer))
    os.close(writer)
    assert code == 1 and not err


def test_signal_before_the_first_step(tmp_path):
    process = start("train", *TINY, f"--train_dir={tmp_path}")
    wait_until(lambda: answers(process, signal.SIGTERM))
    process.send_signal(signal.SIGTERM)
    exit_code, _, err = finish(process)
    assert exit_code == 143 and "Traceback" not in err

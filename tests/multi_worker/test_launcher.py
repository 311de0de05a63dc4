"""The launcher, with a small program in place of a training."""

import os
import signal
import sys
import threading
import time

import pytest

from cifar_towers.cli.main import flag_settings, help_text
from cifar_towers.config.programs import LaunchConfig
from cifar_towers.errors import DataError, DivergedError, RunError, UsageError, WorkerLostError, interrupt_exit_code
from cifar_towers.multi_worker import launcher

PROGRAM = """
import os, sys, time
index = next((int(a.split("=")[1]) for a in sys.argv if a.startswith("--worker_index")), 0)
with open(sys.argv[1], "a") as file:
    print(index, len(os.sched_getaffinity(0)), *sys.argv[2:], file=file)
starts = sum(line.startswith(str(index)) for line in open(sys.argv[1]))
"""


@pytest.fixture
def launch(tmp_path):
    """launch(program, ...) -> (exit code, a line of words for each start, lines that the launcher logged)."""

    def run(program, num_workers=0, max_restarts=3):
        logged, log = [], tmp_path / "log"
        command = [sys.executable, "-c", PROGRAM + program, str(log), "--flag"]
        code = launcher.launch(command, num_workers, max_restarts, logged.append)
        return code, [line.split() for line in log.read_text().splitlines()], logged

    return run


FINAL = [0, UsageError.exit_code, DataError.exit_code, DivergedError.exit_code]
RESTARTED = [RunError.exit_code, WorkerLostError.exit_code, *map(interrupt_exit_code, (signal.SIGKILL, signal.SIGTERM))]


@pytest.mark.parametrize(("code", "num_starts"), [(code, 1) for code in FINAL] + [(code, 3) for code in RESTARTED])
def test_restarts_only_after_exit_codes_that_may_not_recur(launch, code, num_starts):
    exit_code, starts, logged = launch(f"sys.exit({code})", max_restarts=2)
    assert exit_code == code and len(starts) == num_starts and len(logged) == num_starts - 1
    assert [line[2:] for line in starts] == [
        ["--flag", *["--nooverwrite"] * bool(restart)] for restart in range(num_starts)
    ]


def test_the_help_names_the_exit_codes_after_which_there_is_no_restart():
    text = " ".join(help_text(flag_settings(LaunchConfig), "", is_full=True).split())
    assert "restarts; none after exit codes {}, {}, {} and {}".format(*launcher.FINAL) in text


def test_no_restart_after_success(launch):
    code, starts, logged = launch("sys.exit(5 if starts < 3 else 0)")
    assert code == 0 and len(starts) == 3 and logged[-1] == "the process ended with exit code 5; restart 2 of at most 3"


def test_workers_get_an_index_and_a_share_of_the_cores(launch):
    code, starts, _ = launch("sys.exit(0)", num_workers=2)
    assert code == 0 and sorted(line[0] for line in starts) == ["0", "1"]
    flags = [dict(flag.split("=") for flag in line[3:]) for line in starts]
    assert flags[0]["--workers"] == flags[1]["--workers"] and len(set(flags[0]["--workers"].split(","))) == 2
    assert {flag["--strategy"] for flag in flags} == {"multi_worker"}
    cores = len(os.sched_getaffinity(0))
    assert sum(int(line[1]) for line in starts) == (cores if cores > 1 else 2)


def test_fewer_gpus_than_workers_are_refused(launch, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(UsageError, match="num_workers=2 needs a GPU for each, and this machine has 1"):
        launch("sys.exit(0)", num_workers=2)


def test_failed_worker_ends_the_others_and_is_named(launch, monkeypatch, capfd):
    monkeypatch.setattr(launcher, "EXIT_TIMEOUT_SECONDS", 0.2)
    program = """
if index == 1:
    while len(open(sys.argv[1]).readlines()) % 3: time.sleep(0.01)  # until all have started
    os.write(1, b'last words \\xff'); sys.exit(5)
time.sleep(60)"""
    code, starts, logged = launch(program, num_workers=3, max_restarts=1)
    assert code == 5 and len(starts) == 6
    assert logged == ["worker 1 ended with exit code 5; restart 1 of at most 1"]
    assert capfd.readouterr().err.count("worker 1: last words") == 2


def test_signal_is_forwarded_and_prevents_restarts(launch):
    threading.Timer(1.0, os.kill, [os.getpid(), signal.SIGTERM]).start()
    start = time.monotonic()
    code, starts, logged = launch("time.sleep(60)", num_workers=2)
    assert code == 143 and len(starts) == 2 and not logged and time.monotonic() - start < 30

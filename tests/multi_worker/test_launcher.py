"""Starting, and starting again: the launcher with a program that ends as it is told in place of a training."""

import os
import signal
import sys
import threading
import time

import pytest

from cifar_towers.cli.shutdown import ShutdownHandler
from cifar_towers.multi_worker import launcher

PROGRAM = f"""
import os, sys, time
index = next((int(a.split("=")[1]) for a in sys.argv if a.startswith("--worker_index")), 0)
with open(sys.argv[1], "a") as file:
    print(index, os.environ["{launcher.LAUNCH_VARIABLE}"], len(os.sched_getaffinity(0)), *sys.argv[2:], file=file)
starts = sum(line.startswith(str(index)) for line in open(sys.argv[1]))
"""


@pytest.fixture
def launch(tmp_path, monkeypatch):
    """launch(ends as, workers, restarts) -> (exit code, what each start was told, what the launcher said)."""

    monkeypatch.setenv(launcher.LAUNCH_VARIABLE, "")  # and so as it was afterwards

    def run(ending, num_workers=0, max_restarts=3, stop=None):
        said, log = [], tmp_path / "log"
        command = [sys.executable, "-c", PROGRAM + ending, str(log), "--flag"]
        code = launcher.launch(command, num_workers, max_restarts, said.append, stop or ShutdownHandler())
        return code, [line.split() for line in log.read_text().splitlines()], said

    return run


@pytest.mark.parametrize(("code", "starts"), [(0, 1), (1, 3), (2, 1), (3, 1), (4, 1), (5, 3), (137, 3), (143, 3)])
def test_what_another_start_may_mend_is_started_again(launch, code, starts):
    found, told, said = launch(f"sys.exit({code})", max_restarts=2)
    assert found == code and len(told) == starts and len(said) == starts - 1
    assert len({line[1] for line in told}) == 1  # all are of one launch
    assert all(line[3:] == ["--flag"] for line in told)


def test_it_ends_when_a_start_does_well(launch):
    code, told, said = launch("sys.exit(5 if starts < 3 else 0)")
    assert code == 0 and len(told) == 3 and said[-1] == "it ended with exit code 5; restart 2 of at most 3"


def test_workers_get_their_places_and_shares(launch):
    code, told, _ = launch("sys.exit(0)", num_workers=2)
    assert code == 0 and sorted(line[0] for line in told) == ["0", "1"]
    flags = [dict(flag.split("=") for flag in line[4:]) for line in told]
    assert flags[0]["--workers"] == flags[1]["--workers"] and len(set(flags[0]["--workers"].split(","))) == 2
    assert {flag["--strategy"] for flag in flags} == {"multi_worker"}
    cores = len(os.sched_getaffinity(0))
    assert sum(int(line[2]) for line in told) == (cores if cores > 1 else 2)


def test_one_that_fails_ends_the_others_and_is_named(launch, monkeypatch, capfd):
    monkeypatch.setattr(launcher, "PATIENCE", 0.2)
    ending = """
if index == 1:
    while len(open(sys.argv[1]).readlines()) % 3: time.sleep(0.01)  # until all have begun
    os.write(1, b'last words \\xff'); sys.exit(5)
time.sleep(60)"""
    code, told, said = launch(ending, num_workers=3, max_restarts=1)
    assert code == 5 and len(told) == 6
    assert said == ["worker 1 ended with exit code 5; restart 1 of at most 1"]
    assert capfd.readouterr().err.count("worker 1: last words") == 2


def test_a_signal_to_it_is_passed_on_and_nothing_is_started_again(launch):
    stop = ShutdownHandler()
    threading.Timer(1.0, setattr, [stop, "received_signal", signal.SIGTERM]).start()
    start = time.monotonic()
    code, told, said = launch("time.sleep(60)", num_workers=2, stop=stop)
    assert code == 143 and len(told) == 2 and not said and time.monotonic() - start < 30


def test_a_second_signal_leaves_no_worker_behind(launch):
    """Not even one that is deaf to the first."""
    stop = ShutdownHandler()
    threading.Timer(1.0, lambda: stop.before_exit()).start()
    code, told, _ = launch("time.sleep(60)", num_workers=2, max_restarts=0, stop=stop)
    assert code == 137 and len(told) == 2

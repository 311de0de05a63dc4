"""The launcher, with a small program in place of a training."""

import json
import os
import signal
import sys

import pytest

from cifar_towers.errors import (
    DataError,
    DivergedError,
    RunError,
    UsageError,
    WorkerLostError,
    interrupt_exit_code,
)
from cifar_towers.multi_worker import launcher

PROGRAM = """
import json, os, sys, time
cluster = os.environ.get("TF_CONFIG", '{"task": {"index": 0}}')
index = json.loads(cluster)["task"]["index"]
with open(sys.argv[1], "a") as file:
    print(index, len(os.sched_getaffinity(0)), *sys.argv[2:], file=file)
starts = sum(line.startswith(str(index)) for line in open(sys.argv[1]))
"""


@pytest.fixture
def launch(tmp_path):
    """launch(program, ...) -> (exit code, a line of words for each start, lines that the launcher
    logged).
    """

    def run(program, num_workers=0, max_restarts=3):
        logged = []
        log = tmp_path / "log"
        command = [sys.executable, "-c", PROGRAM + program, str(log), "--flag"]
        code = launcher.launch(command, num_workers, max_restarts, logged.append)
        return code, [line.split() for line in log.read_text().splitlines()], logged

    return run


FINAL = [0, UsageError.exit_code, DataError.exit_code, DivergedError.exit_code]
RESTARTED = [
    RunError.exit_code,
    WorkerLostError.exit_code,
    *map(interrupt_exit_code, (signal.SIGKILL, signal.SIGTERM)),
]


EXITS = [
    *((code, code, 1) for code in FINAL),
    *((code, code, 3) for code in RESTARTED),
    ("5 if starts < 2 else 0", 0, 2),
]


@pytest.mark.parametrize(("exits", "code", "num_starts"), EXITS)
def test_restarts_only_after_exit_codes_that_may_not_recur(launch, exits, code, num_starts):
    exit_code, starts, logged = launch(f"sys.exit({exits})", max_restarts=2)
    assert exit_code == code
    assert len(starts) == num_starts
    restarts = [line for line in logged if "; restart " in line]
    assert len(restarts) == num_starts - 1
    assert logged[len(restarts) :] == (
        [f"the process ended with exit code {code}; no restart is left"] if num_starts == 3 else []
    )
    assert [line[2:] for line in starts] == [["--flag"]] * num_starts


def test_workers_get_a_cluster_and_a_share_of_the_cores(launch, monkeypatch, capfd):
    monkeypatch.setenv("TF_CONFIG", "{}")  # is replaced in each worker
    code, starts, _ = launch("print(cluster, flush=True)", num_workers=2)

    assert code == 0
    assert sorted(line[0] for line in starts) == ["0", "1"]
    assert [line[2:] for line in starts] == [["--flag"]] * 2

    printed = capfd.readouterr()
    first = json.loads(printed.out)
    second = json.loads(printed.err.removeprefix("worker 1: "))

    assert first["cluster"] == second["cluster"]
    assert len({*first["cluster"]["worker"]}) == 2
    assert first["task"] == {"type": "worker", "index": 0}
    assert second["task"] == {"type": "worker", "index": 1}

    cores = len(os.sched_getaffinity(0))
    assert sum(int(line[1]) for line in starts) == (cores if cores > 1 else 2)


def test_workers_meet_without_a_proxy(launch, monkeypatch, capfd):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    launch("print(os.environ['no_grpc_proxy'], flush=True)", num_workers=2)
    assert capfd.readouterr().out == "127.0.0.1\n"


def test_fewer_gpus_than_workers_are_refused(launch, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(UsageError, match="num_workers=2 .* 1;"):
        launch("sys.exit(0)", num_workers=2)


# a program that waits for the two others, or ends after a minute
ALL_STARTED = """deadline = time.monotonic() + 60
    while len(open(sys.argv[1]).readlines()) % 3 and time.monotonic() < deadline:
        time.sleep(0.01)
"""


def test_failed_worker_ends_the_others_and_is_named(launch, monkeypatch, capfd):
    monkeypatch.setattr(launcher, "EXIT_TIMEOUT_SECONDS", 0.2)
    last = "os.write(1, b'last words \\xff'); sys.exit(5)"
    program = f"if index == 1:\n    {ALL_STARTED}    {last}\ntime.sleep(60)"
    code, starts, logged = launch(program, num_workers=3, max_restarts=1)

    assert code == 5
    assert len(starts) == 6

    assert logged == [
        "worker 1 ended with exit code 5; restart 1 of at most 1",
        "worker 1 ended with exit code 5; no restart is left",
    ]
    assert capfd.readouterr().err.count("worker 1: last words") == 2


def test_signal_is_forwarded_and_prevents_restarts(launch):
    program = f"if index == 1:\n    {ALL_STARTED}    os.kill(os.getppid(), 15)\ntime.sleep(60)"
    code, starts, logged = launch(program, num_workers=3)
    assert code == 128 + signal.SIGTERM
    assert len(starts) == 3
    assert not logged

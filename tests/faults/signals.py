"""SIGTERM and SIGINT to whole runs: at random moments, in named phases, and twice.

During the steps, the first signal saves the step and ends the run with 128 + its number. At any
other time, and a second time, a signal kills the process. Then the run resumes from its newest
checkpoint.
"""

import functools
import itertools
import os
import re
import signal
import threading
import time
from collections.abc import Sequence

from tests.faults import hooks, runs
from tests.faults.harness import Experiment, Trial, check
from tests.faults.runs import Run
from tests.faults.subjects import OURS

SIGNALS = (signal.SIGTERM, signal.SIGINT)
SECOND_SIGNAL_SECONDS = 0.2  # after the first is recorded
IMMEDIATE_SECONDS = 0.5  # from a signal that kills to the end of the run

# Each phase: a part of the program, the first and last of its calls to be interrupted, at most so
# many seconds in
PHASES = {
    "loading the data": ("loading", 1, 1, 0.1),
    "tracing": ("averaging", 1, 1, 0.1),
    "the first step": ("step", 1, 1, 0.1),
    "a step": ("step", 2, runs.STEPS - 2, 0.01),
    "an evaluation": ("evaluation", 1, 3, 0.01),
    "a save": ("save", 1, runs.STEPS // 3 - 1, 0.03),
    "the final evaluation": ("evaluation", 4, 4, 0.01),
    "between steps": ("progress", 1, runs.STEPS, 0.0),
}
KILLED_IN = ("loading the data", "the final evaluation")


def interrupt(number: signal.Signals, trial: Trial) -> str:
    """Send a signal at a random moment."""
    with runs.interrupted_run(trial) as (run, script):
        return _send(trial, run, number, script)


def interrupt_script(at_exit: bool, trial: Trial) -> str:
    """Send a signal while the script imports TensorFlow, or while it ends after the result is
    written.
    """
    delay = trial.rng.uniform(0, 0.05) if at_exit else trial.rng.uniform(0.3, 3.0)
    with runs.train(OURS, trial.scratch, script=True) as run:
        if at_exit:
            run.wait_until(lambda: run.weights or run.exit_code is not None, "no result")
        run.wait(delay)
        return _send(trial, run, SIGNALS[trial.index % 2], script=True)


def _send(trial: Trial, run: Run, number: signal.Signals, script: bool) -> str:
    """Send a signal, SIGINT to the whole group as Ctrl-C does, and check how the run ends and
    resumes.
    """
    sent = time.monotonic()
    finished = bool(run.weights)
    recorded = run.records_signals()
    trial.details = (
        f"{'script' if script else 'run'}, {number.name} {sent - run.start:.3f} s after its start"
    )
    if run.exit_code is None:
        (os.killpg if number == signal.SIGINT else os.kill)(run.pid, number)
        run.wait()
        trial.response = run.end - sent
    if finished and run.exit_code == 0:
        return runs.finish(trial, script, run.saved, "had written its result")
    return _check_end(trial, run, number, recorded, script)


def _check_end(trial: Trial, run: Run, number: int, recorded: bool, script: bool = False) -> str:
    """Check how a run ended after one signal, which it was to record or to be killed by, and resume
    it.
    """
    step = max(run.steps, default=0)
    saved = run.saved
    if hooks.STARTED in run.output:  # before, Python may still answer SIGINT with one
        check("Traceback" not in run.output, "traceback")
    check(run.exit_code == (128 + number if recorded else -number), f"exit code {run.exit_code}")
    if recorded:
        check(saved == step, f"saved step {saved} of {step}")
        check(str(step) in hooks.SAVED.findall(run.output), "saved without a message")
    return runs.finish(trial, script, saved, "saved and ended" if recorded else "killed")


def interrupt_in(phases: Sequence[str], count: int, trial: Trial) -> str:
    """Send up to `count` signals in one of the phases: the second kills the run at once, and it can
    be resumed.
    """
    phase = phases[trial.index % len(phases)]
    number = SIGNALS[trial.index // len(phases) % 2]
    part, first, last, longest = PHASES[phase]
    call = trial.rng.randint(first, last)
    delay = trial.rng.uniform(0, longest)
    trial.details = f"{number.name} in {phase}, call {call}, {delay:.3f} s after its start"
    prepare = functools.partial(_send_during, part, call, delay, number, count)
    with runs.train(OURS, trial.scratch, prepare=prepare) as run:
        run.wait()
    sent = [float(moment) for moment in re.findall(r"signal sent at (\S+)", run.output)]
    check(sent, "phase not reached")
    trial.response = run.end - sent[-1]
    if len(sent) == 1:  # also of two, where the first killed the run, or ended it soon
        return _check_end(trial, run, number, phase not in KILLED_IN)
    late = trial.response > IMMEDIATE_SECONDS
    immediate = not late and run.exit_code == -number and "Traceback" not in run.output
    check(immediate, f"exit code {run.exit_code}{', late' if late else ''}")
    return runs.finish(trial, False, run.saved, "killed by the second")


def _send_during(part: str, call: int, delay: float, number: int, count: int) -> None:
    """Let another thread send signals to this process during the `call`-th call of a part.

    A second signal is sent after the program has recorded the first. Two before that count as one.
    """
    calls = itertools.count(1)

    def send():
        for index in range(count):
            while index and signal.getsignal(number) != signal.SIG_DFL:
                time.sleep(0.001)
            time.sleep(SECOND_SIGNAL_SECONDS if index else delay)
            os.write(1, f"signal sent at {time.monotonic():.4f}\n".encode())
            os.kill(os.getpid(), number)

    def start(*_, **__):
        if next(calls) == call:
            threading.Thread(target=send, daemon=True).start()

    hooks.before(part, start)


EXPERIMENTS = [
    Experiment(
        "SIGTERM at a random moment", (OURS,), 6, 80, functools.partial(interrupt, signal.SIGTERM)
    ),
    Experiment(
        "SIGINT at a random moment", (OURS,), 3, 30, functools.partial(interrupt, signal.SIGINT)
    ),
    Experiment("signal: the import", (OURS,), 2, 6, functools.partial(interrupt_script, False)),
    *(
        Experiment(f"signal: {name}", (OURS,), 2, 6, functools.partial(interrupt_in, [name], 1))
        for name in PHASES
    ),
    Experiment("signal: the exit", (OURS,), 2, 6, functools.partial(interrupt_script, True)),
    Experiment("second signal", (OURS,), 8, 32, functools.partial(interrupt_in, tuple(PHASES), 2)),
]

"""SIGTERM and SIGINT to whole runs: at random moments, in named phases, and twice.

During the steps, the first signal saves the step and ends the run with 128 + its number. At any other time, and a
second time, a signal kills the process. Then the run resumes from its newest checkpoint.
"""

import functools
import os
import re
import signal
import threading
import time
from collections.abc import Callable

from tests.faults import hooks, runs
from tests.faults.harness import Experiment, Trial, check
from tests.faults.runs import SCRIPT, SMALL, Run
from tests.faults.subjects import OURS

SIGNALS = (signal.SIGTERM, signal.SIGINT)
SECOND_SIGNAL_SECONDS = 0.2  # after the first is recorded
IMMEDIATE_SECONDS = 0.5  # from a signal that kills to the end of the run

# Each phase: a part of the program, the first and last of its calls to be interrupted, at most so many seconds in
PHASES = {
    "loading the data": ("loading", 1, 1, 0.1),
    "tracing": ("tracing", 1, 2, 0.1),  # once a tower
    "the first step": ("step", 1, 1, 0.1),
    "a step": ("step", 2, runs.STEPS - 2, 0.01),
    "an evaluation": ("evaluation", 1, 3, 0.01),
    "a save": ("save", 1, runs.STEPS // 3 - 1, 0.03),
    "the final evaluation": ("evaluation", 4, 5, 0.01),  # of raw and of averaged weights
    "between steps": ("progress", 1, runs.STEPS, 0.0),
}
KILLED_IN = ("loading the data", "the final evaluation")


def interrupt(number: signal.Signals, trial: Trial) -> str:
    """Send a signal at a random moment."""
    kind = runs.kind_of(trial)
    with runs.interrupted_run(trial, kind) as run:
        return _send(trial, run, number, kind)


def interrupt_script(at_exit: bool, trial: Trial) -> str:
    """Send a signal while the script imports TensorFlow, or while it ends after the result is written."""
    delay = trial.rng.uniform(0, 0.05) if at_exit else trial.rng.uniform(0.3, 3.0)
    with runs.train(OURS, trial.scratch, SCRIPT) as run:
        while at_exit and not run.weights and not run.wait(0.001):
            pass
        run.wait(delay)
        return _send(trial, run, SIGNALS[trial.index % 2], SCRIPT)


def _send(trial: Trial, run: Run, number: signal.Signals, kind: str) -> str:
    """Send a signal, SIGINT to the whole group as Ctrl-C does, and check how the run ends and resumes."""
    sent, finished, recorded = time.monotonic(), bool(run.weights), run.records_signals()
    trial.details = f"{kind} run, {number.name} {sent - run.start:.3f} s after its start"
    if run.exit_code is None:
        (os.killpg if number == signal.SIGINT else os.kill)(run.pid, number)
        run.wait()
        trial.details += f", ended {run.end - sent:.3f} s after the signal"
    if finished and run.exit_code == 0:
        return runs.finish(trial, kind, run.saved, "had written its result")
    return _check_end(trial, run, number, recorded, kind)


def _check_end(trial: Trial, run: Run, number: int, recorded: bool, kind: str = SMALL) -> str:
    """Check how a run ended after one signal, and resume it.

    Args:
      recorded: whether the program was to record the signal when it came, or to be killed.
    """
    step, saved = runs.last_recorded(run.directory), run.saved
    if hooks.STARTED in run.output:  # before, Python may still answer SIGINT with one
        check("Traceback" not in run.output, "traceback")
    if recorded:
        check(run.exit_code == 128 + number, f"exit code {run.exit_code}")
        check(saved == step, f"saved step {saved} of {step}")
        check(re.search(hooks.INTERRUPTED.format(step), run.output), "saved without a message")
    else:
        check(run.exit_code == -number, f"exit code {run.exit_code}")
    return runs.finish(trial, kind, saved, "saved and ended" if recorded else "killed")


def interrupt_in(phase: str, trial: Trial) -> str:
    """One signal in a phase."""
    number = SIGNALS[trial.index % 2]
    run, _ = _signalled_run(trial, phase, number, count=1)
    return _check_end(trial, run, number, phase not in KILLED_IN)


def interrupt_twice(trial: Trial) -> str:
    """Two signals, the first in each phase in turn: the second kills the run at once, and it can be resumed."""
    phase = list(PHASES)[trial.index % len(PHASES)]
    number = SIGNALS[trial.index // len(PHASES) % 2]
    run, sent = _signalled_run(trial, phase, number, count=2)
    if len(sent) == 1:  # which killed the run, or ended it soon
        return _check_end(trial, run, number, phase not in KILLED_IN)
    late = run.end - sent[-1] > IMMEDIATE_SECONDS
    immediate = not late and run.exit_code == -number and "Traceback" not in run.output
    check(immediate, f"exit code {run.exit_code}{', late' if late else ''}")
    return runs.finish(trial, SMALL, run.saved, "killed by the second")


def _signalled_run(trial: Trial, phase: str, number: signal.Signals, count: int) -> tuple[Run, list[float]]:
    """Return a run that got up to `count` signals in a phase, and the times of these signals."""
    part, first, last, longest = PHASES[phase]
    call, delay = trial.rng.randint(first, last), trial.rng.uniform(0, longest)
    prepare = functools.partial(hooks.wrap, part, functools.partial(_send_during, call, delay, number, count))
    with runs.train(OURS, trial.scratch, prepare=prepare) as run:
        run.wait()
    sent = [float(moment) for moment in re.findall(r"signal sent at (\S+)", run.output)]
    trial.details = f"{number.name} in {phase}, call {call}, {delay:.3f} s after its start"
    check(sent, "phase not reached")
    trial.details += f", ended {run.end - sent[-1]:.3f} s after the signal"
    trial.details += f" ({len(sent)} sent)" if count > 1 else ""
    return run, sent


def _send_during(call: int, delay: float, number: int, count: int, function: Callable) -> Callable:
    """Wrap `function`: during its `call`-th call another thread sends signals to this process.

    A second signal is sent after the program has recorded the first. Two before that count as one.
    """
    calls = 0

    def send():
        for index in range(count):
            while index and signal.getsignal(number) != signal.SIG_DFL:
                time.sleep(0.001)
            time.sleep(SECOND_SIGNAL_SECONDS if index else delay)
            os.write(1, f"signal sent at {time.monotonic():.4f}\n".encode())
            os.kill(os.getpid(), number)

    def wrapped(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == call:
            threading.Thread(target=send, daemon=True).start()
        return function(*args, **kwargs)

    return wrapped


EXPERIMENTS = [
    Experiment("SIGTERM at a random moment", (OURS,), 6, 80, functools.partial(interrupt, signal.SIGTERM)),
    Experiment("SIGINT at a random moment", (OURS,), 3, 30, functools.partial(interrupt, signal.SIGINT)),
    Experiment("signal: the import", (OURS,), 2, 6, functools.partial(interrupt_script, False)),
    *(Experiment(f"signal: {name}", (OURS,), 2, 6, functools.partial(interrupt_in, name)) for name in PHASES),
    Experiment("signal: the exit", (OURS,), 2, 6, functools.partial(interrupt_script, True)),
    Experiment("second signal", (OURS,), len(PHASES), 4 * len(PHASES), interrupt_twice),
]

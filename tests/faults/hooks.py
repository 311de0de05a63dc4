"""Everything the trials know of the training program's internals: where to intervene, and what it logs."""

import functools
import re
import sys
from collections.abc import Callable, Sequence

from cifar_towers import trainer
from cifar_towers.checkpointing.run_directory import RunDirectory
from cifar_towers.cli import main
from cifar_towers.data import sources, synthetic
from cifar_towers.reporting.console import Progress
from cifar_towers.training import step
from cifar_towers.training.step import StepRunner

STARTED = "writing to"
RESUMED = re.compile(r"(?:resuming from|is complete at) step (\d+)")
SAVED = re.compile(r"saved step (\d+)")
INTERRUPTED = r"saved step {0}\b"  # a run that is interrupted after this step
SKIPPED = r"step {0} was skipped \(1 in a row.*"  # a step without an update, the first of several


@functools.cache
def small_data():
    """Train and test examples of runs that take seconds."""
    return synthetic.make(300, 0, 0), synthetic.make(100, 0, 1)


def train(flags: Sequence[str], *, small: bool = True, prepare: Callable[[], None] = lambda: None) -> None:
    """Run the program in this process; with `small_data` in place of the synthetic set if `small`."""
    if small:
        synthetic.load = lambda: small_data()
    prepare()
    sys.exit(main.main(["train", *flags]))


# Each part of a run: the owner and name of a function, and whether that makes the function that is called
PARTS = {
    "loading": (sources, "load", False),
    "tracing": (step, "make_tower_fn", True),
    "loop": (trainer, "train_from", False),
    "update": (trainer.Run, "start_step", False),
    "step": (StepRunner, "start", False),
    "evaluation": (trainer, "score_split", False),
    "save": (RunDirectory, "save", False),
    "progress": (Progress, "step", False),
}


def wrap(part: str, wrapper: Callable[[Callable], Callable]) -> None:
    """Replace the function of a part by `wrapper(function)` in this process."""
    owner, name, makes = PARTS[part]
    function = getattr(owner, name)
    setattr(owner, name, (lambda *args, **kwargs: wrapper(function(*args, **kwargs))) if makes else wrapper(function))


def before(part: str, act: Callable[..., None]) -> None:
    """Call `act` with the arguments of each call of a part first."""

    def wrapper(function):
        def wrapped(*args, **kwargs):
            act(*args, **kwargs)
            return function(*args, **kwargs)

        return wrapped

    wrap(part, wrapper)


def num_traces(run: trainer.Run) -> int:
    """Return how often the training step has been traced."""
    return run.step_runner.train_step.experimental_get_tracing_count()

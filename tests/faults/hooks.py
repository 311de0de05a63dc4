"""Everything the trials know of the training program's internals: where to intervene, and what it
logs.
"""

import functools
import re
import sys
from collections.abc import Callable, Sequence

from cifar_towers import trainer
from cifar_towers.cli import main
from cifar_towers.data import sources, synthetic
from cifar_towers.evaluation.evaluator import Classifier
from cifar_towers.reporting.console import Progress
from cifar_towers.runs.directory import RunDirectory
from cifar_towers.training import step
from cifar_towers.training.runner import StepRunner

STARTED = "writing to"
RESUMED = re.compile(r"(?:resuming from|is complete at) step (\d+)")
SAVED = re.compile(r"saved step (\d+)")
SKIPPED = r"step {0} was skipped \(1 in a row.*"  # a step without an update, the first of several

PARTS = {  # of a run: the owner and name of a function
    "loading": (sources, "load"),
    "loop": (trainer, "train_from"),
    "averaging": (step, "average_gradients"),  # of all towers, while a step is traced
    "update": (trainer.Training, "start_step"),
    "step": (StepRunner, "start"),
    "evaluation": (Classifier, "logits"),
    "save": (RunDirectory, "save"),
    "progress": (Progress, "step"),
}


@functools.cache
def small_data():
    """Train and test examples of runs that take seconds."""
    return synthetic.make(300, 0, 0), synthetic.make(100, 0, 1)


def train(flags: Sequence[str], prepare: Callable[[], None] = lambda: None) -> None:
    """Run the program in this process, with `small_data` in place of the synthetic set."""
    synthetic.load = small_data
    prepare()
    sys.exit(main.main(["train", *flags]))


def wrap(part: str, wrapper: Callable[[Callable], Callable]) -> None:
    """Replace the function of a part by `wrapper(function)` in this process."""
    owner, name = PARTS[part]
    setattr(owner, name, wrapper(getattr(owner, name)))


def before(part: str, act: Callable[..., None]) -> None:
    """Call `act` with the arguments of each call of a part first."""

    def wrapper(function):
        def wrapped(*args, **kwargs):
            act(*args, **kwargs)
            return function(*args, **kwargs)

        return wrapped

    wrap(part, wrapper)

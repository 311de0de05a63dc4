"""Everything the trials know of the training program's internals: where to intervene, and what it logs."""

import functools
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from cifar_towers import trainer
from cifar_towers.checkpointing import checkpoint
from cifar_towers.cli import main
from cifar_towers.data import sources, synthetic
from cifar_towers.reporting.console import Progress
from cifar_towers.training import step
from cifar_towers.training.step_runner import StepRunner

SCRIPT = Path(__file__).parents[2] / "scripts" / "train.py"
RESUMED = re.compile(r"(?:resuming from|is complete at) step (\d+)")
SAVED = re.compile(r"saved step (\d+)")
WEIGHTS = re.compile(r"weights sha256 (\w+)")
STARTED = "writing to"


def is_saved_message(number: int) -> re.Pattern:
    """What a run that is interrupted after this step logs."""
    return re.compile(rf"saved step {number}\b|step {number} is saved")


def skipped_message(number: int) -> re.Pattern:
    """What a run logs of a step without an update, the first of several."""
    return re.compile(rf"step {number} made no update \(1 in a row.*")


@functools.cache
def small_data():
    """Train and test examples of runs that take seconds."""
    return synthetic.make(300, 0, 0), synthetic.make(100, 0, 1)


def train(flags: Sequence[str], *, small: bool = True, prepare: Callable[[], None] = lambda: None) -> None:
    """The program in this process; with `small_data` in place of the synthetic set if `small`."""
    if small:
        synthetic.load = lambda seed=0: small_data()
    prepare()
    sys.argv = ["train.py", *flags]
    main.train()


# Wrapping functions of the program, in the process that calls it ---------------------------------------------------

Wrapper = Callable[[Callable], Callable]


def _wrap(owner, name: str, wrapper: Wrapper) -> None:
    setattr(owner, name, wrapper(getattr(owner, name)))


def _wrap_result(owner, name: str, wrapper: Wrapper) -> None:
    _wrap(owner, name, lambda make: lambda *args, **kwargs: wrapper(make(*args, **kwargs)))


def wrap_loading(wrapper: Wrapper) -> None:
    """Wraps the function that loads the data."""
    _wrap(sources, "load", wrapper)


def wrap_tracing(wrapper: Wrapper) -> None:
    """Wraps the function of a tower, which is called when the step is traced."""
    _wrap_result(step, "make_tower_fn", wrapper)


def wrap_train_step(wrapper: Wrapper) -> None:
    """Wraps the call of the traced training step."""
    _wrap(StepRunner, "run", wrapper)


def wrap_evaluation(wrapper: Wrapper) -> None:
    """Wraps the function that evaluates a split."""
    _wrap_result(trainer, "make_evaluate_fn", wrapper)


def wrap_save(wrapper: Wrapper) -> None:
    """Wraps `save(train_dir, step, ...)`."""
    _wrap(checkpoint, "save_checkpoint", wrapper)


def wrap_progress(wrapper: Wrapper) -> None:
    """Wraps the update of the progress display between two steps."""
    _wrap(Progress, "step", wrapper)


def before_loop(function: Callable[[], None]) -> None:
    """Calls `function()` before the first step."""

    def wrapper(train):
        def wrapped(self, *args):
            function()
            return train(self, *args)

        return wrapped

    _wrap(trainer.Trainer, "_train", wrapper)


def around_steps(
    before: Callable[[trainer.Trainer, int], None] = lambda run, step: None,
    after: Callable[[trainer.Trainer, int], None] = lambda run, step: None,
) -> None:
    """Calls `before(trainer, step)` and `after(trainer, step)` around each step, `step` being its number from 1."""

    def wrapper(train_step):
        def wrapped(self, *args):
            number = int(self.state.step.numpy()) + 1
            before(self, number)
            metrics = train_step(self, *args)
            after(self, number)
            return metrics

        return wrapped

    _wrap(trainer.Trainer, "_train_step", wrapper)


def num_traces(run: trainer.Trainer) -> int:
    """How often the training step has been traced."""
    return run.step_runner._train_step.experimental_get_tracing_count()

"""Flipped bits in one tower's gradient, with `--verify_every_steps`; and long runs without any."""

import functools

from cifar_towers import files
from tests.configs import TINY_NET
from tests.faults import hooks, runs
from tests.faults.harness import Experiment, Trial, check
from tests.faults.subjects import OURS
from tests.training.flips import BitFlip

NUM_TOWERS = (1, 2, 4)
FLAGS = (f"--model={TINY_NET}", "--checkpoint_every_steps=1", "--learning_rate=0.01", "--momentum=0.9")
LONG_FLAGS = ("--checkpoint_every_steps=0", "--summary_every_steps=100", "--eval_every_epochs=100", "--epochs=700")
LENGTHS = (500, 10_000)  # steps without a flip; the quick form runs the first alone
FOUND, OTHER_STEP, OTHER_TOWER = "found", "in a step that is not verified", "in a tower that is not checked then"


def flip(trial: Trial) -> str:
    """Flip a random bit in the gradient of a random tower in a random step; one tower in three has only itself."""
    count, every = NUM_TOWERS[trial.index % len(NUM_TOWERS)], trial.rng.choice((1, 1, 2, 3))
    tower, step = trial.rng.randrange(count), trial.rng.randrange(1, runs.STEPS + 1)
    place = trial.rng.random(), trial.rng.random(), trial.rng.randrange(32)
    trial.details = f"bit {place[2]} at {place[1]:.3f} of variable {place[0]:.3f}, tower_{tower} of {count}, "
    trial.details += f"step {step}, verified every {every}"
    flags = (*FLAGS, f"--num_gpus={count}", f"--verify_every_steps={every}")
    prepare = functools.partial(_inject, tower, step, place)
    with runs.train(OURS, trial.scratch, flags=flags, prepare=prepare) as run:
        run.wait()
    name = run.output.partition("flips the gradient of ")[2].split("\n")[0]
    expected, other = expected_outcome(count, every, tower, step)
    trial.details += f", {name}, exit code {run.exit_code}"
    if expected != FOUND:  # the flip may make a number that is not finite, now or in later steps
        check(run.exit_code in (0, 4) and "other bits" not in run.output, f"ended with {run.exit_code}: {expected}")
        return expected
    message = f"step {step} is not applied: the gradient of {name} of tower_{tower} (/CPU:{tower}) has other bits if "
    check(run.exit_code == 6 and f"{message}tower_{other} " in run.output, f"ended with {run.exit_code}, not found")
    check(run.output.count("other bits") == 1 and "Traceback" not in run.output, "not one line")
    check(runs.newest_saved(run.directory) == step - 1, f"saved step {runs.newest_saved(run.directory)}")
    return expected


def expected_outcome(count: int, every: int, tower: int, step: int) -> tuple[str, int]:
    """Return what has to become of a flip, and the tower that checks in this step."""
    turn, rest = divmod(step, every)
    if rest:
        return OTHER_STEP, -1
    round_, checked = divmod(turn - 1, count)
    other = (checked + 1 + round_ % (count - 1)) % count if count > 1 else 0
    return (FOUND if checked == tower else OTHER_TOWER), other


def _inject(tower: int, step: int, place: tuple[float, float, int]) -> None:
    """Change the program in this process."""
    flip = BitFlip(tower, *place)
    flip.install()

    def switch(_, steps_done, *__):
        flip.switch(steps_done + 1 == step)  # before the step is traced

    def announce(_, steps_done, *__, **___):
        if steps_done + 1 == step:
            print(f"flips the gradient of {flip.name}", flush=True)

    hooks.before("update", switch)
    hooks.before("step", announce)


def raise_no_alarm(trial: Trial) -> str:
    """Verify every step of a long run."""
    steps = LENGTHS[trial.index]
    flags = (*FLAGS, *LONG_FLAGS, "--num_gpus=2", "--verify_every_steps=1", f"--max_steps={steps}")
    trial.details = f"{steps} verified steps"
    with runs.train(OURS, trial.scratch, flags=flags) as run:
        run.wait(3600.0)
    check(run.exit_code == 0, f"ended with {run.exit_code}: {run.last_line}")
    check(files.read_json(run.directory / files.RESULT)["step"] == steps, "other steps")
    return "no alarm"


EXPERIMENTS = [
    Experiment("flipped bit", (OURS,), 6, 60, flip),
    Experiment("verified steps without a flip", (OURS,), 1, len(LENGTHS), raise_no_alarm),
]

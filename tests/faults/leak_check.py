"""Resources of a long run: memory, threads, open files, traced functions, and time spent on checkpoints."""

import functools
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

from cifar_towers import files
from tests.faults import hooks, runs
from tests.faults.harness import Experiment, Trial, check
from tests.faults.subjects import OURS

SAMPLE_EVERY = 200  # steps
FIRST_SAMPLE = 400  # that the last one is compared with: after the first evaluation, which opens files that stay open
LENGTHS = (1000, 5000)  # steps; the quick form runs the first alone
MAX_GROWTH_MB = 20.0  # between the samples; the allocator alone takes about 10 once
MAX_SAVING = 0.02  # of the time
FLAGS = ("--epochs=400", "--eval_every_epochs=20", "--summary_every_steps=20", "--checkpoint_every_steps=0")


def check_leaks(trial: Trial) -> str:
    """Train for thousands of steps with summaries, evaluations and checkpoints at intervals of time."""
    path, steps = trial.scratch / "samples", LENGTHS[trial.index]
    prepare = functools.partial(hooks.wrap, "update", functools.partial(_sampled, path))
    with runs.train(OURS, trial.scratch, flags=(*FLAGS, f"--max_steps={steps}"), prepare=prepare) as run:
        run.wait(3600.0)
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    first, last = next(sample for sample in samples if sample["step"] == FIRST_SAMPLE), samples[-1]
    trial.details = f"{first} to {last}"
    check(not run.exit_code and last["step"] == steps, f"ended with {run.exit_code} after step {last['step']}")
    seconds = files.read_json(run.directory / files.RESULT)["seconds"]
    saving = seconds["save"] / sum(seconds.values())
    growth = {name: last[name] - first[name] for name in first}
    trial.details += f": {growth['resident_mb']:.1f} MB more; saving took {100 * saving:.2f} % of the time"
    leaks = [name for name in ("traced", "threads", "files") if growth[name]]
    check(not leaks, f"more {' and '.join(leaks)}")
    check(growth["resident_mb"] <= MAX_GROWTH_MB, "memory grows")
    check(saving < MAX_SAVING, "saving takes too long")
    return "nothing grows"


def _sampled(path: Path, update: Callable) -> Callable:
    """`update`, after which the resources of this process are written to a file every so many steps."""

    def wrapped(run, step, *args):
        finished = update(run, step, *args)
        if (step + 1) % SAMPLE_EVERY == 0:
            status = Path("/proc/self/status").read_text()
            sample = {
                "step": step + 1,
                "traced": hooks.num_traces(run),
                "resident_mb": int(re.search(r"VmRSS:\s*(\d+)", status)[1]) / 1000,
                "threads": int(re.search(r"Threads:\s*(\d+)", status)[1]),
                "files": len(os.listdir("/proc/self/fd")),
            }
            with path.open("a") as file:
                file.write(json.dumps(sample) + "\n")
        return finished

    return wrapped


EXPERIMENTS = [Experiment("a long run", (OURS,), 1, len(LENGTHS), check_leaks)]

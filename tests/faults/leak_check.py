"""What a long run holds on to, and what its checkpoints cost: memory, threads, open files, traced functions, time."""

import functools
import json
import os
import random
import re
from pathlib import Path

from cifar_towers import trainer
from cifar_towers.files import run_files
from tests.faults import runs
from tests.faults.harness import Experiment, Outcome
from tests.faults.subjects import OURS

EVERY = 200  # steps between looks; the first is the one that the last is held against
LENGTHS = (1000, 5000)  # steps of the trials; the quick form has the first alone
MOST_GROWTH = 20.0  # MB from the first look to the last; the allocator's one-time steps are some 10
MOST_SAVING = 0.02  # of the time


def soak(_: str, number: int, __: random.Random, scratch: Path) -> Outcome:
    """A run of some thousand steps with summaries, evaluations, and checkpoints by the clock."""
    looks, steps = scratch / "looks", LENGTHS[number]
    flags = (f"--max_steps={steps}", "--epochs=400", "--eval_every_epochs=20", "--summary_every_steps=20")
    flags += ("--checkpoint_every_steps=0",)
    with runs.Run(OURS, scratch, flags=flags, prepare=functools.partial(_watch, looks)) as run:
        run.wait(3600.0)
    seen = [json.loads(line) for line in looks.read_text().splitlines()]
    first, last = seen[0], seen[-1]
    if run.code or last["step"] != steps:
        return Outcome(f"{steps} steps", f"ended with {run.code} after step {last['step']}", False)
    seconds = run_files.read_json(run.directory / "result.json")["seconds"]
    saving = seconds["save"] / sum(seconds.values())
    grown = {name: last[name] - first[name] for name in first}
    what = f"{first} to {last}: {grown['resident_mb']:.1f} MB more; saving took {100 * saving:.2f} % of the time"
    still = [name for name in ("traced", "threads", "files") if grown[name]]
    if still:
        return Outcome(what, f"more {' and '.join(still)}", False)
    if grown["resident_mb"] > MOST_GROWTH:
        return Outcome(what, "memory grows", False)
    return Outcome(what, "nothing grows", saving < MOST_SAVING)


def _watch(looks: Path) -> None:
    """Has the program, in this process, write down now and then what it holds."""
    step = trainer.Trainer._step

    def watched(self, *arguments):
        metrics = step(self, *arguments)
        done = int(self.state.step.numpy())
        if done % EVERY == 0:
            held = {"step": done, "traced": self.train_step.experimental_get_tracing_count(), **_held()}
            with looks.open("a") as file:
                file.write(json.dumps(held) + "\n")
        return metrics

    trainer.Trainer._step = watched


def _held() -> dict[str, float]:
    status = Path("/proc/self/status").read_text()
    return {
        "resident_mb": int(re.search(r"VmRSS:\s*(\d+)", status)[1]) / 1000,
        "threads": int(re.search(r"Threads:\s*(\d+)", status)[1]),
        "files": len(os.listdir("/proc/self/fd")),
    }


EXPERIMENTS = [Experiment("a long run", (OURS,), 1, len(LENGTHS), soak)]

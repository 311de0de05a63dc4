"""Prepares and times benchmark cases on a fixed number of towers, on request.

Threads per operation and logical devices are fixed for a process, so every number of towers has a process of its own.
All are idle while one works.
"""

import dataclasses
import json
import os
import sys
import time
import traceback
from typing import Any

import tensorflow as tf

from cifar_towers.benchmark.cases import BenchmarkCase, PreparedCase, prepare_case
from cifar_towers.benchmark.settings import BenchmarkConfig
from cifar_towers.config import TrainConfig
from cifar_towers.data import sources
from cifar_towers.errors import RunError, UsageError, error_text
from cifar_towers.reporting.profiler import profile_step
from cifar_towers.training import build
from cifar_towers.training.devices import setup_towers

EXPECTED_ERRORS = (ValueError, NotImplementedError, MemoryError, tf.errors.OpError, RunError)  # of a single case


def serve() -> None:
    """Answers requests on standard input, lines of JSON with a method of `Worker` and its arguments, until it ends."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps the output free of what libraries print
    worker = Worker()
    for line in sys.stdin:
        print(json.dumps(worker.answer(*json.loads(line))), file=output, flush=True)


class Worker:
    """Towers, data and the cases that have been prepared on them. Cases come as lists, from JSON."""

    def __init__(self):
        self.prepared: dict[tuple, PreparedCase] = {}

    def answer(self, name: str, *arguments) -> Any:
        """What a method returns, or the error that it raises as `open_process` reads it."""
        try:
            return getattr(self, name)(*arguments)
        except Exception as error:  # it concerns one case; the others can still be measured
            if not isinstance(error, EXPECTED_ERRORS):
                traceback.print_exc()
            if not isinstance(error, RunError):
                error = UsageError(error_text(error) or type(error).__name__)
            return {"error": type(error).__name__, "message": str(error)}

    def start(self, config: dict, num_towers: int) -> dict:
        """Kind and number of physical devices under the towers, and the data set's name."""
        recipe = TrainConfig(**config["recipe"])
        self.config = BenchmarkConfig(**config | {"recipe": recipe})
        self.towers = setup_towers(dataclasses.replace(recipe, num_gpus=num_towers))
        _, dataset = build.load_data(recipe, sources.find(recipe.dataset, recipe.data_dir))
        self.train = dataset.train
        kind = "GPU" if "GPU" in self.towers[0].device else "CPU"
        physical = len(tf.config.get_visible_devices(kind)) if kind == "GPU" else 1
        return {"kind": kind, "physical": min(physical, num_towers), "dataset": dataset.name}

    def prepare(self, case: list) -> tuple[float, float]:
        """Seconds until the first step is done, tracing and compilation included; seconds of the second step."""
        start = time.perf_counter()
        prepared = prepare_case(self.config, BenchmarkCase(*case), self.towers, self.train)
        list(prepared.run_steps(1))
        self.prepared[tuple(case)] = prepared
        first = time.perf_counter() - start
        ((second, _),) = prepared.run_steps(1)
        return first, second

    def run_steps(self, case: list, steps: int) -> list[tuple[float, float]]:
        """Seconds of each step, and the part of them waiting for input."""
        return list(self.prepared[tuple(case)].run_steps(steps))

    def cost_model_inputs(self, case: list) -> tuple[tuple, int]:
        """The model's variables, and the bytes of one example."""
        prepared = self.prepared[tuple(case)]
        return prepared.variables, prepared.example_bytes

    def profile(self, case: list) -> dict[str, float]:
        """Shares of a step's work, summed over towers."""
        return profile_step(self.prepared[tuple(case)].step).shares()

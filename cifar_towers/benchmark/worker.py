"""Prepares and times benchmark cases on a fixed number of towers, on request.

Threads per operation and logical devices are fixed for a process, so every number of towers has a process of its own.
All are idle while one works.
"""

import dataclasses
import time
import traceback
from multiprocessing.connection import Connection

import tensorflow as tf

from cifar_towers.benchmark.cases import BenchmarkCase, PreparedCase, prepare_case
from cifar_towers.benchmark.settings import BenchmarkConfig
from cifar_towers.data import sources
from cifar_towers.errors import RunError, UsageError, error_text
from cifar_towers.reporting.profiler import profile_step
from cifar_towers.training import build
from cifar_towers.training.devices import setup_towers

EXPECTED_ERRORS = (ValueError, NotImplementedError, MemoryError, tf.errors.OpError)  # a case this machine cannot run


def serve(config: BenchmarkConfig, num_towers: int, connection: Connection) -> None:
    """Sends a description of the towers, then a response to each request until it receives None.

    A request is the name of a method of `Worker` and its arguments. The response to one that fails is a UsageError.
    """
    try:
        worker = Worker(config, num_towers)
        connection.send(worker.describe())
        while request := connection.recv():
            name, *arguments = request
            try:
                response = getattr(worker, name)(*arguments)
            except Exception as error:  # it concerns one case; the others can still be measured
                if not isinstance(error, EXPECTED_ERRORS):
                    traceback.print_exc()
                response = UsageError(error_text(error) or type(error).__name__)
            connection.send(response)
    except RunError as error:
        connection.send(error)
    except (EOFError, ConnectionError):  # the parent process has ended
        return


class Worker:
    """Towers, data and the cases that have been prepared on them."""

    def __init__(self, config: BenchmarkConfig, num_towers: int):
        self.config = config
        self.towers = setup_towers(dataclasses.replace(config.recipe, num_gpus=num_towers))
        source = sources.find(config.recipe.dataset, config.recipe.data_dir)
        _, dataset = build.load_data(config.recipe, source)
        self.train, self.dataset = dataset.train, dataset.name
        self.prepared: dict[BenchmarkCase, PreparedCase] = {}

    def describe(self) -> dict:
        """Kind and number of physical devices under the towers, and the data set's name."""
        kind = "GPU" if "GPU" in self.towers[0].device else "CPU"
        physical = len(tf.config.get_visible_devices(kind)) if kind == "GPU" else 1
        return {"kind": kind, "physical": min(physical, len(self.towers)), "dataset": self.dataset}

    def prepare(self, case: BenchmarkCase) -> tuple[float, float]:
        """Seconds until the first step is done, tracing and compilation included; seconds of the second step."""
        start = time.perf_counter()
        prepared = prepare_case(self.config, case, self.towers, self.train)
        list(prepared.run_steps(1))
        self.prepared[case] = prepared
        first = time.perf_counter() - start
        ((second, _),) = prepared.run_steps(1)
        return first, second

    def run_steps(self, case: BenchmarkCase, steps: int) -> dict[str, list[float]]:
        """Seconds of each step, and the part of them waiting for input."""
        seconds, waiting = zip(*self.prepared[case].run_steps(steps), strict=True)
        return {"seconds": list(seconds), "waiting": list(waiting)}

    def cost_model_inputs(self, case: BenchmarkCase) -> tuple[tuple, int]:
        """The model's variables, and the bytes of one example."""
        return self.prepared[case].variables, self.prepared[case].example_bytes

    def profile(self, case: BenchmarkCase) -> dict[str, float]:
        """Shares of a step's work, summed over towers; empty for a case that cannot be profiled."""
        step = self.prepared[case].step
        return profile_step(step).shares() if step else {}

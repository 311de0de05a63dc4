"""A process that has opened some number of towers and times variations of the step when it is told to.

Threads an operation and logical devices are fixed for a process, so every number of towers has a worker of its own;
all wait while one works.
"""

import time
import traceback
from multiprocessing.connection import Connection

import tensorflow as tf

from cifar_towers.benchmark.cases import BenchmarkCase, PreparedCase, build
from cifar_towers.cli.tool_configs import BenchmarkConfig
from cifar_towers.data import sources
from cifar_towers.errors import RunError, UsageError, error_text
from cifar_towers.reporting.profiler import profiled
from cifar_towers.training import build as setup
from cifar_towers.training import devices

EXPECTED = (ValueError, NotImplementedError, MemoryError, tf.errors.OpError)  # what a machine or a net may not have


def serve(config: BenchmarkConfig, towers: int, connection: Connection) -> None:
    """Answers ("build" | "run" | "profile" | "exchanged", ...) until it gets nothing; a UsageError is
    the answer to an order that fails, as it may where memory is short."""
    try:
        worker = _Worker(config, towers)
        connection.send(worker.introduce())
        while order := connection.recv():
            name, *arguments = order
            try:
                answer = getattr(worker, name)(*arguments)
            except Exception as error:  # whatever it is, it is of one variation, and the others go on
                if not isinstance(error, EXPECTED):
                    traceback.print_exc()
                answer = UsageError(error_text(error) or type(error).__name__)
            connection.send(answer)
    except RunError as error:
        connection.send(error)
    except (EOFError, ConnectionError):  # the process that asks has gone
        return


class _Worker:
    def __init__(self, config: BenchmarkConfig, towers: int):
        self.config = config
        self.towers = devices.setup_towers(config.replace_recipe(num_gpus=towers))
        source = sources.find(config.dataset, config.data_dir)
        _, dataset = setup.load_data(config, source)
        self.train, self.dataset = dataset.train, dataset.name
        self.built: dict[BenchmarkCase, PreparedCase] = {}

    def introduce(self) -> dict:
        """What the towers are."""
        kind = "GPU" if "GPU" in self.towers[0].device else "CPU"
        physical = len(tf.config.get_visible_devices(kind)) if kind == "GPU" else 1
        return {"kind": kind, "physical": min(physical, len(self.towers)), "dataset": self.dataset}

    def build(self, variation: BenchmarkCase) -> tuple[float, float]:
        """Seconds until the first step is done, with tracing and compilation; and of the second."""
        start = time.perf_counter()
        built = build(self.config, variation, self.towers, self.train)
        list(built.run(1))
        self.built[variation] = built
        first = time.perf_counter() - start
        ((second, _),) = self.built[variation].run(1)
        return first, second

    def run(self, variation: BenchmarkCase, steps: int) -> dict:
        """Seconds of each step, and seconds of them waiting for input."""
        timed = list(self.built[variation].run(steps))
        return {
            "seconds": [float(seconds) for seconds, _ in timed],
            "waiting": [float(waiting) for _, waiting in timed],
        }

    def exchanged(self, variation: BenchmarkCase) -> tuple[tuple, int]:
        """The model's variables for the cost model, and the bytes of one example."""
        return self.built[variation].variables, self.built[variation].example_bytes

    def profile(self, variation: BenchmarkCase) -> dict[str, float]:
        """Shares of a step's work, of all towers together."""
        call = self.built[variation].call
        return profiled(call).shares() if call else {}

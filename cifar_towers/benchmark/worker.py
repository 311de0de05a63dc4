"""A process that has opened some number of towers and times variations of the step when it is told to.

Threads an operation and logical devices are fixed for a process, so every number of towers has a worker of its own;
all wait while one works.
"""

import threading
import time
import traceback
from multiprocessing.connection import Connection

import tensorflow as tf

from cifar_towers.benchmark.cases import BenchmarkCase, PreparedCase, build
from cifar_towers.cli.tool_configs import BenchmarkConfig
from cifar_towers.data import sources
from cifar_towers.errors import RunError, UsageError, error_text
from cifar_towers.reporting.profiler import profiled
from cifar_towers.reporting.resource_monitor import host_memory_mb
from cifar_towers.training import build as setup
from cifar_towers.training import devices

LOOKS = 0.02  # seconds between looks at the memory
EXPECTED = (ValueError, NotImplementedError, MemoryError, tf.errors.OpError)  # what a machine or a net may not have


def serve(config: BenchmarkConfig, towers: int, connection: Connection) -> None:
    """Answers ("build" | "run" | "run_watched" | "profile" | "exchanged", ...) until it gets nothing; a UsageError is
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

    def run_watched(self, variation: BenchmarkCase, steps: int) -> dict:
        """The same, and the most memory in use, in MB (0: not known)."""
        with _Memory(self.towers[0].device) as memory:
            told = self.run(variation, steps)
        return told | {"memory_mb": memory.most_mb}

    def exchanged(self, variation: BenchmarkCase) -> tuple[tuple, int]:
        """The model's variables for the cost model, and the bytes of one example."""
        return self.built[variation].variables, self.built[variation].example_bytes

    def profile(self, variation: BenchmarkCase) -> dict[str, float]:
        """Shares of a step's work, of all towers together."""
        call = self.built[variation].call
        return profiled(call).shares() if call else {}


class _Memory:
    """The most memory the process holds while it works: resident on the host, allocated on a GPU."""

    def __init__(self, device: str):
        self.most_mb = 0.0
        self._gpu = device.removeprefix("/") if "GPU" in device else ""
        self._done = threading.Event()

    def __enter__(self):
        if self._gpu:
            tf.config.experimental.reset_memory_stats(self._gpu)
        else:
            self._watcher = threading.Thread(target=self._watch, daemon=True)
            self._watcher.start()
        return self

    def __exit__(self, *_):
        if self._gpu:
            self.most_mb = tf.config.experimental.get_memory_info(self._gpu)["peak"] / 1e6
        else:
            self._done.set()
            self._watcher.join()

    def _watch(self) -> None:
        while True:
            self.most_mb = max(self.most_mb, host_memory_mb())
            if self._done.wait(LOOKS):
                return

"""The measurement: every variation in turn, round after round, so that a machine's moods fall on all of them alike."""

import math
import multiprocessing
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection

import tensorflow as tf

from cifar_towers.benchmark import report
from cifar_towers.benchmark.cases import BenchmarkCase, grid
from cifar_towers.benchmark.report_io import circumstances, make_directory
from cifar_towers.benchmark.round_stats import Row
from cifar_towers.cli import tf_import
from cifar_towers.cli.tool_configs import BenchmarkConfig
from cifar_towers.config.settings import split_names
from cifar_towers.data.batches import NUM_PREFETCHED
from cifar_towers.errors import RunError, UsageError
from cifar_towers.towers import communication
from cifar_towers.training import precision

FEWEST_ROUNDS, MOST_ROUNDS, FEWEST_STEPS = 3, 15, 3
VISIT_SECONDS = 2.0  # a visit to a variation makes as many steps as take about this long


def run(config: BenchmarkConfig) -> None:
    """Measures, prints the table with a conclusion or a prediction, and writes them to the config's directory."""
    start = time.monotonic()
    make_directory(config)
    counts, variations = _plan(config)
    with ExitStack() as stack:
        workers, devices = {}, {}
        for count in counts:  # one after another: the first may have to download the data
            workers[count] = stack.enter_context(open_worker(config, count))
            devices[count] = workers[count]()
        rows = _prepare(variations, workers)
        _refuse_without_runs(rows)
        _measure(rows, workers, config, start)
        _refuse_without_runs(rows)
        _profile(rows, workers)
        predictions = _predict(config, rows[0], workers) if config.predict else []
    set_efficiency(rows, devices)
    facts = circumstances(config, devices[counts[0]]["dataset"]) | {
        "kind": devices[counts[0]]["kind"],
        "devices": max(found["physical"] for found in devices.values()),
        "minutes": (time.monotonic() - start) / 60,
    }
    if config.predict:
        report.publish_prediction(config.directory, facts, rows[0], predictions, config.link_gb_per_s)
    else:
        report.publish(config.directory, facts, rows)


def _plan(config: BenchmarkConfig) -> tuple[tuple[int, ...], list[BenchmarkCase]]:
    """Numbers of towers, and what to measure."""
    gpus = len(tf.config.get_visible_devices("GPU"))
    asked = split_names(config.precisions)
    device = "GPU" if gpus else "CPU"
    default = [precision.choose(config.precision, device)[0], *precision.native_halves(device), "float32"]
    precisions = list(dict.fromkeys(asked or default))
    if config.predict:
        return (1,), [BenchmarkCase("towers", "round_robin" if gpus else "cpu", 1, precisions[0])]
    counts = config.tower_counts or tuple(n for n in _doubled(gpus or 4) if config.batch_size % n == 0)
    return counts, grid(counts, precisions, config.peers, on_gpus=bool(gpus))


def _predict(config: BenchmarkConfig, row: Row, workers: dict) -> list[communication.Prediction]:
    """What the cost model makes of one tower's time."""
    variables, example_bytes = workers[1](("exchanged", row.variation))
    seconds = config.batch_size / row.median
    counts = [count for count in (1, 2, 4, 8, 16, 32, 64) if count <= config.batch_size]
    return communication.predict(seconds, variables, config.batch_size, example_bytes, config.link_gb_per_s, counts)


def _doubled(most: int) -> tuple[int, ...]:
    return tuple(sorted({*(2**power for power in range(most.bit_length()) if 2**power <= most), most}))


@contextmanager
def open_worker(config: BenchmarkConfig, count: int):
    """A process with `count` towers, as a function that sends an order, if one is given, and returns the answer."""
    spawn = multiprocessing.get_context("spawn")  # TensorFlow does not survive a fork
    connection, theirs = spawn.Pipe()
    ask = asking(connection, count)
    process = spawn.Process(target=tf_import.serve_benchmark, args=(config, count, theirs), daemon=True)
    ctrl_c = {signal.SIGINT}  # is for the process that asks, whose end ends this one
    signal.pthread_sigmask(signal.SIG_BLOCK, ctrl_c)  # what is started has it blocked too
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ctrl_c)
    theirs.close()
    try:
        yield ask
        with suppress(ConnectionError):  # it has ended by itself
            connection.send(None)
        process.join(10)
    finally:  # after an error or a signal it may be in the middle of a step
        process.terminate()


def asking(connection: Connection, count: int) -> Callable:
    """A function that sends an order, if one is given, to the process of `count` towers, and returns the answer.

    Raises:
      RunError: that is the answer, or the process has ended.
    """

    def ask(order: tuple | None = None):
        try:
            if order:
                connection.send(order)
            answer = connection.recv()
        except (EOFError, ConnectionError):
            raise RunError(f"the process of {count} towers has ended; its last words are above") from None
        if isinstance(answer, RunError):
            raise answer
        return answer

    return ask


def _refuse_without_runs(rows: list[Row]) -> None:
    """Raises a UsageError where no way to train is left."""
    if not any(row.variation.trains for row in rows):
        raise UsageError("nothing could be measured; the lines above say why")


def _profile(rows: list[Row], workers: dict) -> None:
    """Adds the shares of a step; a row whose step cannot be profiled has none."""
    for row in rows:
        if row.variation.trains:
            try:
                row.shares = workers[row.variation.towers](("profile", row.variation))
            except RunError as error:
                print(f"no shares: {row.variation.towers} x {row.variation.told()}: {error}", flush=True)


def _prepare(variations: list[BenchmarkCase], workers: dict) -> list[Row]:
    """Traces and compiles everything; what this machine cannot do is said and left out."""
    rows = []
    for number, variation in enumerate(variations, 1):
        told = f"compiling {number}/{len(variations)}: {variation.towers} x {variation.told()}, {variation.precision}"
        try:
            compiling, step = workers[variation.towers](("build", variation))
        except RunError as error:
            print(f"{told}: left out: {error}", flush=True)
            continue
        print(f"{told}: {compiling:.0f} s, a step {step:.2f} s", flush=True)
        rows.append(Row(variation, compiling, step))
    return rows


def _measure(rows: list[Row], workers: dict, config: BenchmarkConfig, start: float) -> None:
    """Rounds of short visits to every variation, in another order each time, for as long as there is time. A row whose
    steps cannot be made any more is taken out."""
    visit_seconds = min(VISIT_SECONDS, 60 * config.minutes / (FEWEST_ROUNDS * len(rows)))
    for row in rows:
        row.steps = max(FEWEST_STEPS, math.ceil(visit_seconds / row.step_seconds))
    visits = list(rows)
    round_seconds = sum((_passed_over(row) + row.steps) * row.step_seconds for row in visits)
    profiling = 2 * sum(row.step_seconds for row in rows)
    left = 60 * config.minutes - (time.monotonic() - start) - profiling
    rounds = min(MOST_ROUNDS, max(FEWEST_ROUNDS, int(left / round_seconds)))
    for number in range(rounds):
        print(f"round {number + 1}/{rounds}, about {round_seconds:.0f} s", flush=True)
        random.Random(number).shuffle(visits)
        for row in list(visits):
            try:
                told = workers[row.variation.towers](("run", row.variation, _passed_over(row) + row.steps))
            except RunError as error:  # as where memory has become short; the others go on
                print(f"left out: {row.variation.towers} x {row.variation.told()}: {error}", flush=True)
                visits.remove(row)
                rows.remove(row)
                continue
            seconds, waiting = (told[name][_passed_over(row) :] for name in ("seconds", "waiting"))
            row.images_per_sec.append(config.batch_size * len(seconds) / sum(seconds))
            row.waits.append(sum(waiting) / sum(seconds))


def _passed_over(row: Row) -> int:
    """A visit's first steps that do not count: one, which finds the memory as another left it, and those on batches
    that were made ahead while others were measured, which tell nothing of the input."""
    return 1 + NUM_PREFETCHED * (row.variation.input == "stream")


def set_efficiency(rows: list[Row], devices: dict) -> None:
    """Images/s against those of one tower with the same precision, where its variables are best placed, times the
    devices that K towers really have."""
    one: dict[str, float] = {}
    for row in _alike(rows, towers=1, strategy="towers", input="constant"):
        one[row.variation.precision] = max(row.median, one.get(row.variation.precision, 0.0))
    for row in rows:
        if row.variation.precision in one:
            ideal = one[row.variation.precision] * devices[row.variation.towers]["physical"]
            row.efficiency = row.median / ideal


def _alike(rows: list[Row], **wanted) -> Iterator[Row]:
    """The rows whose variation has these values."""
    for row in rows:
        if all(getattr(row.variation, name) == value for name, value in wanted.items()):
            yield row

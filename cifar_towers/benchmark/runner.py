"""The benchmark from start to end: plan the cases, prepare, time and profile them, and write a report."""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import tensorflow as tf

from cifar_towers import devices
from cifar_towers.benchmark import report
from cifar_towers.benchmark.cases import BenchmarkCase, CaseResult, make_cases, run_rounds
from cifar_towers.benchmark.worker import open_process
from cifar_towers.config.programs import BenchmarkConfig
from cifar_towers.config.train_config import split_names
from cifar_towers.data.batches import NUM_PREFETCHED
from cifar_towers.errors import RunError, UsageError

MIN_ROUNDS, MAX_ROUNDS, MIN_TIMED_STEPS = 3, 15, 3
VISIT_SECONDS = 2.0  # target duration of the timed steps of a case in one round
Workers = Mapping[int, Callable[..., Any]]  # number of towers -> request to the process that has them


def run_benchmark(config: BenchmarkConfig, worker_command: Sequence[str]) -> None:
    """Measure all cases; print a table with a conclusion, and write them to the config's directory.

    `worker_command` starts a process that calls `worker.serve`.
    """
    start = time.monotonic()
    report.make_directory(config.directory)
    counts, cases = _plan(config)
    with ExitStack() as stack:
        workers, devices = {}, {}
        for num_towers in counts:  # one after another: the first may have to download the data
            workers[num_towers] = stack.enter_context(open_process(worker_command))
            devices[num_towers] = workers[num_towers](["start", dataclasses.asdict(config), num_towers])
        results = _prepare(cases, workers)
        _measure(results, workers, config, start)
        _profile(results, workers)
    set_efficiency(results, {num_towers: each["physical"] for num_towers, each in devices.items()})
    metadata = report.collect_metadata(config.recipe, devices[counts[0]]["dataset"]) | {
        "kind": devices[counts[0]]["kind"],
        "devices": max(each["physical"] for each in devices.values()),
        "minutes": (time.monotonic() - start) / 60,
    }
    report.publish(config.directory, metadata, results)


def _plan(config: BenchmarkConfig) -> tuple[tuple[int, ...], list[BenchmarkCase]]:
    """Return the numbers of towers, and the cases to measure."""
    gpus = len(tf.config.get_visible_devices("GPU"))
    device = "GPU" if gpus else "CPU"
    default = [devices.resolve_precision(config.recipe.precision, device)[0], *devices.native_halves(device), "float32"]
    precisions = list(dict.fromkeys(split_names(config.precisions) or default))
    limit = gpus or 4
    doubled = sorted({limit, *(2**power for power in range(limit.bit_length()))})  # 1, 2, 4, .. and the limit itself
    counts = config.tower_counts or tuple(n for n in doubled if config.recipe.batch_size % n == 0)
    return counts, make_cases(counts, precisions, config.peers, on_gpus=bool(gpus))


def _prepare(cases: Sequence[BenchmarkCase], workers: Workers) -> list[CaseResult]:
    """Trace and compile all cases; log and leave out those that fail."""
    results = []
    for number, case in enumerate(cases, 1):
        label = f"compiling {number}/{len(cases)}: {case}"
        try:
            compile_seconds, step_seconds = workers[case.towers](["prepare", case])
        except RunError as error:
            print(f"{label}: left out: {error}", flush=True)
            continue
        print(f"{label}: {compile_seconds:.0f} s, a step {step_seconds:.3g} s", flush=True)
        results.append(CaseResult(case=case, compile_seconds=compile_seconds, step_seconds=step_seconds))
    _require_trainable(results)
    return results


def _require_trainable(results: Sequence[CaseResult]) -> None:
    if not any(result.case.trains for result in results):
        raise UsageError("nothing could be measured; the lines above say why")


def _measure(results: list[CaseResult], workers: Workers, config: BenchmarkConfig, start: float) -> None:
    """Time all cases in rounds until `config.minutes` are over, and remove those that fail."""
    visit_seconds = min(VISIT_SECONDS, 60 * config.minutes / (MIN_ROUNDS * len(results)))
    for result in results:
        result.steps = max(MIN_TIMED_STEPS, math.ceil(visit_seconds / result.step_seconds))
    round_seconds = sum((_warm_up_steps(result.case) + result.steps) * result.step_seconds for result in results)
    profile_seconds = 2 * sum(result.step_seconds for result in results)
    seconds_left = 60 * config.minutes - (time.monotonic() - start) - profile_seconds
    rounds = min(MAX_ROUNDS, max(MIN_ROUNDS, int(seconds_left / round_seconds)))
    print(f"{rounds} rounds of about {round_seconds:.0f} s", flush=True)

    def measure(result: CaseResult) -> float:
        warm_up = _warm_up_steps(result.case)
        times = workers[result.case.towers](["run_steps", result.case, warm_up + result.steps])[warm_up:]
        seconds, waiting = map(sum, zip(*times, strict=True))
        result.waits.append(waiting / seconds)
        return config.recipe.batch_size * result.steps / seconds

    run_rounds(results, rounds, measure, lambda result, error: print(f"left out: {result.case}: {error}", flush=True))
    _require_trainable(results)


def _warm_up_steps(case: BenchmarkCase) -> int:
    """Return the number of untimed first steps: one warms the caches, and steps on prefetched batches never wait."""
    return 1 + NUM_PREFETCHED * (case.input == "stream")


def _profile(results: Sequence[CaseResult], workers: Workers) -> None:
    """Add each part's share of a step; a case whose step cannot be profiled has no shares."""
    for result in results:
        if result.case.trains:
            try:
                result.shares = workers[result.case.towers](["profile", result.case])
            except RunError as error:
                print(f"not profiled: {result.case}: {error}", flush=True)


def set_efficiency(results: Sequence[CaseResult], num_devices: Mapping[int, int]) -> None:
    """Set each result's images/s over those of one tower in its best placement times the physical devices in use."""
    one_tower: dict[str, float] = {}
    for result in results:
        strategy, _, towers, precision, _ = result.case
        if result.case.trains and (strategy, towers) == ("towers", 1):
            one_tower[precision] = max(result.median, one_tower.get(precision, 0.0))
    for result in results:
        if ideal := one_tower.get(result.case.precision, 0.0) * num_devices[result.case.towers]:
            result.efficiency = result.median / ideal

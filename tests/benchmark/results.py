"""Made-up benchmark results."""

from cifar_towers.benchmark.cases import KERAS, NO_EXCHANGE, UNPLACED, BenchmarkCase, CaseResult
from cifar_towers.benchmark.runner import set_efficiency
from cifar_towers.reporting.profiler import PARTS


def make_result(strategy, placement, towers, rates, precision="float32", input="constant", waiting=0.0):
    shares = {} if strategy == KERAS else dict(zip(PARTS, (0.3, 0.6, 0.05, 0.04, 0.01), strict=True))
    case = BenchmarkCase(strategy, placement, towers, precision, input)
    return CaseResult(
        case=case, compile_seconds=3.0, step_seconds=0.1, steps=4, images_per_sec=rates, waits=[waiting], shares=shares
    )


def make_results(physical=1, **medians):
    """Results of three rounds with these medians, by default 100; two towers have `physical` devices."""
    names = ("one", "cpu", "round_robin", "mirrored", "no_exchange", "stream")
    medians = dict.fromkeys(names, 100) | {"waiting": 0.0} | medians
    rates = {name: [0.9 * median, median, 1.1 * median] for name, median in medians.items()}
    results = [
        make_result("towers", "cpu", 1, rates["one"]),
        make_result("towers", "cpu", 2, rates["cpu"]),
        make_result("towers", "round_robin", 2, rates["round_robin"]),
        make_result("mirrored", UNPLACED, 2, rates["mirrored"]),
        make_result(NO_EXCHANGE, UNPLACED, 2, rates["no_exchange"]),
        make_result("towers", "cpu", 2, rates["stream"], input="stream", waiting=medians["waiting"]),
        make_result(KERAS, UNPLACED, 2, [10, 20, 30]),
    ]
    set_efficiency(results, {1: 1, 2: physical})
    return results

import dataclasses
import json
import time

import pytest
import tensorflow as tf

from cifar_towers.benchmark import runner, worker
from cifar_towers.benchmark.cases import KERAS, NO_EXCHANGE, UNPLACED, BenchmarkCase, CaseResult, make_cases
from cifar_towers.config import TrainConfig
from cifar_towers.config.programs import BenchmarkConfig
from cifar_towers.data import synthetic
from cifar_towers.errors import UsageError
from cifar_towers.training import build
from tests.benchmark.results import make_result

CONFIG = BenchmarkConfig(recipe=TrainConfig(batch_size=100), minutes=0.01)


def test_cases_have_no_duplicates():
    cases = make_cases((1, 2, 4), ("bfloat16", "float32"), with_keras=True)
    first, second = ([case for case in cases if case.precision == precision] for precision in ("bfloat16", "float32"))
    assert len(cases) == len(set(cases)) and (len(first), len(second)) == (13, 4)
    assert [case[:2] for case in first if case.towers == 1] == [("towers", "cpu")]
    assert [case.towers for case in first if case.input == "stream"] == [4]
    for count in (2, 4):
        placements = {case.placement for case in first if (case.strategy, case.towers) == ("towers", count)}
        assert placements == {"cpu", "round_robin", "least_loaded"}
    assert {case[:3] for case in second} == {
        *(("towers", "cpu", count) for count in (1, 4)),
        ("mirrored", UNPLACED, 4),
        (KERAS, UNPLACED, 4),
    }
    assert make_cases((1,), ("float32",), with_keras=False) == [
        BenchmarkCase("towers", "cpu", 1, "float32"),
        BenchmarkCase("towers", "cpu", 1, "float32", "stream"),
    ]
    cases = make_cases((1,), ("float32",), with_keras=False, on_gpus=True)
    assert [case.placement for case in cases if case.input == "constant"] == ["cpu", "round_robin"]


def test_first_steps_are_not_timed_and_a_case_that_fails_during_a_round_is_left_out(capsys):
    """Two batches of a stream are there at once, and each later one makes the step wait for 0.3 s."""
    stream = CaseResult(case=BenchmarkCase("towers", "cpu", 2, "float32", "stream"), step_seconds=0.4)
    failing, constant = (make_result("towers", placement, 2, []) for placement in ("cpu", "round_robin"))
    results = [stream, failing, constant]

    def request(message):
        _, case, steps = message
        if case == failing.case and failing.images_per_sec:
            raise UsageError("OOM when allocating")
        if case.input == "stream":
            return [(9.0, 0.0), (0.1, 0.0), (0.1, 0.0), *[(0.4, 0.3)] * (steps - 3)]
        return [(9.0, 0.0), *[(0.1, 0.0)] * (steps - 1)]

    runner._measure(results, {2: request}, CONFIG, time.monotonic())
    assert results == [stream, constant] and constant.steps == 3
    assert constant.images_per_sec == [pytest.approx(1000)] * 3
    assert stream.images_per_sec == [pytest.approx(250)] * 3 and stream.waiting == pytest.approx(0.75)
    assert "left out: 2 x towers, cpu, float32: OOM when allocating" in capsys.readouterr().out


def test_without_a_trainable_case_nothing_is_reported():
    with pytest.raises(UsageError, match="nothing could be measured"):
        runner._require_trainable([make_result(KERAS, UNPLACED, 2, [])])


def test_failing_cases_leave_the_others_measured(monkeypatch, capsys):
    """One cannot be built, and one cannot be profiled."""

    def prepare_case(config, case, towers, train):
        if case.strategy == "mirrored":
            raise NotImplementedError
        step = (lambda: 1 / 0) if case.placement == "round_robin" else (lambda: None)
        return lambda steps: iter([(0.1, 0.0)] * steps), step

    monkeypatch.setattr(worker, "prepare_case", prepare_case)
    monkeypatch.setattr(worker, "profile_step", lambda step: {"step": step()})
    server = worker.Worker()
    server.config = server.towers = server.train = None

    def request(message):
        return worker.check_answer(json.loads(json.dumps(server.answer(*json.loads(json.dumps(message))))))

    ways = [("towers", "cpu"), ("mirrored", UNPLACED), ("towers", "round_robin")]
    cases = [BenchmarkCase(strategy, placement, 2, "float32") for strategy, placement in ways]
    results = runner._prepare(cases, {2: request})
    runner._measure(results, {2: request}, CONFIG, time.monotonic())
    runner._profile(results, {2: request})
    assert [(result.case.placement, result.shares, result.images_per_sec) for result in results] == [
        ("cpu", {"step": None}, [pytest.approx(1000)] * 3),
        ("round_robin", {}, [pytest.approx(1000)] * 3),
    ]
    output = capsys.readouterr().out
    assert "2 x mirrored, float32: left out: NotImplementedError" in output
    assert "not profiled: 2 x towers, round_robin, float32: division by zero" in output


@pytest.mark.parametrize(("strategy", "steps"), [("towers", 1), (NO_EXCHANGE, 2)])
def test_benchmark_makes_the_step_with_frozen_whitening(towers, monkeypatch, strategy, steps):
    """The whitening is trained for the first of ten epochs."""
    rates = []
    make_training = build.make_training

    def record_rates(*arguments, **options):
        state, _, towers = make_training(*arguments, **options)
        return state, lambda batch, groups, size: rates.append({*groups}) or tf.constant(0.0), towers

    monkeypatch.setattr(build, "make_training", record_rates)
    recipe = TrainConfig(model="speednet93", batch_size=20, epochs=10, whitening_epochs=1, optimizer="momentum")
    case = BenchmarkCase(strategy, UNPLACED, 2, "float32")
    train = synthetic.make(200, seed=0, stream=0)
    run_steps, _ = worker.prepare_case(BenchmarkConfig(recipe=recipe), case, towers(2), train)
    list(run_steps(1))
    assert rates == [{"kernels", "biases", "head"}] * steps


def test_automatic_micro_batches_are_measured_as_one(monkeypatch):
    monkeypatch.setattr(synthetic, "load", lambda: (synthetic.make(40, 0, 0), synthetic.make(20, 0, 1)))
    recipe = TrainConfig(dataset="synthetic", model="cifarnet", crop=24, batch_size=8, micro_batches=0)
    server = worker.Worker()
    server.start(dataclasses.asdict(BenchmarkConfig(recipe=recipe)), 2)
    first, second = server.prepare(list(BenchmarkCase("towers", "cpu", 2, "float32")))
    assert first > second > 0

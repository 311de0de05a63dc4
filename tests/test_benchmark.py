"""The benchmark: its cases, a visit's flags, the order of rounds, and the report."""

import dataclasses
import itertools
import json
import signal

import matplotlib.image
import pytest

from cifar_towers import benchmark
from cifar_towers.benchmark import BenchmarkCase, as_flags, make_cases, short_training
from cifar_towers.cli.main import parse_command_line
from cifar_towers.config import TrainConfig
from cifar_towers.config.programs import BenchmarkConfig
from cifar_towers.config.train_config import recipe_names
from cifar_towers.errors import RunError

CPU, MIRRORED = BenchmarkCase(2, "towers", "cpu"), BenchmarkCase(2, "mirrored", "")
FASTEST = "--num_gpus=2 --variable_placement=cpu"
MACHINE = {
    "processor": "Abacus",
    "cores": 2,
    "gpus": ["A100", "A100"],
    "packages": {"tensorflow": "2"},
}


@pytest.fixture
def config(tmp_path):
    settings = {"recipe": "mine", "model": "cifarnet", "crop": 24, "batch_size": 100}
    return BenchmarkConfig(**settings, train_dir=str(tmp_path), minutes=0.0)


@pytest.mark.parametrize(
    ("settings", "num_gpus", "expected"),
    [
        ({}, 0, {1: ["cpu"], 2: ["cpu", "round_robin", "least_loaded", "mirrored"]}),
        ({"towers": "1,4"}, 0, {1: ["cpu"], 4: ["cpu", "mirrored"]}),
        ({}, 1, {1: ["cpu", "round_robin"]}),
        (
            {},
            8,
            {1: ["cpu", "round_robin"], 2: ["mirrored"], 4: ["mirrored"]},
        ),  # 8 cannot share 100 images
    ],
)
def test_cases(config, settings, num_gpus, expected):
    cases = make_cases(dataclasses.replace(config, **settings), num_gpus)
    assert len(cases) == len({*cases})
    assert {case.num_gpus for case in cases} == {*expected}
    for count, ways in expected.items():
        of_count = [
            case.variable_placement or case.strategy for case in cases if case.num_gpus == count
        ]
        assert {case.jit_compile for case in cases if case.num_gpus == count} == (
            {False, True} if num_gpus else {False}
        )
        assert {*ways} <= {*of_count} and ("mirrored" in of_count) == (count > 1)


@pytest.mark.parametrize(
    ("recipe", "case"), [*((name, CPU) for name in recipe_names()), ("speed94", MIRRORED)]
)
def test_a_visit_trains_the_recipe_with_the_flags_of_its_case(recipe, case):
    recipe = parse_command_line(BenchmarkConfig, [f"--recipe={recipe}", "--seed=3"])
    config = dataclasses.replace(
        short_training(recipe, on_gpus=False), **case._asdict(), recipe="", train_dir="here"
    )
    trained = parse_command_line(TrainConfig, ["--recipe=", *as_flags(vars(config))])
    assert vars(config).items() >= vars(trained).items()
    length = config.run_length(steps_per_epoch=1)
    assert length.last == 25 and length.total >= 25
    assert (config.batch_size, config.seed, config.optimizer) == (
        recipe.batch_size,
        3,
        recipe.optimizer,
    )
    assert parse_command_line(TrainConfig, str(case).split()).strategy == case.strategy


def test_rounds_have_random_orders_which_are_always_the_same():
    cases = list(range(6))
    first, again = (list(itertools.islice(benchmark.rounds(cases), 4)) for _ in range(2))
    assert first == again and all(sorted(order) == cases for order in first)
    assert len({tuple(order) for order in first}) == 4


def test_report_has_medians_quartiles_and_the_fastest_case(config, tmp_path, capsys):
    rates = {MIRRORED: [10.0, 50.0, 30.0, 20.0, 40.0], CPU: [60.0, 61.0, 62.0]}
    benchmark.write_json(config, rates, MACHINE)
    benchmark.publish(config, rates, MACHINE)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    cpu = ["2", "towers", "cpu", "no", "61", "60-62", "1,639.3", "3"]
    mirrored = ["2", "mirrored", "-", "no", "30", "20-40", "3,333.3", "5"]
    assert rows.index(cpu) == rows.index(mirrored) - 1 and rows[-1][1:] == FASTEST.split()
    written = json.loads((tmp_path / "benchmark.json").read_text())
    assert (written["recipe"], written["batch_size"], written["fastest"]) == ("mine", 100, FASTEST)
    (slow,) = (case for case in written["cases"] if case["strategy"] == "mirrored")
    assert (slow["median"], slow["quartiles"], slow["images_per_sec"]) == (
        30.0,
        [20.0, 40.0],
        rates[MIRRORED],
    )
    (axes,) = benchmark.plot(rates, "title").axes
    assert [text.get_text() for text in axes.get_yticklabels()] == [
        FASTEST,
        "--num_gpus=2 --strategy=mirrored",
    ]
    assert [bar.get_width() for bar in axes.patches] == [61.0, 30.0]
    assert matplotlib.image.imread(tmp_path / "benchmark.png")[..., :3].std() > 0.05


def test_finished_visits_are_reported_whatever_happens_later(config, monkeypatch, capsys):
    """One case fails, and is left out; then the benchmark is interrupted."""
    visits = []

    def visit(recipe, case, command, directory):
        visits.append(case)
        if case.strategy == "mirrored":
            raise RunError("OOM when allocating")
        if len(visits) == 5:
            signal.raise_signal(signal.SIGINT)
            raise RunError("exit code 130")
        return float(len(visits)), MACHINE

    monkeypatch.setattr(benchmark, "visit", visit)
    benchmark.run_benchmark(config, [])
    assert "--strategy=mirrored: left out: OOM when allocating" in capsys.readouterr().out
    assert len(json.loads((config.directory / "benchmark.json").read_text())["cases"]) == 3


def test_without_any_measurement_the_benchmark_fails(config):
    with pytest.raises(RunError, match="no case"):
        benchmark.run_benchmark(config, ["false"])

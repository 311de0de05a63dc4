"""The benchmark: its cases, a training's flags, the rounds, the reports, and the nets that are
written a second time.
"""

import itertools
import json
from unittest.mock import Mock

import matplotlib.image
import numpy as np
import pytest

from cifar_towers.config import TrainConfig
from cifar_towers.config.flags import parse_command_line, recipe_names
from cifar_towers.errors import RunError
from cifar_towers.models import MODELS
from scripts import benchmark, peers

CPU = "--num_gpus=2 --variable_placement=cpu"
MIRRORED = "--num_gpus=2 --strategy=mirrored"


def parse(*flags):
    return parse_command_line(TrainConfig, flags)


@pytest.mark.parametrize(
    ("counts", "num_gpus", "expected"),
    [
        ([1, 2], 0, {1: ["cpu"], 2: ["cpu", "round_robin", "least_loaded", "mirrored"]}),
        ([1, 4], 0, {1: ["cpu"], 4: ["cpu", "mirrored"]}),
        ([1], 1, {1: ["cpu", "round_robin"]}),
        ([1, 2, 8], 8, {1: ["cpu", "round_robin"], 2: ["mirrored"], 8: ["mirrored"]}),
    ],
)
def test_cases(counts, num_gpus, expected):
    cases = benchmark.make_cases(counts, has_gpus=num_gpus > 0)

    assert len(cases) == len({*cases})

    configs = [parse(*case.split()) for case in cases]
    assert {config.num_gpus for config in configs} == {*expected}

    for count, ways in expected.items():
        of_count = [config for config in configs if config.num_gpus == count]
        names = {config.variable_placement or config.strategy for config in of_count}
        assert {*ways} <= names
        assert ("mirrored" in names) == (count > 1)
        compiled = {config.jit_compile for config in of_count}
        assert compiled == ({False, True} if num_gpus else {False})


@pytest.mark.parametrize(
    ("num_gpus", "expected"), [(0, [1, 2]), (1, [1]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])]
)
def test_numbers_of_towers_are_doubled(num_gpus, expected):
    assert benchmark.default_counts(num_gpus) == expected


@pytest.mark.parametrize(
    ("recipe", "case"), [*((name, CPU) for name in recipe_names()), ("speed94", MIRRORED)]
)
def test_a_training_has_the_recipe_and_the_flags_of_its_case(recipe, case, monkeypatch):
    run = Mock(side_effect=InterruptedError)
    monkeypatch.setattr(benchmark, "run", run)
    args, flags = benchmark.parse_arguments(
        ["towers", f"--recipe={recipe}", "--seed=3", "--towers=2", "--rounds=1"]
    )
    monkeypatch.setattr(benchmark, "make_cases", lambda counts, has_gpus: [case])
    with pytest.raises(InterruptedError):
        benchmark.benchmark_towers(args, flags)
    ((_, _, *flags),) = run.call_args.args

    trained = parse(*flags)
    expected = parse(f"--recipe={recipe}", *case.split())
    length = trained.run_length(steps_per_epoch=1)

    assert length.last == 25
    assert length.total >= 25
    assert trained.seed == 3

    for name in ("recipe", "batch_size", "optimizer", "num_gpus", "strategy", "variable_placement"):
        assert getattr(trained, name) == getattr(expected, name)


def test_rounds_have_random_orders_which_are_always_the_same():
    cases = [str(number) for number in range(6)]

    def visits():
        rate_of = Mock(return_value=1.0)
        benchmark.measure(cases, rate_of, rounds=4)
        return [call.args[0] for call in rate_of.call_args_list]

    visited = visits()
    orders = [tuple(visited[start : start + 6]) for start in (0, 6, 12, 18)]

    assert visits() == visited
    assert all(sorted(order) == cases for order in orders)
    assert len({*orders}) == 4


def test_report_has_medians_quartiles_and_the_fastest_case(tmp_path, capsys):
    rates = {MIRRORED: [10.0, 50.0, 30.0, 20.0, 40.0], CPU: [60.0, 61.0, 62.0]}
    config = TrainConfig(recipe="mine", model="cifarnet", crop=24, batch_size=100)
    benchmark.write_report(tmp_path, config, ["A100", "A100"], rates)
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines()]
    cpu = [*CPU.split(), "61", "60-62", "1,639.3", "1.00", "3"]
    mirrored = [*MIRRORED.split(), "30", "20-40", "3,333.3", "2.03", "5"]

    assert rows.index(cpu) == rows.index(mirrored) - 1
    assert rows[-1][1:] == CPU.split()
    assert "2 x A100" in out

    written = json.loads((tmp_path / "benchmark.json").read_text())
    assert (written["recipe"], written["batch_size"], written["fastest"]) == ("mine", 100, CPU)

    of_mirrored = [case for case in written["cases"] if case["flags"] == MIRRORED]
    (slow,) = of_mirrored
    assert slow["median"] == 30.0
    assert slow["quartiles"] == [20.0, 40.0]
    assert slow["images_per_sec"] == rates[MIRRORED]

    (axes,) = benchmark.plot(rates, "title").axes
    assert [text.get_text() for text in axes.get_yticklabels()] == [CPU, MIRRORED]
    assert [bar.get_width() for bar in axes.patches] == [61.0, 30.0]
    assert matplotlib.image.imread(tmp_path / "benchmark.png")[..., :3].std() > 0.05


def test_what_is_measured_is_kept_whatever_happens_later(capsys):
    """One case fails, and is left out; then the benchmark is interrupted."""
    visits = []

    def rate_of(case):
        visits.append(case)
        if case == MIRRORED:
            raise RunError("OOM when allocating")
        if len(visits) == 5:
            raise KeyboardInterrupt
        return float(len(visits))

    cases = [*benchmark.make_cases([1, 2], has_gpus=False)]
    rates = benchmark.measure(cases, rate_of, rounds=3)

    assert f"{MIRRORED}: left out: OOM when allocating" in capsys.readouterr().out
    assert len(rates) == 3
    assert {*rates} < {*cases} - {MIRRORED}


def test_without_any_measurement_the_benchmark_fails(monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "TRAIN_COMMAND", ["false"])
    monkeypatch.setattr("sys.argv", ["benchmark.py", "towers", "--recipe=smoke"])
    with pytest.raises(SystemExit, match="nothing could be measured"):
        benchmark.main()
    assert "left out: exit code 1" in capsys.readouterr().out


# Other frameworks ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("net", "image_size", "batch_size"), sorted(benchmark.NETS.values()))
def test_the_net_of_keras_has_the_layers_and_parameters_of_ours(net, image_size, batch_size):
    ours = MODELS[net](image_size=image_size)
    theirs = peers.keras_net(net, image_size)
    shapes = [tuple(weight.shape) for weight in ours.trainable_weights]

    assert shapes == [tuple(weight.shape) for weight in theirs.trainable_weights]
    assert sum(map(np.prod, shapes)) == peers.TRAINED_PARAMETERS[net]
    assert all(type(layer).__module__.startswith("keras.") for layer in theirs.layers)


@pytest.mark.parametrize("net", ["resnet20", "cifarnet"])
def test_the_net_of_keras_computes_what_ours_does(net):
    ours = MODELS[net](image_size=24)
    theirs = peers.keras_net(net, 24)
    our_layers = [layer for layer in ours.layers if layer.weights]
    their_layers = [layer for layer in theirs.layers if layer.weights]
    for mine, other in zip(our_layers, their_layers, strict=True):
        values = {weight.name: weight for weight in mine.weights}
        other.set_weights([values[weight.name].numpy() for weight in other.weights])

    images = np.random.default_rng(0).normal(size=(4, 24, 24, 3)).astype("f4")
    expected = ours(images, training=False).numpy()  # with a smaller epsilon in its norms
    found = theirs(images, training=False)
    np.testing.assert_allclose(found, expected, atol=0.02 * abs(expected).max())


OWN_NET = "examples/mobilenet.py:net"


@pytest.mark.parametrize("net", [*benchmark.NETS, OWN_NET])
def test_our_training_has_the_net_and_the_sizes_of_the_others(net, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    training_rate = Mock(return_value=1.0)
    monkeypatch.setattr(benchmark, "training_rate", training_rate)
    benchmark.measure_frameworks(net, ["ours"], "float32", rounds=1)
    (flags,) = training_rate.call_args.args
    trained = parse(*flags)
    size = trained.crop or trained.image_size

    assert (trained.model, size, trained.batch_size) == benchmark.net_and_sizes(net)
    assert (trained.image_size_schedule, trained.precision) == ("", "float32")


def test_a_net_of_the_users_is_compared_with_keras_alone(monkeypatch):
    args, _ = benchmark.parse_arguments(["frameworks", f"--nets=resnet20,{OWN_NET}"])
    assert args.nets == ["resnet20", OWN_NET]

    with pytest.raises(SystemExit):
        benchmark.parse_arguments(["frameworks", f"--frameworks={OWN_NET}"])

    images = np.zeros([4, 32, 32, 3], np.float32)
    trained, time_steps = peers.keras_fit(OWN_NET, images, np.zeros(4), "float32")
    assert trained == 408_938
    ends = itertools.count()  # a step takes a second by this clock
    monkeypatch.setattr(peers, "time", Mock(perf_counter=lambda: next(ends)))
    assert time_steps(3) == 3

    with pytest.raises(SystemExit, match="for Keras"):
        peers.pytorch_net(OWN_NET, 32)


def test_a_framework_that_fails_is_left_out_and_the_table_compares_medians(monkeypatch, capsys):
    def peer_rate(framework, net, precision, on_gpus):
        if framework == "pytorch":
            raise RunError("no compiler")
        return {"keras": 50.0, "keras-onednn": 80.0}[framework]

    monkeypatch.setattr(benchmark, "peer_rate", peer_rate)
    monkeypatch.setattr(benchmark, "training_rate", lambda flags: 100.0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    args, flags = benchmark.parse_arguments(
        ["frameworks", "--nets=resnet20", "--frameworks=ours,keras,keras-onednn,pytorch"]
    )
    args.benchmark(args, flags)
    out = capsys.readouterr().out

    assert "pytorch: left out: no compiler" in out

    rows = [row.split() for row in out.splitlines()]
    first = rows.index(["ours", "100", "100-100", "1,280.0", "1.00", "3"])

    assert rows[first + 1 : first + 3] == [
        ["keras-onednn", "80", "80-80", "1,600.0", "1.25", "3"],
        ["keras", "50", "50-50", "2,560.0", "2.00", "3"],
    ]

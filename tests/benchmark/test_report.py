import json
import multiprocessing
import threading
import time
from types import SimpleNamespace

import matplotlib.image
import pytest

from cifar_towers.benchmark import report, runner, worker
from cifar_towers.benchmark.cases import KERAS, NO_EXCHANGE, UNPLACED, BenchmarkCase, PreparedCase, grid
from cifar_towers.benchmark.round_stats import Row
from cifar_towers.benchmark.runner import set_efficiency
from cifar_towers.cli import tf_import
from cifar_towers.cli.tool_configs import BenchmarkConfig
from cifar_towers.errors import RunError, UsageError
from cifar_towers.reporting.profiler import PARTS
from cifar_towers.towers import Tower
from cifar_towers.towers.communication import VariableBytes, predict

FACTS = {
    "recipe": "mine", "model": "cifarnet", "batch_size": 256, "dataset": "synthetic", "processor": "Abacus <1>",
    "cores": 2, "devices": 1, "kind": "CPU", "date": "2026-01-01", "minutes": 1.0, "packages": {"tensorflow": "2"},
}  # fmt: skip
DEVICES = {1: {"physical": 1}, 2: {"physical": 1}}


def row(strategy, placement, towers, rates, precision="float32", input="constant", waiting=0.0):
    shares = {} if strategy == KERAS else dict(zip(PARTS, (0.3, 0.6, 0.05, 0.04, 0.01), strict=True))
    variation = BenchmarkCase(strategy, placement, towers, precision, input)
    return Row(variation, 3.0, 0.1, 4, rates, waits=[waiting], shares=shares)


def measured(**rates):
    """Rows of a machine where these are the medians; the rest is 100."""
    value = {"one": 100, "cpu": 100, "round": 100, "mirrored": 100, "apart": 100, "fed": 100, "waiting": 0.0} | rates
    spread = {name: [0.9 * middle, middle, 1.1 * middle] for name, middle in value.items()}  # in three rounds
    rows = [
        row("towers", "cpu", 1, spread["one"]),
        row("towers", "cpu", 2, spread["cpu"]),
        row("towers", "round_robin", 2, spread["round"]),
        row("mirrored", UNPLACED, 2, spread["mirrored"]),
        row(NO_EXCHANGE, UNPLACED, 2, spread["apart"]),
        row("towers", "cpu", 2, spread["fed"], input="stream", waiting=value["waiting"]),
        row(KERAS, UNPLACED, 2, [10, 20, 30]),
    ]
    set_efficiency(rows, DEVICES)
    return rows


@pytest.mark.parametrize(
    ("rates", "told"),
    [
        ({}, "bound by compute (90 % of the work is forward and backward): use --num_gpus=1"),
        ({"cpu": 120, "apart": 121}, "use --num_gpus=2 --precision=float32 --variable_placement=cpu (120 images/s)"),
        ({"cpu": 100, "round": 120, "apart": 121}, "use --num_gpus=2 --precision=float32 --variable_placement=round_"),
        ({"mirrored": 150, "apart": 151}, "--strategy=mirrored (150 images/s)"),
        (
            {"cpu": 120, "apart": 150},
            "bound by the exchange between towers (20 % slower than 2 towers that never meet)",
        ),
        (
            {"cpu": 120, "apart": 120, "fed": 80, "waiting": 0.3},
            "bound by its input (80 images/s with it; 2 towers wait for it 30 % of the time): use --num_gpus=2",
        ),
        ({"cpu": 120, "apart": 120, "fed": 121, "waiting": 0.06}, "bound by compute"),
        (
            {"one": 60, "cpu": 80, "round": 80, "mirrored": 80, "apart": 81},
            "bound by compute",
        ),
    ],
)
def test_the_conclusion_names_the_bottleneck_and_the_flags(rates, told):
    assert told in report.conclude(measured(**rates), FACTS)


def test_too_small_a_batch_per_tower():
    """Two real devices, which alone do half of what one does with the whole batch."""
    rows = [row("towers", "cpu", 1, [100]), row("towers", "cpu", 2, [105]), row(NO_EXCHANGE, UNPLACED, 2, [106])]
    for each in rows:
        each.images_per_sec *= 3
    set_efficiency(rows, {1: {"physical": 1}, 2: {"physical": 2}})
    assert rows[1].efficiency == pytest.approx(0.525)
    assert "too small a batch per tower (128 images: 2 towers that never meet reach 53 %" in report.conclude(
        rows, FACTS
    )


def test_one_tower_that_is_fastest_because_several_wait_for_each_other():
    rows = [
        row("towers", "cpu", 1, [100] * 3),
        row("towers", "cpu", 2, [70] * 3),
        row(NO_EXCHANGE, UNPLACED, 2, [190] * 3),
    ]
    set_efficiency(rows, {1: {"physical": 1}, 2: {"physical": 2}})
    told = report.conclude(rows, FACTS)
    assert "bound by the exchange between towers (47 % slower than 2 towers that never meet): use --num_gpus=1" in told


def test_the_table_is_aligned_and_sorted_and_tells_the_spread():
    lines = report.table(measured(cpu=120)).splitlines()
    assert len(set(map(len, lines))) == 1
    assert [line.split()[1] for line in lines[1:3]] == ["towers", "towers"]
    assert "min-max" in lines[0] and "108-132  3 x 4" in lines[1] and "120.0 %" in lines[1] and "60.0 %" in lines[1]
    keras = next(line for line in lines if line.split()[1] == "keras")
    assert "10-30" in keras
    quartered = report.table([row("towers", "cpu", 1, [10, 50, 30, 20, 40])]).splitlines()
    assert "quartiles" in quartered[0] and "20-40  5 x 4" in quartered[1]


def test_the_table_of_predictions_is_aligned():
    rows = predict(0.008, [VariableBytes(10**6)], 1024, 10**4, 10.0, exchanges=["cpu", "ring"])
    lines = report.prediction_table(rows).splitlines()
    assert len(lines) == 1 + 2 * 7 and len(set(map(len, lines))) == 1
    assert lines[0].split()[:3] == ["variables", "devices", "batch"]
    assert lines[8].split() == ["ring", "1", "1,024", "8.00", "1.02", "9.02", "113,475", "100.0%"]


def test_what_is_published(tmp_path, capsys):
    rows = [*measured(cpu=120), row("towers", "cpu", 1, [50, 51, 52], precision="bfloat16")]
    report.publish(tmp_path, FACTS, rows)
    assert report.conclude(rows, FACTS) in capsys.readouterr().out
    told = json.loads((tmp_path / "benchmark.json").read_text())
    assert told["rows"][1]["median"] == 120 and told["rows"][1]["variation"]["placement"] == "cpu"
    assert report.table(rows) in (tmp_path / "benchmark.txt").read_text()
    page = (tmp_path / "index.html").read_text()
    assert "Abacus &lt;1&gt;" in page and "data:image/png;base64," in page and 'src="http' not in page
    picture = matplotlib.image.imread(tmp_path / "benchmark.png")
    assert picture.shape[1] > 1000 and picture[..., :3].std() > 0.05


def test_what_cannot_be_written_is_printed(tmp_path, capsys):
    rows, place = measured(cpu=120), tmp_path / "file"
    place.write_text("")
    with pytest.raises(RunError, match="file cannot be written .*what is above is all there is"):
        report.publish(place, FACTS, rows)
    assert report.table(rows) in capsys.readouterr().out


def test_what_nobody_hears_is_written(tmp_path, monkeypatch):
    """As of `make bench | head`."""

    def closed(*_, **__):
        raise BrokenPipeError

    rows = measured(cpu=120)
    monkeypatch.setattr("builtins.print", closed)
    with pytest.raises(BrokenPipeError):
        report.publish(tmp_path, FACTS, rows)
    assert report.table(rows) in (tmp_path / "benchmark.txt").read_text() and (tmp_path / "benchmark.json").exists()


def test_the_grid_leaves_out_what_is_the_same():
    found = grid((1, 2, 4), ("bfloat16", "float32"), with_peers=True)
    first, second = ([v for v in found if v.precision == precision] for precision in ("bfloat16", "float32"))
    assert len(found) == len(set(found)) and (len(first), len(second)) == (13, 4)
    assert [v[:2] for v in first if v.towers == 1] == [("towers", "cpu")]
    assert [v.towers for v in first if v.input == "stream"] == [4]
    for count in (2, 4):
        placements = {v.placement for v in first if (v.strategy, v.towers) == ("towers", count)}
        assert placements == {"cpu", "round_robin", "least_loaded"}
    assert {v[:3] for v in second} == {
        *(("towers", "cpu", count) for count in (1, 4)),
        ("mirrored", UNPLACED, 4),
        (KERAS, UNPLACED, 4),
    }
    assert grid((1,), ("float32",), with_peers=False) == [
        BenchmarkCase("towers", "cpu", 1, "float32"),
        BenchmarkCase("towers", "cpu", 1, "float32", "stream"),
    ]


def test_a_gpu_of_its_own_is_another_place_than_the_cpu_for_one_tower():
    found = [v.placement for v in grid((1,), ("float32",), with_peers=False, on_gpus=True) if v.input == "constant"]
    assert found == ["cpu", "round_robin"]
    rows = [row("towers", "cpu", 1, [50]), row("towers", "round_robin", 1, [100]), row("towers", "cpu", 2, [150])]
    set_efficiency(rows, {1: {"physical": 1}, 2: {"physical": 2}})
    assert [each.efficiency for each in rows] == [0.5, 1.0, 0.75]


def test_a_visit_that_fails_leaves_out_its_row_alone(capsys):
    """As where memory has become short."""
    rows = [row("towers", placement, 2, []) for placement in ("cpu", "round_robin")]
    for each in rows:
        each.waits = []

    def ask(order):
        if order[1].placement == "cpu" and rows[0].images_per_sec:
            raise UsageError("OOM when allocating")
        return {"seconds": [9.0, *[0.1] * (order[2] - 1)], "waiting": [0.0] * order[2]}

    runner._measure(rows, {2: ask}, BenchmarkConfig(batch_size=100, minutes=0.01), time.monotonic())
    (left,) = rows
    assert (
        left.steps == 3
        and left.variation.placement == "round_robin"
        and left.images_per_sec == [pytest.approx(1000)] * 3
    )
    assert "left out: 2 x towers, cpu: OOM when allocating" in capsys.readouterr().out


class Worker(worker._Worker):
    """As it is without its towers and data."""

    def __init__(self, config, towers):
        self.config, self.train, self.dataset = config, None, "none"
        self.towers, self.built = [Tower(0, "/CPU:0")], {}


def test_a_variation_that_fails_in_any_way_costs_the_others_nothing(monkeypatch, capsys):
    """One cannot be built, and one cannot be profiled; in the end the process has gone."""

    def build(config, variation, towers, train):
        if variation.strategy == "mirrored":
            raise NotImplementedError
        failing = variation.placement == "round_robin"
        call = (lambda: 1 / 0) if failing else (lambda: None)
        return PreparedCase(lambda steps: iter([(0.1, 0.0)] * steps), call)

    monkeypatch.setattr(worker, "_Worker", Worker)
    monkeypatch.setattr(worker, "build", build)
    monkeypatch.setattr(worker, "profiled", lambda call: SimpleNamespace(shares=lambda: {"step": call()}))
    config = BenchmarkConfig(batch_size=100, minutes=0.01)
    connection, theirs = multiprocessing.Pipe()
    serving = threading.Thread(target=worker.serve, args=(config, 2, theirs))
    serving.start()
    ask = runner.asking(connection, 2)
    assert ask()["dataset"] == "none"
    variations = [BenchmarkCase("towers", "cpu", 2, "float32"), BenchmarkCase("mirrored", UNPLACED, 2, "float32")]
    variations.append(BenchmarkCase("towers", "round_robin", 2, "float32"))
    rows = runner._prepare(variations, {2: ask})
    runner._measure(rows, {2: ask}, config, time.monotonic())
    runner._profile(rows, {2: ask})
    assert [(row.variation.placement, row.shares, row.images_per_sec) for row in rows] == [
        ("cpu", {"step": None}, [pytest.approx(1000)] * 3),
        ("round_robin", {}, [pytest.approx(1000)] * 3),
    ]
    told = capsys.readouterr().out
    assert "2 x mirrored, float32: left out: NotImplementedError" in told
    assert "no shares: 2 x towers, round_robin: division by zero" in told
    connection.send(None)
    serving.join(10)
    theirs.close()
    with pytest.raises(RunError, match="the process of 2 towers has ended"):
        ask(("run", variations[0], 1))


def test_a_conclusion_without_shares_tells_none():
    rows = measured()
    for each in rows:
        each.shares = {}
    assert "is bound by compute: use --num_gpus=1" in report.conclude(rows, FACTS)


def test_without_any_way_to_train_nothing_is_told():
    with pytest.raises(UsageError, match="nothing could be measured"):
        runner._refuse_without_runs([row(KERAS, UNPLACED, 2, [])])


def test_a_process_that_ended_by_itself_is_no_error_at_the_end(monkeypatch):
    monkeypatch.setattr(tf_import, "serve_benchmark", slice)  # takes what that takes, and ends
    with runner.open_worker(BenchmarkConfig(), 2) as ask, pytest.raises(RunError, match="the process of 2 towers has"):
        ask()


def test_batches_that_were_made_ahead_tell_nothing_of_the_input():
    """Two of them are there at once, and each later one makes the step wait for 0.3 s."""
    rows = [Row(BenchmarkCase("towers", "cpu", 2, "float32", "stream"), 3.0, 0.4)]

    def ask(order):
        steps = order[2] - 3
        return {"seconds": [9.0, 0.1, 0.1, *[0.4] * steps], "waiting": [0.0, 0.0, 0.0, *[0.3] * steps]}

    runner._measure(rows, {2: ask}, BenchmarkConfig(batch_size=100, minutes=0.01), time.monotonic())
    assert rows[0].images_per_sec == [pytest.approx(250)] * 3 and rows[0].waiting == pytest.approx(0.75)

import json
from unittest.mock import Mock

import matplotlib.image
import pytest
from matplotlib.figure import Figure

from cifar_towers.benchmark import report
from cifar_towers.benchmark.runner import set_efficiency
from cifar_towers.errors import RunError
from tests.benchmark.results import make_result, make_results

METADATA = {
    "recipe": "mine", "model": "cifarnet", "batch_size": 256, "dataset": "synthetic", "processor": "Abacus <1>",
    "cores": 2, "devices": 1, "kind": "CPU", "date": "2026-01-01", "minutes": 1.0, "packages": {"tensorflow": "2"},
}  # fmt: skip


def test_slow_rates_have_a_decimal():
    cells = make_result("towers", "cpu", 1, [0.31, 0.42, 12.0]).cells()
    assert cells["images/s"] == "0.4" and cells["min-max"] == "0.3-12"


@pytest.mark.parametrize(
    ("medians", "expected"),
    [
        ({}, "bound by compute (90 % of the work is forward and backward): use --num_gpus=1"),
        ({"cpu": 120, "no_exchange": 121}, "--num_gpus=2 --precision=float32 --variable_placement=cpu (120 images/s)"),
        ({"round_robin": 120, "no_exchange": 121}, "--num_gpus=2 --precision=float32 --variable_placement=round_robin"),
        ({"mirrored": 150, "no_exchange": 151}, "--strategy=mirrored (150 images/s)"),
        ({"cpu": 120, "no_exchange": 150}, "the exchange between towers (20 % slower than 2 towers that never meet)"),
        (
            {"cpu": 120, "no_exchange": 120, "stream": 80, "waiting": 0.3},
            "bound by its input (80 images/s with it; 2 towers wait for it 30 % of the time): use --num_gpus=2",
        ),
        ({"cpu": 120, "no_exchange": 120, "stream": 121, "waiting": 0.06}, "bound by compute"),
        ({"one": 60, "cpu": 80, "round_robin": 80, "mirrored": 80, "no_exchange": 81}, "bound by compute"),
        (
            {"cpu": 105, "no_exchange": 106, "physical": 2},
            "too small a batch per tower (128 images: 2 towers that never meet reach 53 % of what",
        ),
        (
            {"cpu": 70, "no_exchange": 190, "physical": 2},
            "bound by the exchange between towers (47 % slower than 2 towers that never meet): use --num_gpus=1",
        ),
    ],
)
def test_conclusion_names_bottleneck_and_flags(medians, expected):
    results = make_results(**medians)
    assert expected in report.conclude(results, METADATA)
    for result in results:
        result.shares = {}
    without_profile = expected.replace(" (90 % of the work is forward and backward)", "")
    assert without_profile in report.conclude(results, METADATA)


def test_efficiency_is_relative_to_the_best_placement_of_one_tower():
    """A tower on a GPU may have its variables there or on the CPU."""
    rates = {("cpu", 1): 50, ("round_robin", 1): 100, ("cpu", 2): 150}
    results = [make_result("towers", placement, towers, [rate]) for (placement, towers), rate in rates.items()]
    set_efficiency(results, {1: 1, 2: 2})
    assert [result.efficiency for result in results] == [0.5, 1.0, 0.75]
    assert make_results(cpu=105, physical=2)[1].efficiency == pytest.approx(0.525)


def test_table_is_aligned_sorted_and_shows_the_spread():
    lines = report.table(make_results(cpu=120)).splitlines()
    assert len(set(map(len, lines))) == 1
    assert [line.split()[1] for line in lines[1:3]] == ["towers", "towers"]
    assert "min-max" in lines[0] and "108-132  3 x 4" in lines[1] and "120.0 %" in lines[1] and "60.0 %" in lines[1]
    keras = next(line for line in lines if line.split()[1] == "keras")
    assert "10-30" in keras
    five_rounds = report.table([make_result("towers", "cpu", 1, [10, 50, 30, 20, 40])]).splitlines()
    assert "quartiles" in five_rounds[0] and "20-40  5 x 4" in five_rounds[1]


@pytest.mark.parametrize("towers", [1, 2])
def test_plot_explains_the_line_of_one_tower_where_there_is_one(towers):
    panel = Figure().subplots()
    report._draw_bars(panel, [make_result("towers", "cpu", towers, [10, 20, 30])])
    assert len([line for line in panel.lines if line.get_linestyle() == ":"]) == (towers == 1)
    assert ("dotted: one tower" in panel.get_xlabel()) == (towers == 1)


def test_published_files(tmp_path, capsys):
    results = [*make_results(cpu=120), make_result("towers", "cpu", 1, [50, 51, 52], precision="bfloat16")]
    report.publish(tmp_path, METADATA, results)
    assert report.conclude(results, METADATA) in capsys.readouterr().out
    rows = json.loads((tmp_path / "benchmark.json").read_text())["rows"]
    assert rows[1]["median"] == 120 and rows[1]["case"]["placement"] == "cpu"
    assert report.table(results) in (tmp_path / "benchmark.txt").read_text()
    page = (tmp_path / "index.html").read_text()
    assert "Abacus &lt;1&gt;" in page and "data:image/png;base64," in page and 'src="http' not in page
    picture = matplotlib.image.imread(tmp_path / "benchmark.png")
    assert picture.shape[1] > 1000 and picture[..., :3].std() > 0.05


def test_unwritable_results_are_printed_and_unprintable_ones_written(tmp_path, capsys, monkeypatch):
    results, file = make_results(cpu=120), tmp_path / "file"
    file.write_text("")
    with pytest.raises(RunError, match="file cannot be written .*the results are only printed above"):
        report.publish(file, METADATA, results)
    assert report.table(results) in capsys.readouterr().out
    monkeypatch.setattr("builtins.print", Mock(side_effect=BrokenPipeError))  # as with `make bench | head`
    with pytest.raises(BrokenPipeError):
        report.publish(tmp_path, METADATA, results)
    assert report.table(results) in (tmp_path / "benchmark.txt").read_text() and (tmp_path / "benchmark.json").exists()

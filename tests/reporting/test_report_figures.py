import re

import numpy as np
import pytest

from cifar_towers.reporting import figures, report_figures
from cifar_towers.reporting.run_records import group_by_recipe, read_runs
from tests.reporting.example_runs import CLASSES, accuracies, make_run, read_records, read_result, write_records


@pytest.fixture
def plotted(monkeypatch):
    """The arguments of each line plot and confusion matrix by title, none of which is drawn."""
    calls = {}

    def record(data, *arguments):
        title = next(argument for argument in arguments if isinstance(argument, str))
        calls[title] = (data, *arguments)
        return np.zeros((2, 2, 3), np.uint8)

    monkeypatch.setattr(figures, "line_plot", record)
    monkeypatch.setattr(figures, "confusion_matrix", record)
    return calls


def groups_of(*directories):
    return group_by_recipe(read_runs(directories))


def test_curve_is_the_mean_with_a_band_over_the_seeds(tmp_path, plotted):
    paths = [make_run(tmp_path / f"s{seed}", seed=seed) for seed in range(3)] + [make_run(tmp_path / "r", "resnet20")]
    pictures = report_figures.curves(groups_of(*paths))
    curves = {title: arguments[0] for title, arguments in plotted.items()}
    assert len(curves) == 8 and all(list(lines) == ["speed94", "resnet20"] for lines in curves.values())
    for title, key, scale in (
        ("training loss (batch)", "loss", 1),
        ("training accuracy (batch)", "accuracy", 100),
        ("time waiting for input", "input_wait", 100),
    ):
        values = scale * np.array([[record[key] for record in read_records(path, "train")] for path in paths])
        x, y, low, high = curves[title]["speed94"]
        np.testing.assert_allclose(x, np.arange(11, 265, 11) / 33)
        mean, std = values[:3].mean(0), values[:3].std(0, ddof=1)
        np.testing.assert_allclose([y, low, high], [mean, mean - std, mean + std])
        np.testing.assert_allclose(curves[title]["resnet20"][1], values[3])
        assert len(curves[title]["resnet20"]) == 2
    x, y, low, high = curves["test accuracy, raw weights, no TTA"]["speed94"]
    assert x.tolist() == [2, 4, 6, 8]
    final = accuracies(paths[:3], 0)
    assert (y[-1], low[-1]) == pytest.approx((np.mean(final), np.mean(final) - np.std(final, ddof=1)))
    assert f"at the end: speed94 {y[-1]:.4g}" in pictures[0].alt
    assert len(curves["gradient noise scale"]["speed94"][0]) == 11  # one of twelve is null
    assert curves["throughput"]["speed94"][2].min() > 1000


def test_mean_curve_of_runs_of_different_length():
    x, y, low, high = report_figures.mean_curve([{1.0: 2.0, 2.0: 6.0}, {1.0: 4.0}, {}])
    assert [list(column) for column in (x, y)] == [[1, 2], [3, 6]]
    std = np.std([2, 4], ddof=1)
    assert [list(column) for column in (low, high)] == [[3 - std, 6], [3 + std, 6]]
    assert [len(column) for column in report_figures.mean_curve([{}], 3)] == [0, 0]


def test_mean_curve_averages_neighbors():
    runs = [{float(epoch): float(epoch**2 + run) for epoch in range(10)} for run in range(3)]
    del runs[2][9.0]
    x, y, low, high = report_figures.mean_curve(runs, 5)
    assert x.tolist() == [0.5, 2.5, 4.5, 6.5, 8.5]
    last = np.std([72.5, 73.5, 66.0], ddof=1)  # of the run that has only one of the two
    np.testing.assert_allclose(y - low, [1, 1, 1, 1, last])
    np.testing.assert_allclose(high - y, [1, 1, 1, 1, last])
    assert y[0] == 1.5 and y[-1] == pytest.approx((72.5 + 73.5 + 66) / 3)


def test_long_training_is_averaged_and_its_evaluations_are_not(tmp_path, plotted):
    values = [{"step": step, "epoch": step, "loss": 1, "accuracy": 0.5} for step in range(999)]
    write_records(tmp_path / "run", [{"kind": kind, **record} for record in values for kind in ("train", "eval")])
    groups = groups_of(tmp_path / "run")
    report_figures.curves(groups)
    assert [len(arguments[0]["run"][0]) for arguments in plotted.values()] == [999, 111, 111]
    note = "A point of a long run's training is the mean of several records."
    assert report_figures.describe_curves(groups) == note


def test_raw_and_averaged_weights_have_a_chart_each_and_recipes_one_color(tmp_path, plotted):
    paths = [make_run(tmp_path / "plain", "plain"), make_run(tmp_path / "averaged", "averaged", ema=True)]
    report_figures.curves(groups_of(*paths))
    assert list(plotted["test accuracy, raw weights, no TTA"][0]) == ["plain", "averaged"]
    averaged = plotted["test accuracy, ema weights, no TTA"][0]
    assert [(name, len(line[0])) for name, line in averaged.items()] == [("plain: not recorded", 0), ("averaged", 4)]


def test_more_recipes_than_a_chart_can_distinguish(tmp_path, plotted):
    report_figures.curves(groups_of(*(make_run(tmp_path / f"r{i}", f"recipe{i}", last_step=66) for i in range(9))))
    losses = {title: len(arguments[0]) for title, arguments in plotted.items() if "training loss" in title}
    assert losses == {"training loss (batch) (1 of 2)": 8, "training loss (batch) (2 of 2)": 1}


def test_confusion_matrices_of_a_group_are_summed_over_its_finished_runs(tmp_path, plotted):
    paths = [make_run(tmp_path / f"s{seed}", seed=seed) for seed in range(3)]
    expected = sum(np.array(read_result(path)["evaluations"][-1]["confusion"]) for path in paths[:2])
    (paths[2] / "result.json").unlink()
    (picture,) = report_figures.confusion_matrices(groups_of(*paths))
    ((counts, names, title),) = plotted.values()
    assert (counts == expected).all()
    assert names == CLASSES and title == "speed94, seeds 0, 1: test, raw weights, TTA 2"
    errors = counts - np.diag(np.diag(counts))
    assert picture.alt.startswith("confusion")
    assert f"{np.trace(counts):,} of {counts.sum():,} right; most often, {errors.max():,} times, " in picture.alt
    true, predicted = (CLASSES.index(name) for name in re.search(r"(\w+) is taken for (\w+)", picture.alt).groups())
    assert errors[true, predicted] == errors.max()


def test_damaged_picture_of_mistakes_is_left_out(tmp_path):
    path = make_run(tmp_path / "run")
    runs = read_runs([path])
    assert len(report_figures.mistakes(runs)) == 1
    png = (path / "mistakes.png").read_bytes()
    (path / "mistakes.png").write_bytes(png[: len(png) // 2])
    assert not report_figures.mistakes(runs)

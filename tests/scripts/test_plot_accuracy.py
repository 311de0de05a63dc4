"""The picture of accuracy over minutes."""

import pytest

from cifar_towers.runs.table import read_runs
from scripts.plot_accuracy import draw
from tests.helpers.example_runs import (
    STEPS,
    make_run,
    read_records,
    read_result,
    write_records,
    write_scores,
)


def test_a_run_is_a_line_without_tta_and_a_star_with_it(tmp_path):
    scores = [run.reported_score for run in read_runs([make_run(tmp_path / "run", ema=True)])]
    (axes,) = draw(read_runs([tmp_path])).axes
    line, star = axes.lines
    points = line.get_xydata()

    assert points[:, 0].tolist() == list(range(2, STEPS + 1, 2))
    assert (points[1:, 1] > points[:-1, 1]).all()
    assert star.get_xydata().tolist() == [[STEPS, pytest.approx(100 * scores[0]["accuracy"])]]
    assert axes.get_title().startswith("Abacus, 2 cores, bfloat16\n")


def test_runs_of_one_recipe_are_called_by_their_directories(tmp_path):
    for name in ("plain", "slower"):
        make_run(tmp_path / name)
    (axes,) = draw(read_runs([tmp_path])).axes
    names = [text.get_text().split(":")[0] for text in axes.get_legend().get_texts()]
    assert names == ["plain", "slower"]


def test_accuracies_are_those_on_held_out_images_if_there_are_some(tmp_path):
    run = make_run(tmp_path / "run")
    records = []
    for record in read_records(run):
        records.append(record)
        if record["kind"] == "eval":
            records.append(record | {"split": "validation", "accuracy": 0.5})
    write_scores(run, *read_result(run)["evaluations"], {"split": "validation", "accuracy": 0.5})
    write_records(run, records)
    (axes,) = draw(read_runs([tmp_path])).axes

    assert axes.get_ylabel() == "validation accuracy, %"
    assert set(axes.lines[0].get_ydata()) == {50.0}

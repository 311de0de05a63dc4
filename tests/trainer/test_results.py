"""The numbers of a run: its records, its result, and the same scores from `evaluate`."""

import json
import re
import socket
from dataclasses import asdict, replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from cifar_towers import files, trainer
from cifar_towers.cli.main import train_seeds
from cifar_towers.config.programs import EvaluateConfig
from cifar_towers.config.schedules import RunLength
from cifar_towers.data import sources, synthetic
from cifar_towers.errors import DataError, DivergedError
from cifar_towers.evaluation import evaluator
from cifar_towers.evaluation.score import Score
from cifar_towers.inference.evaluate import evaluate_checkpoint
from cifar_towers.inference.report import render
from cifar_towers.runs.checkpoint import find_checkpoint, read_checkpoint
from cifar_towers.runs.table import describe, format_table, read_runs
from cifar_towers.training.build import make_image_size_fn, make_run_devices
from tests.helpers.configs import TINY_NET
from tests.helpers.messages import lines_with
from tests.helpers.programs import call
from tests.helpers.short_runs import STEPS, TINY, records_of, run


def test_records_of_steps(tiny_run):
    """Scalars are recorded ten times as often as diagnostics, and at least every step."""
    train = records_of(tiny_run.directory, "train")

    assert [r["step"] for r in train] == list(range(1, 21))
    assert train[9]["epoch"] == 1.0
    assert train[-1]["loss"] < train[0]["loss"]
    assert [r["step"] for r in train if "towers" in r] == [5, 10, 15, 20]

    counts = {name: len(of_towers) for name, of_towers in train[4]["towers"].items()}
    assert counts == {"loss": 2, "gradient_norm": 2, "cosine": 2}


def test_records_of_evaluations_are_those_of_the_result(tiny_run):
    directory, result, _ = tiny_run
    final = [r for r in records_of(directory, "eval") if r["step"] == STEPS]
    assert [(r["split"], r["weights"], r["tta"], r["count"]) for r in final] == [
        ("test", "ema", tta, 500) for tta in (False, True)
    ]
    assert np.sum(final[0]["confusion"]) == 500
    assert [r["accuracy"] for r in final] == [r["accuracy"] for r in result["evaluations"]]


@pytest.mark.slow
def test_a_speednet_learns_at_its_image_sizes(speednet_run):
    directory, result = speednet_run
    assert [r["image_size"] for r in records_of(directory, "train")] == [18] * 10 + [20] * 10
    assert result["evaluations"][0]["accuracy"] > 0.6


def test_environment_has_towers_versions_classes_and_digests(tiny_run):
    environment = json.loads((tiny_run.directory / "environment.json").read_text())

    assert [(t["name"], t["device"]) for t in environment["towers"]] == [
        ("tower_0", "/CPU:0"),
        ("tower_1", "/CPU:1"),
    ]
    assert environment["packages"]["tensorflow"].startswith("2.")
    assert environment["processor"]
    assert environment["data_sha256"].keys() == {"train", "test"}
    assert len(environment["class_names"]) == 10
    assert environment["precision"] == "float32"


def test_a_crop_is_the_image_size_of_every_step():
    assert make_image_size_fn(replace(TINY, crop=18), RunLength(10, 20, 20))(0) == 18


def test_a_finished_run_returns_its_stored_result(tiny_run, caplog):
    caplog.set_level("INFO")
    directory, result, _ = tiny_run
    assert run(TINY, directory, num_gpus=4) == result
    assert lines_with(caplog.text, directory, f"step {STEPS}")


def test_a_finished_run_returns_no_result_of_other_data(tiny_run, monkeypatch):
    """The other data set has another name, and is no file of the user's."""
    train, test = synthetic.make(500, 1, 0), synthetic.make(500, 1, 1)
    other = sources.Source("cifar10", lambda image_size, names: {"train": train, "test": test})
    monkeypatch.setattr(sources, "find", Mock(return_value=other))
    with pytest.raises(DataError, match="other train and test images than cifar10"):
        run(TINY, tiny_run.directory)


def test_evaluate_reproduces_the_score_of_the_run(tiny_run):
    directory, result, _ = tiny_run
    config = EvaluateConfig(
        train_dir=str(directory),
        model=TINY_NET,
        weights="ema",
        tta=True,
        precision="float32",
        num_gpus=3,
    )
    score = evaluate_checkpoint(config)
    expected = result["evaluations"][-1]["accuracy"]

    assert score["count"] == 500
    assert score["accuracy"] == pytest.approx(expected, abs=0.004)
    assert score["interval95"][0] < score["accuracy"] < score["interval95"][1]
    assert sum(map(sum, score["confusion"])) == 500


def test_target_accuracy_ends_a_run(tmp_path):
    config = replace(TINY, target_accuracy=0.05, eval_every_epochs=0.2)
    result = run(config, tmp_path)

    assert result["step"] == 2
    assert run(config, tmp_path) == result  # the target stays reached
    assert result["reached"] == result["evaluations"][-1]["accuracy"]
    assert [(r["step"], r["weights"]) for r in records_of(tmp_path, "eval")] == [(2, "ema")]


def test_the_target_is_for_the_first_split_without_tta(tmp_path, monkeypatch):
    """The test split and augmented views are better here, and do not count."""

    def score(percent):
        return Score(np.zeros(100, np.int64), np.eye(10)[(np.arange(100) >= percent).astype(int)])

    percents = iter([93, 96, 97, 97])
    monkeypatch.setattr(evaluator, "Score", lambda labels, logits: score(next(percents)))
    settings = {"max_steps": 1, "validation_examples": 500, "tta": True}
    result = run(TINY, tmp_path, target_accuracy=0.94, **settings)
    kinds = [(each["split"], each["weights"], each["tta"]) for each in result["evaluations"]]

    assert kinds[:2] == [("validation", "ema", False), ("validation", "ema", True)]
    assert {split for split, *_ in kinds[2:]} == {"test"}
    assert result["reached"] is None


def test_an_indivisible_batch_uses_fewer_towers(caplog):
    caplog.set_level("INFO")
    assert len(make_run_devices(replace(TINY, num_gpus=0, batch_size=51))[1]) == 1
    assert lines_with(caplog.text, "1 tower instead of 2", "batch_size=51")


def test_rates_count_the_steps_that_finished(tmp_path):
    result = run(TINY, tmp_path, image_size_schedule="0=18,60%=20", checkpoint_every_steps=STEPS)
    rates = [record["images_per_sec"] for record in records_of(tmp_path, "train")]
    assert rates[0] is None
    assert all(rate > 0 for rate in rates[1:])
    assert result["images_per_sec"] > 0
    # the first and the 13th are compiled, and the 12th finishes meanwhile
    assert read_checkpoint(find_checkpoint(tmp_path))[1]["images"] == (STEPS - 3) * TINY.batch_size


def test_a_profile_is_written(tiny_run):
    assert (
        len(list((tiny_run.directory / "train" / "plugins" / "profile").rglob("*.xplane.pb"))) == 1
    )


def test_synthetic_data_that_replace_cifar10_are_named_everywhere(
    tmp_path, monkeypatch, capsys, caplog
):
    """Where they are chosen, at the start, at the end, in the directory's name, in the table of
    runs and in the page.
    """
    caplog.set_level("INFO")
    monkeypatch.setattr(socket, "create_connection", Mock(side_effect=TimeoutError))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    train_seeds(
        replace(
            TINY,
            recipe="tiny",
            dataset="auto",
            data_dir=str(tmp_path / "none"),
            max_steps=1,
            seeds="10",
        )
    )
    output = capsys.readouterr().out

    assert len(lines_with(caplog.text, "dataset=auto is synthetic", "does not answer")) == 1
    assert lines_with(output, "synthetic: 2,000 training images")
    assert lines_with(output, "result: synthetic test ", "%")

    (found,) = read_runs([Path("runs")])
    assert found.name == "tiny-synthetic-seed10"
    assert found.config["dataset"] == "synthetic"

    row = " +".join([found.name, "tiny", "synthetic", "done"])
    assert re.search(row, format_table([found]))
    assert "<td>synthetic</td>" in render([found])

    found.directory.joinpath("result.json").unlink()
    assert describe(found)["data"] == "synthetic"


def test_seeds_are_summarized_without_those_that_diverge(tmp_path, monkeypatch, capsys):
    """The data are located and read once. The last line is one of those below the table of runs."""
    accuracies = {0: 0.94, 2: 0.92, 3: 0.96, 4: 0.5}
    lineages = {4: ["from step 1: towers 2 -> 1"]}

    def train(config, source, *_, **__):
        source.read(32, sources.TRAINED)
        files.write_json(config.directory / files.CONFIG, asdict(config))
        if config.seed not in accuracies:
            raise DivergedError("step 6")
        evaluation = {"split": "test", "weights": "ema", "tta": False}
        evaluation["accuracy"] = accuracies[config.seed]
        result = {"step": 1, "seconds": {"train": 1.0}, "evaluations": [evaluation]}
        files.write_json(config.directory / files.RESULT, result)
        environment = {"lineage": lineages.get(config.seed, [])}
        files.write_json(config.directory / files.ENVIRONMENT, environment)
        return result

    monkeypatch.setattr(trainer, "train", train)
    read = Mock(return_value={})
    find = Mock(return_value=sources.Source("synthetic", read))
    monkeypatch.setattr(sources, "find", find)
    with pytest.raises(DivergedError, match="seed 1 .*step 6"):
        train_seeds(replace(TINY, train_dir=str(tmp_path / "plain"), seeds="0,1,2,3"))
    find.assert_called_once()
    read.assert_called_once()
    line = "plain: test 94.00 ± 2.00 % (n=3)\n"

    assert capsys.readouterr().out == line

    assert call(monkeypatch, "runs", f"--runs_dir={tmp_path}") == 0
    assert capsys.readouterr().out.endswith(f"\n\n{line}")

    train_seeds(replace(TINY, train_dir=str(tmp_path / "other"), seeds="0,4"))
    (last,) = lines_with(capsys.readouterr().out, "not averaged with each other: seed 0: ")

    assert last.endswith(", lineage=from step 1: towers 2 -> 1")

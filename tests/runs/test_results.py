"""The numbers of a run: its records, its result, and the same scores from `evaluate`."""

import json
import re
import socket
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from cifar_towers import trainer
from cifar_towers.checkpointing.checkpoint import list_checkpoints
from cifar_towers.cli import main
from cifar_towers.cli.main import train_seeds
from cifar_towers.config.programs import EvaluateConfig
from cifar_towers.errors import DivergedError, Interrupted, UsageError
from cifar_towers.inference import evaluate
from cifar_towers.inference.run import Run
from cifar_towers.training.build import setup_devices
from tests.messages import lines_with
from tests.runs.short_runs import QUICK, STEPS, TINY, StopAtStep, records_of, run


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 4])
def test_accuracy_on_one_and_four_towers(tmp_path, one_run, count):
    result = run(QUICK, tmp_path, num_gpus=count)
    for each in (result, one_run[1]):
        assert each["step"] == STEPS
        assert each["evaluations"][0]["accuracy"] > 0.6
    # batch statistics are per shard, so the runs agree in accuracy, not to the bit
    assert abs(result["evaluations"][0]["accuracy"] - one_run[1]["evaluations"][0]["accuracy"]) < 0.25


def test_records_of_a_run(one_run):
    directory, result, _ = one_run
    train = records_of(directory, "train")
    assert [r["step"] for r in train] == list(range(1, 21))  # ten times as often as diagnostics, at least every step
    assert {"step", "epoch", "loss", "accuracy", "images_per_sec", "learning_rate"} <= set(train[0])
    assert [r["image_size"] for r in train] == [18] * 10 + [20] * 10
    assert train[9]["epoch"] == 1.0 and train[-1]["loss"] < train[0]["loss"]
    final = [r for r in records_of(directory, "eval") if r["step"] == STEPS]
    assert [(r["split"], r["weights"], r["tta"], r["count"]) for r in final] == [
        ("test", *kind, 500) for kind in (("raw", 0), ("ema", 0), ("ema", 2))
    ]
    assert [r["step"] for r in train if "towers" in r] == [5, 10, 15, 20]
    counts = {name: len(of_towers) for name, of_towers in train[4]["towers"].items()}
    assert counts == {"loss": 2, "gradient_norm": 2, "cosine": 2}
    assert np.sum(final[0]["confusion"]) == 500
    assert [r["accuracy"] for r in final] == [r["accuracy"] for r in result["evaluations"]]
    environment = json.loads((directory / "environment.json").read_text())
    assert [t["device"] for t in environment["towers"]] == ["/CPU:0", "/CPU:1"]
    assert json.loads((directory / "config.json").read_text())["batch_size"] == 200


def test_image_size_of_a_run_with_crops_is_that_of_the_crops(tmp_path):
    run(TINY, tmp_path, crop=18, max_steps=2, eval_every_epochs=0)
    assert [record["image_size"] for record in records_of(tmp_path, "train")] == [18, 18]


def test_finished_run_returns_its_stored_result(tiny_run, caplog):
    caplog.set_level("INFO")
    directory, result, _ = tiny_run
    assert run(TINY, directory, num_gpus=4) == result
    assert lines_with(caplog.text, directory, "complete", f"step {STEPS}")


def test_images_that_do_not_reach_the_size_of_the_evaluation_are_refused(tmp_path):
    with pytest.raises(UsageError, match="image_size_schedule=0=18,2=20 is still at 18 pixels in the last of 20 steps"):
        run(QUICK, tmp_path, image_size_schedule="0=18,2=20")


def test_evaluate_reproduces_the_score_of_the_run(one_run):
    directory, result, _ = one_run
    config = EvaluateConfig(train_dir=str(directory), precision="float32")
    score = json.loads(evaluate.evaluate_checkpoint(replace(config, weights="ema", tta=2, num_gpus=3, json=True)))
    expected = result["evaluations"][-1]["accuracy"]
    assert score["count"] == 500 and score["accuracy"] == pytest.approx(expected, abs=0.004)
    assert score["interval95"][0] < score["accuracy"] < score["interval95"][1]
    assert sum(map(sum, score["confusion"])) == 500
    table = evaluate.evaluate_checkpoint(config)
    assert "chequered ring" in table and lines_with(table, "ema", "TTA 0")


def test_target_accuracy_ends_a_run(tmp_path, capsys):
    config = replace(TINY, target_accuracy=0.05, eval_every_epochs=0.2)
    assert run(config, tmp_path)["step"] == 2
    assert run(config, tmp_path)["step"] == 2  # the target stays reached
    assert len(lines_with(capsys.readouterr().out, "reached ")) == 1
    scores = [(r["step"], r["weights"]) for r in records_of(tmp_path, "eval")]
    assert scores == [(2, "raw"), (2, "ema")]


@pytest.mark.parametrize(("target", "reached"), [(0.94, 0.0), (0.92, 0.93)])
def test_target_is_met_by_the_weights_that_the_run_reports(target, reached, capsys):
    """Raw weights, another split and augmented views are better here."""
    kinds = [("validation", "raw", 0), ("validation", "ema", 0), ("validation", "ema", 2), ("test", "ema", 0)]
    scores = [
        {"split": split, "weights": weights, "tta": tta, "accuracy": accuracy}
        for (split, weights, tta), accuracy in zip(kinds, (0.95, 0.93, 0.96, 0.97), strict=True)
    ]
    stub = SimpleNamespace(evaluations=scores, reached=0.0, log=print, timer=SimpleNamespace(seconds={"train": 1.0}))
    stub.config = SimpleNamespace(target_accuracy=target)
    trainer.Run.note_target(stub, 8)
    assert stub.reached == reached
    assert bool(lines_with(capsys.readouterr().out, "reached 93.00 % on validation", "step 8")) == bool(reached)


def test_test_split_is_evaluated_only_at_the_end(tmp_path):
    run(TINY, tmp_path, validation_examples=500, max_steps=8)
    scores = records_of(tmp_path, "eval")
    assert {r["split"] for r in scores if r["step"] < 8} == {"validation"}
    assert {r["split"] for r in scores if r["step"] == 8} == {"validation", "test"}


def test_indivisible_batch_uses_fewer_towers(caplog):
    caplog.set_level("INFO")
    assert len(setup_devices(replace(TINY, num_gpus=0, batch_size=51))[1]) == 1
    assert lines_with(caplog.text, "1 of 2 towers", "batch_size=51", "50 and 52")


def test_synthetic_fallback_has_a_banner(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(socket, "create_connection", Mock(side_effect=TimeoutError))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    config = replace(TINY, recipe="tiny", dataset="auto", data_dir=str(tmp_path / "none"), max_steps=1, seeds="10")
    train_seeds(config)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["tiny-synthetic-seed10"]
    environment = json.loads((tmp_path / "runs/tiny-synthetic-seed10/environment.json").read_text())
    assert "SYNTHETIC" in environment["synthetic_data"]
    output = capsys.readouterr().out
    assert output.count("SYNTHETIC DATA") == 2 and lines_with(output, "tiny, seeds 10") and "n=1" in output


def test_rates_of_steps_that_compile_are_unknown(tmp_path, capsys):
    """Also the first one after a resume."""
    config = replace(TINY, max_steps=4, summary_every_steps=1)
    with pytest.raises(Interrupted):
        run(config, tmp_path, StopAtStep(2))
    result = run(config, tmp_path)
    rates = [record["images_per_sec"] for record in records_of(tmp_path, "train")]
    assert [rate is None for rate in rates] == [True, False, True, False]
    assert result["images_per_sec"] > 0 and "0 images/s" not in re.findall(r"\S+ images/s", capsys.readouterr().out)
    alone = run(config, tmp_path, max_steps=1, overwrite=True)
    assert alone["images_per_sec"] is None and "too few steps" in capsys.readouterr().out


def test_profile_is_written(tiny_run):
    assert len(list((tiny_run[0] / "train" / "plugins" / "profile").rglob("*.xplane.pb"))) == 1


def test_continued_run_has_no_result_before_its_end(tmp_path):
    run(TINY, tmp_path, max_steps=2)
    assert Run(tmp_path).result
    with pytest.raises(Interrupted):
        run(TINY, tmp_path, StopAtStep(1), max_steps=8)
    assert not Run(tmp_path).result and not (tmp_path / "result.json").exists()
    assert run(TINY, tmp_path, max_steps=8)["step"] == 8


def test_seeds_that_are_overwritten_resume_without_their_earlier_runs(tmp_path, monkeypatch):
    """The directories of all are cleared at once, so that a later start uses no earlier result."""
    config = replace(TINY, train_dir=str(tmp_path), max_steps=2, seeds="0,1")
    train_seeds(config)
    monkeypatch.setattr(main, "StopSignals", lambda: StopAtStep(1))
    with pytest.raises(Interrupted, match="saved step 1: the same command resumes"):
        train_seeds(replace(config, overwrite=True))
    assert len(list_checkpoints(tmp_path / "seed0")) == 1
    assert not (tmp_path / "seed1/result.json").exists() and not list_checkpoints(tmp_path / "seed1")


def test_seeds_with_a_target_say_how_many_reached_it(tmp_path, monkeypatch, capsys):
    results = [
        {"reached": reached, "seconds": {"compile": seconds}, "images_per_sec": None, "evaluations": []}
        for reached, seconds in ((0.94, 10.0), (0.0, 99.0), (0.95, 20.0))
    ]
    monkeypatch.setattr(trainer, "train", lambda *args, **kwargs: results.pop(0))
    train_seeds(replace(TINY, train_dir=str(tmp_path), seeds="0,1,2", target_accuracy=0.94))
    assert lines_with(capsys.readouterr().out, "94.00 %", "2 of 3", "15.0 s")


def test_a_seed_that_diverges_does_not_hold_up_the_others(tmp_path, monkeypatch, capsys):
    train, config = trainer.train, replace(TINY, train_dir=str(tmp_path), max_steps=4, seeds="0,1,2")

    def train_seed(run, *args, **kwargs):
        return train(replace(run, learning_rate=1e38) if run.seed == 1 else run, *args, **kwargs)

    monkeypatch.setattr(trainer, "train", train_seed)
    with pytest.raises(DivergedError, match="^seed 1 diverged: .*3 in a row.*--overwrite"):
        train_seeds(config)
    results = [json.loads((tmp_path / f"seed{seed}/result.json").read_text()) for seed in (0, 2)]
    values = [100 * result["evaluations"][0]["accuracy"] for result in results]
    summary, score = capsys.readouterr().out.partition("seeds 0, 1, 2: ")[2].splitlines()[:2]
    assert summary == "2 of 3 finished"
    assert f"{np.mean(values):.2f} ± {np.std(values, ddof=1):.2f} %" in score and "n=2" in score

"""Runs that start with the weights of another run."""

import json
import shutil
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import cifar_towers
from cifar_towers.checkpointing.checkpoint import (
    checkpoint_path,
    initialize_variables,
    latest_checkpoint,
    list_checkpoints,
    read_metadata,
    read_variables,
    save_checkpoint,
)
from cifar_towers.cli import main
from cifar_towers.cli.flags import parse_command_line
from cifar_towers.config import TrainConfig
from cifar_towers.config.programs import EvaluateConfig
from cifar_towers.config.schedules import RunLength
from cifar_towers.data import synthetic
from cifar_towers.data.dataset import DatasetInfo
from cifar_towers.errors import Interrupted, UsageError
from cifar_towers.evaluation.score import reported_score
from cifar_towers.inference.evaluate import evaluate_checkpoint
from cifar_towers.shutdown import ShutdownHandler
from cifar_towers.training import build
from tests.configs import net
from tests.messages import lines_with
from tests.own_data import write_folder
from tests.runs.short_runs import QUICK, TINY, StopAtStep, run, stopped_after

ROOT = Path(__file__).parents[2]
FINETUNE = replace(TINY, max_steps=4, learning_rate=0.02, keep_checkpoints=9, lookahead=True)


def values_of(checkpoint, owner, dtype=np.float32):
    """Return the values of `model`, `ema` or `lookahead` by their names in the model."""
    values = read_variables(checkpoint)
    of_owner = {name.partition(".")[2]: value for name, value in values.items() if name.startswith(f"{owner}.")}
    return {name: value for name, value in of_owner.items() if value.dtype == dtype}


def test_first_evaluation_is_that_of_the_other_run(tmp_path, tiny_run, capsys):
    """Evaluate the checkpoint from before the first step: raw and averaged weights score as the other run reports."""
    source, result, _ = tiny_run
    with pytest.raises(Interrupted, match="step 1"):
        run(FINETUNE, tmp_path, StopAtStep(1), init_from=str(source), num_gpus=1, seed=1)
    shutil.rmtree(checkpoint_path(tmp_path, 1))
    first = checkpoint_path(tmp_path, 0)
    assert lines_with(capsys.readouterr().out, "starting with the averaged weights", source, "step 20")
    for weights in ("raw", "ema"):
        config = EvaluateConfig(train_dir=str(tmp_path), model=TINY.model, weights=weights, json=True, num_gpus=2)
        score = json.loads(evaluate_checkpoint(replace(config, precision="float32")))
        reported = reported_score(result["evaluations"])
        assert score["step"] == 0 and reported["weights"] == "ema"
        assert score["accuracy"] == reported["accuracy"] and score["loss"] == pytest.approx(reported["loss"], abs=1e-6)
    averaged = values_of(latest_checkpoint(source), "ema")
    assert "batch_normalization.moving_variance" in averaged and "dense.kernel" in averaged
    for owner in ("model", "ema", "lookahead"):
        np.testing.assert_equal(values_of(first, owner), averaged)
    slots = {name: value for name, value in read_variables(first).items() if name.startswith("optimizer.")}
    assert slots and not any(value.any() for value in slots.values())
    seeds = [values_of(path, "model", np.int64) for path in (first, latest_checkpoint(source))]
    assert len(seeds[0]) == 1 and all(seeds[0][name][0] != seeds[1][name][0] for name in seeds[0])  # the new run's own


def test_resumed_without_the_other_run_it_ends_with_the_same_bits(tmp_path, tiny_run):
    source = shutil.copytree(tiny_run[0], tmp_path / "source")
    config = replace(FINETUNE, num_gpus=2, checkpoint_every_steps=2)
    uninterrupted = run(config, tmp_path / "one", init_from=str(source))
    stopped_after(2, tmp_path / "one", tmp_path / "two")
    with pytest.raises(UsageError, match=r"init_from .*source -> .*tiny\b"):
        run(config, tmp_path / "two", init_from=str(tiny_run[0]))
    shutil.rmtree(source)
    resumed = run(config, tmp_path / "two")
    assert resumed["weights_sha256"] == uninterrupted["weights_sha256"]
    recorded = [json.loads((tmp_path / name / "config.json").read_text())["init_from"] for name in ("one", "two")]
    recorded += [read_metadata(path)["recipe"]["init_from"] for path in list_checkpoints(tmp_path / "two")]
    assert set(recorded) == {str(source)}
    assert run(config, tmp_path / "two", init_from=f"{source}/") == resumed  # complete, with the flag too


@pytest.mark.parametrize("way", ["program", "Python"])
def test_resumed_without_any_flag_of_the_other_run_it_stays_in_its_directory(tmp_path, tiny_run, monkeypatch, way):
    """Resume in the default directory a run that was begun there with `train_dir` and `init_from`."""
    monkeypatch.chdir(tmp_path)
    config, directory = replace(FINETUNE, num_gpus=1), FINETUNE.directory
    with pytest.raises(Interrupted, match="step 1"):
        run(config, directory, StopAtStep(1), init_from=str(tiny_run[0]))
    changed = {f.name: getattr(config, f.name) for f in fields(config) if getattr(config, f.name) != f.default}
    if way == "Python":
        assert cifar_towers.train(**changed).directory.samefile(directory)
    else:
        flags = [f"--{name}={value}" for name, value in changed.items()]
        main.start_training(parse_command_line(TrainConfig, ["train.py", *flags], ""), ShutdownHandler())
    resumed = cifar_towers.load_run(directory)
    assert [path.name for path in Path("runs").iterdir()] == [directory.name]
    accuracy = reported_score(resumed.result["evaluations"])["accuracy"]
    assert resumed.result["step"] == 4 and resumed.config["init_from"] == str(tiny_run[0])
    moved = Path("runs").rename("moved") / directory.name
    assert cifar_towers.evaluate(moved, model=TINY.model, precision="float32", num_gpus=1)["accuracy"] == accuracy
    assert run(config, moved) == cifar_towers.load_run(moved).result and not Path("runs").exists()


def test_other_classes_get_a_new_head(tmp_path, tiny_run, capsys):
    three = [split.take(split.labels < 3) for split in (synthetic.make(200, 0, 0), synthetic.make(200, 0, 1))]
    dataset = write_folder(tmp_path / "three", train=three[0], test=three[1])
    config = replace(FINETUNE, dataset=dataset, batch_size=20, num_gpus=2)
    assert run(config, tmp_path / "run", init_from=str(tiny_run[0]))["step"] == 4
    assert lines_with(capsys.readouterr().out, "classes", "dense.kernel", "dense.bias")
    model = build.make_model(config, "float32", DatasetInfo(("a", "b", "c"), config.image_size))
    new = {variable.path.replace("/", "."): variable.numpy() for variable in model.variables}
    averaged = values_of(latest_checkpoint(tiny_run[0]), "ema")
    for owner in ("model", "ema", "lookahead"):
        values = values_of(checkpoint_path(tmp_path / "run", 0), owner)
        assert values["dense.kernel"].shape == (8, 3)
        for name, value in values.items():
            np.testing.assert_array_equal(value, (new if name.startswith("dense.") else averaged)[name])


def test_whitening_filters_are_the_other_runs(tmp_path):
    """Start a speednet with Muon and whitening filters of its own, also with the same classes in another order."""
    train = synthetic.make(400, 0, 0)
    config = replace(QUICK, optimizer="muon", lookahead=True, whitening_images=400)
    other, state = (
        build.make_state(replace(config, **settings), "float32", train, RunLength(2, 20, 20))[0]
        for settings in ({"whitening_images": 100, "seed": 1, "lookahead": False}, {})
    )
    for variable in other.ema.averages:
        variable.assign_add(tf.ones_like(variable))  # the averages differ from the weights
    classes = train.info.class_names
    metadata = {"dataset_info": {"class_names": list(classes)}, "dataset": "one", "validation_sha256": "0"}
    saved = save_checkpoint(tmp_path, 7, other.named_variables(), metadata)
    values, variables = values_of(saved, "ema"), state.named_variables()
    own = {name: variable.numpy() for name, variable in variables.items()}
    head = state.head_names()
    assert head == ["head.kernel"] and not np.array_equal(own["model.whitening.kernel"], values["whitening.kernel"])
    for order, new in ((classes[::-1], head), (classes, [])):
        line = initialize_variables(tmp_path, variables, head, {"dataset_info": {"class_names": order}})
        assert line.startswith(f"starting with the averaged weights of {tmp_path} at step 7")
        assert line.endswith("head.kernel") == bool(new)
        for name, variable in variables.items():
            owner, _, path = name.partition(".")
            is_taken = owner in ("model", "ema", "lookahead") and path not in new
            np.testing.assert_array_equal(variable, values[path] if is_taken else own[name])
    for dataset, digest, is_trained_on in (("one", "0", False), ("one", "1", True), ("other", "1", False)):
        changed = metadata | {"dataset": dataset, "validation_sha256": digest}
        line = initialize_variables(tmp_path, variables, head, changed)
        assert ("trained on validation images of this run" in line) == is_trained_on


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (net("dropping"), r"dense.kernel is of shape \(8, 10\) there, of shape \(1200, 10\) here"),
        ("cifarnet", r"conv1.kernel is absent there, of shape \(5, 5, 3, 64\) here"),
    ],
)
def test_another_model_is_refused_before_training(tmp_path, tiny_run, model, message):
    with pytest.raises(UsageError, match=f"init_from={tiny_run[0]} is of another model: {message}"):
        run(FINETUNE, tmp_path, model=model, init_from=str(tiny_run[0]), num_gpus=2)
    assert not list_checkpoints(tmp_path)


def test_a_run_is_not_overwritten_if_the_other_run_is_refused(saved_run, tiny_run):
    with pytest.raises(UsageError, match="is of another model"):
        run(FINETUNE, saved_run, model="cifarnet", init_from=str(tiny_run[0]), overwrite=True)
    assert len(list_checkpoints(saved_run)) == 3 and (saved_run / "result.json").exists()
    assert run(FINETUNE, saved_run, init_from=str(tiny_run[0]), overwrite=True, max_steps=1)["step"] == 1
    assert [checkpoint.name for checkpoint in list_checkpoints(saved_run)] == ["step-00000000", "step-00000001"]


def test_a_longer_run_is_refused_with_the_way_on(tiny_run):
    with pytest.raises(UsageError, match=f"epochs .* -> 30.*--init_from={tiny_run[0]} .*--overwrite"):
        run(TINY, tiny_run[0], epochs=30.0)


def test_a_run_does_not_overwrite_its_own_source(saved_run):
    for overwrite in (False, True):
        with pytest.raises(UsageError, match="init_from=.* is the directory of this run itself.*--train_dir"):
            run(FINETUNE, saved_run, init_from=f"{saved_run.parent}/./saved/", overwrite=overwrite)
    assert len(list_checkpoints(saved_run)) == 3


def test_directory_of_a_run_names_the_other():
    assert (
        str(TrainConfig(recipe="speed94", init_from="runs/mine/", seed=3).directory) == "runs/speed94-from-mine-seed3"
    )


def test_a_missing_run_is_refused_before_tensorflow_is_imported(tmp_path):
    (tmp_path / "tensorflow.py").write_text("import os\nos.abort()\n")
    program = "import sys; sys.path.insert(0, '.'); from cifar_towers.cli.main import train; train()"
    flags = ["--dataset=synthetic", f"--train_dir={tmp_path}/new"]
    for source, seeds, why in (("none", "0,1", "there is no such directory"), ("", "", "it is not the directory of a")):
        command = [sys.executable, "-c", program, *flags, f"--init_from={tmp_path / source}", f"--seeds={seeds}"]
        environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 2 and done.stderr.startswith(f"usage: no checkpoint in {tmp_path / source}: {why}")

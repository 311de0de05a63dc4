"""Runs that cannot start or go on: the error names the reason and what to type."""

import shutil
from dataclasses import replace

import pytest
import tensorflow as tf

from cifar_towers import files, trainer
from cifar_towers.config.programs import EvaluateConfig
from cifar_towers.errors import DataError, UsageError
from cifar_towers.inference import evaluate
from tests.configs import net
from tests.messages import lines_with
from tests.runs.short_runs import TINY, run

SYNCHRONIZED = "layer norm is made with synchronized=True, .*give --batch_statistics=synchronized"
OOM = tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor\nwith shape [1024,64]")
NO_KERNEL = tf.errors.UnimplementedError(None, None, "A deterministic GPU implementation of X is not available.")


@pytest.mark.parametrize(
    ("error", "settings", "expected", "message"),
    [
        (OOM, {"micro_batches": 2}, UsageError, r"^OOM when allocating .* \[1024,64\].*--micro_batches=4"),
        (OOM, {"micro_batches": 2, "overwrite": True}, UsageError, "and without --overwrite resumes from the last"),
        (NO_KERNEL, {"deterministic": True}, UsageError, "^A deterministic .* implementation of X .*--deterministic"),
        (NO_KERNEL, {}, tf.errors.UnimplementedError, "^A deterministic GPU implementation of X is not available.$"),
    ],
    ids=["out of memory", "out of memory with overwrite", "no deterministic operation", "other"],
)
def test_errors_of_tensorflow_suggest_flags(tmp_path, monkeypatch, error, settings, expected, message):
    def train(*_):
        raise error

    monkeypatch.setattr(trainer, "train_from", train)
    monkeypatch.setattr(tf.config.experimental, "enable_op_determinism", lambda: None)
    for _ in range(2):  # the second time as a restart by launch.py, which does not overwrite again
        with pytest.raises(expected, match=message):
            run(TINY, tmp_path / "run", launch_id="of both", **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train_dir": "file/run"}, "Not a directory"),
        ({"soft_placement": False}, "2 towers need 2 GPUs"),
        ({"profile_steps": "4:6"}, "profile_steps=4:6.* step 4"),
        ({"strategy": "mirrored", "all_reduce": "nccl"}, "all_reduce=nccl.* 2 towers"),
        ({"model": net("synchronized")}, SYNCHRONIZED),
        ({"model": net("synchronized"), "strategy": "mirrored"}, SYNCHRONIZED),
    ],
)
def test_run_that_cannot_start_leaves_no_directory(tmp_path, monkeypatch, settings, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=message):
        run(TINY, **{"num_gpus": 2, "max_steps": 4, "train_dir": "run"} | settings)
    assert not (tmp_path / "run").exists()


def test_validation_images_that_vanish_or_appear_are_changed_data(tmp_path, small_folder):
    """Else the test images would choose the best checkpoint of a run that had validation images, or the reverse."""
    photos = shutil.copytree(small_folder.removeprefix("folder:"), tmp_path / "photos")
    validation = shutil.copytree(photos / "test", photos / "validation")
    on_photos = {"dataset": f"folder:{photos}", "batch_size": 40, "max_steps": 1}
    run(TINY, tmp_path / "with", **on_photos)
    validation.rename(tmp_path / "validation")
    other, advice = "was made with other validation images than folder:.*/photos has now", "put the images back as they"
    with pytest.raises(DataError, match=rf"with/checkpoints/.* {other} \(no validation images\); {advice}") as caught:
        run(TINY, tmp_path / "with", **on_photos)
    assert caught.value.exit_code == 3
    run(TINY, tmp_path / "without", **on_photos)
    assert run(TINY, tmp_path / "without", **on_photos)["step"] == 1  # which is complete
    (tmp_path / "validation").rename(validation)
    with pytest.raises(DataError, match=rf"{other} \(new validation images\); {advice}"):
        run(TINY, tmp_path / "without", **on_photos)
    assert run(TINY, tmp_path / "with", **on_photos)["step"] == 1  # with its images it goes on


@pytest.mark.parametrize("strategy", ["towers", "mirrored"])
def test_a_norm_of_the_users_own_counts_as_batch_norm(tmp_path, caplog, strategy):
    """It sees one tower's images, and smaller parts of a batch are another function."""
    caplog.set_level("INFO", "cifar_towers")
    config = replace(TINY, model=net("own_norm"), num_gpus=2, strategy=strategy)
    run(config, tmp_path / "one", max_steps=1, batch_statistics="synchronized")
    assert lines_with(caplog.text, "batch_statistics=synchronized does not reach own/mean", "no BatchNormalization")
    with pytest.raises(UsageError, match="batch_statistics synchronized -> mean"):
        run(config, tmp_path / "one", max_steps=2)


def test_locked_train_dir_is_refused(saved_run):
    refused = pytest.raises(UsageError, match=f"another process .*{saved_run}.*--train_dir")
    with files.locked(saved_run / ".lock"), refused:
        run(TINY, saved_run, num_gpus=2)


@pytest.mark.parametrize(
    ("name", "content"),
    [("config.json", '{"model_type": "bert"}'), ("result.json", "[1]"), ("config.json", "no JSON")],
)
@pytest.mark.parametrize("overwrite", [False, True])
def test_foreign_files_are_not_overwritten(tmp_path, name, content, overwrite):
    (tmp_path / name).write_text(content)
    with pytest.raises(UsageError, match=f"{name} .*--train_dir"):
        run(TINY, tmp_path, max_steps=1, overwrite=overwrite)
    assert (tmp_path / name).read_text() == content


def test_evaluate_without_a_checkpoint_is_refused(tiny_run, tmp_path):
    directory = tiny_run[0]
    (tmp_path / "empty" / "run").mkdir(parents=True)
    begun = shutil.copytree(directory, tmp_path / "begun", ignore=lambda *_: ["checkpoints"])
    for place, why in (
        (tmp_path / "empty" / "run", "not the directory of a run.* runs/"),
        (directory.parent / "none", f"no such directory.* {directory.name}"),
        (begun, "not saved"),
    ):
        with pytest.raises(UsageError, match=f"no checkpoint in {place}.*{why}"):
            evaluate.evaluate_checkpoint(EvaluateConfig(train_dir=str(place)))
    with pytest.raises(UsageError, match="validation"):
        evaluate.evaluate_checkpoint(EvaluateConfig(train_dir=str(directory), model=TINY.model, split="validation"))

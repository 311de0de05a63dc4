"""Runs that cannot start or go on: the error names the reason and what to type."""

import shutil
from unittest.mock import Mock

import pytest
import tensorflow as tf

from cifar_towers import trainer
from cifar_towers.errors import DataError, Interrupted, UsageError
from cifar_towers.training import build
from tests.runs.short_runs import TINY, StopAtStep, run

OOM = tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor\nwith shape [1024,64]")


def test_too_little_memory_is_explained(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "train_from", Mock(side_effect=OOM))
    with pytest.raises(UsageError, match=r"memory is too small .*\[1024,64\].*--micro_batches=4 and --overwrite"):
        run(TINY, tmp_path / "run", micro_batches=2)


def test_an_error_while_the_step_is_built_is_a_bug(tmp_path, monkeypatch):
    """A usage error would have no traceback, and the launcher would not restart the run."""
    error = ValueError("of Keras")
    monkeypatch.setattr(build, "make_optimizer", Mock(side_effect=error))
    with pytest.raises(ValueError, match="of Keras") as caught:
        run(TINY, tmp_path / "run")
    assert caught.value is error


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train_dir": "file/run"}, "Not a directory"),
        ({"soft_placement": False}, "2 towers need 2 GPUs"),
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
    on_photos = {"dataset": f"folder:{photos}", "batch_size": 40, "max_steps": 2}

    def stop_after_a_step(name):
        with pytest.raises(Interrupted, match="step 1"):
            run(TINY, tmp_path / name, StopAtStep(1), **on_photos)

    stop_after_a_step("with")
    validation.rename(tmp_path / "validation")
    refused = "was trained on other validation images than folder:.*/photos has now; put the images back as they"
    with pytest.raises(DataError, match=refused) as caught:
        run(TINY, tmp_path / "with", **on_photos)
    assert caught.value.exit_code == 3
    stop_after_a_step("without")
    (tmp_path / "validation").rename(validation)
    with pytest.raises(DataError, match=refused):
        run(TINY, tmp_path / "without", **on_photos)
    assert run(TINY, tmp_path / "with", **on_photos)["step"] == 2  # with its images it goes on

"""Runs that cannot start or go on: the error names what is wrong and what to type."""

import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
import tensorflow as tf

from cifar_towers import trainer
from cifar_towers.errors import DataError, UsageError
from tests.runs.short_runs import QUICK, TINY, run

NETS = Path(__file__).parents[1] / "nets.py"


def test_too_little_memory_is_explained(tmp_path, monkeypatch):
    error = tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor\nwith shape [1024,64]")
    monkeypatch.setattr(trainer, "train_from", Mock(side_effect=error))
    with pytest.raises(UsageError, match=r"\[1024,64\].*--micro_batches=4 and --overwrite"):
        run(TINY, tmp_path / "run", micro_batches=2)


def test_images_that_do_not_reach_the_size_of_the_evaluation_are_refused(tmp_path):
    with pytest.raises(UsageError, match="image_size_schedule=0=18,2=20 .*18 .*20"):
        run(QUICK, tmp_path / "run", image_size_schedule="0=18,2=20")
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_of_another_net_is_refused(tmp_path):
    """The function has the same name, and makes another net than before."""
    file = Path(shutil.copy(NETS, tmp_path))
    run(TINY, tmp_path / "run", model=f"{file}:tiny", max_steps=1)
    file.write_text(NETS.read_text().replace("Conv2D(8, 3", "Conv2D(4, 3"))
    with pytest.raises(UsageError, match="conv2d.kernel .* --train_dir"):
        run(TINY, tmp_path / "run", model=f"{file}:tiny", max_steps=2)


def test_images_that_have_changed_are_refused(tmp_path, small_folder):
    """Else the test images would choose the best checkpoint of a run that had validation images."""
    photos = shutil.copytree(small_folder.removeprefix("folder:"), tmp_path / "photos")
    validation = shutil.copytree(photos / "test", photos / "validation")
    on_photos = {"train_dir": tmp_path / "run", "dataset": f"folder:{photos}", "batch_size": 40}
    run(TINY, **on_photos, max_steps=1)
    shutil.rmtree(validation)
    with pytest.raises(DataError, match="validation images .*photos"):
        run(TINY, **on_photos, max_steps=2)

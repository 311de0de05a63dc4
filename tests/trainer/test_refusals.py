"""Runs that cannot start or go on: the error names what is wrong and what to type."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from cifar_towers.config.programs import TrainedRunConfig
from cifar_towers.errors import DataError, UsageError
from cifar_towers.inference.predict import TrainedModel
from tests.helpers.short_runs import QUICK, TINY, run

NETS = Path(__file__).parents[1] / "helpers/nets.py"


def test_images_that_do_not_reach_the_size_of_the_evaluation_are_refused(tmp_path):
    with pytest.raises(UsageError, match="image_size_schedule=0=18,2=20 .*18 .*20"):
        run(QUICK, tmp_path / "run", image_size_schedule="0=18,2=20")
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_of_another_net_is_refused(tmp_path, caplog, monkeypatch):
    """The function has the same name, and makes another net than before. Code that may do so is
    named.
    """
    monkeypatch.setattr(sys, "dont_write_bytecode", False)  # its cache must not be read
    file = tmp_path / "nets.py"

    def write(content):
        """Write the file, as in an edit within the second."""
        file.write_text(content)
        os.utime(file, (1e9, 1e9))

    write(NETS.read_text())
    run(TINY, tmp_path / "run", model=f"{file}:tiny", max_steps=1)
    write(NETS.read_text().replace("Conv2D(8, 3", "Conv2D(4, 3"))
    with pytest.raises(UsageError, match="conv2d.kernel .* --train_dir"):
        run(TINY, tmp_path / "run", model=f"{file}:tiny", max_steps=2)
    for content, warns in ((NETS.read_text(), False), (NETS.read_text() + "# edited", True)):
        write(content)
        TrainedModel(TrainedRunConfig(train_dir=str(tmp_path / "run"), model=f"{file}:tiny"))
        assert ("has changed since" in caplog.text) == warns


def test_images_that_have_changed_are_refused(tmp_path, small_folder):
    """Else the test images would choose the best checkpoint of a run that had validation images. A
    finished run, too, is of the images that it was trained on.
    """
    photos = shutil.copytree(small_folder.removeprefix("folder:"), tmp_path / "photos")
    validation = shutil.copytree(photos / "test", photos / "validation")
    on_photos = {"train_dir": tmp_path / "run", "dataset": f"folder:{photos}", "batch_size": 40}
    result = run(TINY, **on_photos, max_steps=1)

    assert run(TINY, **on_photos, max_steps=1) == result

    moved = photos.rename(tmp_path / "moved")

    assert run(TINY, **on_photos | {"dataset": f"folder:{moved}"}, max_steps=1) == result

    moved.rename(photos)
    shutil.rmtree(validation)
    for max_steps in (1, 2):
        with pytest.raises(DataError, match="validation images .*photos"):
            run(TINY, **on_photos, max_steps=max_steps)

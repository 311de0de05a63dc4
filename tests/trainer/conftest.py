"""A small synthetic set for all runs of this folder, and two finished runs for tests that only read
one.
"""

import functools
import shutil
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from cifar_towers.data import synthetic
from cifar_towers.data.image_files import resize_all
from cifar_towers.runs.checkpoint import list_checkpoints
from tests.helpers.short_runs import QUICK, TINY, Recorder, run, small_runs


class TinyRun(NamedTuple):
    """A finished run on two towers."""

    directory: Path
    result: dict
    recorder: Recorder  # with what a callback was told


@functools.cache
def small_splits():
    """Return 2,000 + 500 synthetic images in the size that the runs here take, so that no start
    resizes them.
    """
    splits = synthetic.make(2000, 0, 0), synthetic.make(500, 0, 1)
    return [replace(split, images=resize_all(split.images, QUICK.image_size)) for split in splits]


@pytest.fixture(autouse=True)
def small_synthetic_set():
    """Replace the synthetic set."""
    with small_runs(*small_splits()):
        yield


def finished_run(directory, config, **settings):
    """Return the directory of a run on two towers and its result."""
    with small_runs(*small_splits()):
        return directory, run(
            config, directory, num_gpus=2, checkpoint_every_steps=9, tta=True, **settings
        )


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory):
    """Train the tiny model, once for all tests that only read the run."""
    directory = tmp_path_factory.mktemp("runs") / "tiny"
    recorder = Recorder()
    _, result = finished_run(directory, TINY, profile_steps="1:3", callbacks=[recorder])
    return TinyRun(directory, result, recorder)


@pytest.fixture(scope="session")
def speednet_run(tmp_path_factory):
    """Train a speednet, for slow tests."""
    return finished_run(tmp_path_factory.mktemp("runs") / "speednet", QUICK)


@pytest.fixture
def saved_run(tmp_path, tiny_run):
    """Return the directory of a run with TINY on two towers, with checkpoints of steps 9, 18 and
    20.
    """
    directory = shutil.copytree(tiny_run.directory, tmp_path / "saved")
    names = [path.name for path in list_checkpoints(directory)]
    assert names == ["step-9.npz", "step-18.npz", "step-20.npz"]
    return directory

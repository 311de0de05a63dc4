"""Runs that start with the weights of another run."""

import shutil
from dataclasses import replace

import numpy as np
import pytest

from cifar_towers import load_run
from cifar_towers.config import TrainConfig
from cifar_towers.data import synthetic
from cifar_towers.errors import UsageError
from cifar_towers.runs.checkpoint import (
    checkpoint_path,
    find_checkpoint,
    list_checkpoints,
    read_checkpoint,
)
from cifar_towers.training.state import weights_sha256
from tests.helpers.messages import lines_with
from tests.helpers.short_runs import TINY, run, stopped_after
from tests.helpers.user_data import write_folder

FINETUNE = replace(
    TINY, max_steps=4, learning_rate=0.02, keep_checkpoints=9, lookahead=True, num_gpus=2
)


def values_of(checkpoint, owner):
    """Return the float values of `model`, `ema` or `lookahead` by their names in the model."""
    values, _ = read_checkpoint(checkpoint)
    of_owner = {
        name.partition(".")[2]: value
        for name, value in values.items()
        if name.startswith(f"{owner}.")
    }
    return {name: value for name, value in of_owner.items() if value.dtype == np.float32}


def test_it_starts_with_the_averages_of_the_other_run_and_goes_on_without_it(tmp_path, tiny_run):
    """Look at the checkpoint from before the first step; the optimizer starts anew."""
    source = shutil.copytree(tiny_run.directory, tmp_path / "source")
    whole = tmp_path / "one"
    stopped = tmp_path / "two"
    config = replace(FINETUNE, checkpoint_every_steps=2, init_from=str(source), seed=1)
    uninterrupted = run(config, whole)
    first = checkpoint_path(whole, 0)
    averaged = values_of(find_checkpoint(source), "ema")
    every_value = read_checkpoint(find_checkpoint(source))[0].items()
    digest = weights_sha256({name: value for name, value in every_value if name[:4] == "ema."})

    assert "batch_normalization.moving_variance" in averaged
    assert "dense.kernel" in averaged

    for owner in ("model", "ema", "lookahead"):
        np.testing.assert_equal(values_of(first, owner), averaged)
    slots = {
        name: value
        for name, value in read_checkpoint(first)[0].items()
        if name.startswith("optimizer.")
    }

    assert slots
    assert not any(value.any() for value in slots.values())

    stopped_after(2, whole, stopped)
    with pytest.raises(UsageError, match=r"init_from .*source -> .*tiny\b"):
        run(config, stopped, init_from=str(tiny_run.directory))
    shutil.rmtree(source)

    assert run(config, stopped)["weights_sha256"] == uninterrupted["weights_sha256"]

    # repetitions start from the same weights
    (lineage,) = load_run(stopped).environment["lineage"]

    assert lineage == f"from step 0: weights with the SHA-256 {digest[:16]}"
    assert [lineage] == load_run(whole).environment["lineage"]

    # nothing was computed with the settings of a start that was stopped at step 0
    restarted = stopped_after(0, whole, tmp_path / "three")
    run(config, restarted, num_gpus=1)

    assert [lineage] == load_run(restarted).environment["lineage"]


def test_weights_of_another_shape_are_new(tmp_path, tiny_run, capsys):
    three = [
        split.take(split.labels < 3)
        for split in (synthetic.make(200, 0, 0), synthetic.make(200, 0, 1))
    ]
    dataset = write_folder(tmp_path / "three", train=three[0], test=three[1])
    run(
        FINETUNE,
        tmp_path / "run",
        init_from=str(tiny_run.directory),
        dataset=dataset,
        batch_size=20,
        max_steps=1,
    )

    assert lines_with(
        capsys.readouterr().out, tiny_run.directory, "step 20", "dense.kernel, dense.bias"
    )

    averaged = values_of(find_checkpoint(tiny_run.directory), "ema")
    for owner in ("model", "ema", "lookahead"):
        values = values_of(checkpoint_path(tmp_path / "run", 0), owner)
        assert values.pop("dense.kernel").shape == (8, 3)
        assert values.pop("dense.bias").shape == (3,)
        np.testing.assert_equal(values, {name: averaged[name] for name in values})


def test_a_run_is_not_overwritten_if_the_other_run_is_refused(saved_run, tiny_run):
    with pytest.raises(UsageError, match=f"init_from={tiny_run.directory} .*tiny"):
        run(
            FINETUNE, saved_run, model="cifarnet", init_from=str(tiny_run.directory), overwrite=True
        )
    assert len(list_checkpoints(saved_run)) == 3
    assert (saved_run / "result.json").exists()


def test_the_default_directory_names_the_other_run():
    directory = TrainConfig(recipe="speed94", init_from="runs/mine/", seed=3).directory
    assert str(directory) == "runs/speed94-from-mine-seed3"

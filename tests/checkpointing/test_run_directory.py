"""The directory of a run: when it is saved, what is refused, what a damaged checkpoint and `overwrite` do."""

import dataclasses
import itertools
import os
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from cifar_towers import files
from cifar_towers.checkpointing import run_directory
from cifar_towers.checkpointing.checkpoint import checkpoint_path, list_checkpoints, write_checkpoint
from cifar_towers.checkpointing.run_directory import RunDirectory, describe_differences, open_run
from cifar_towers.config import TrainConfig
from cifar_towers.config.train_config import recipe_fields
from cifar_towers.errors import DataError, UsageError
from tests.messages import lines_with

VALUES = {"model.kernel": np.ones([2, 2], np.float32), "step": np.int64(0)}


@pytest.fixture
def config(tmp_path):
    return TrainConfig(train_dir=str(tmp_path / "run"), max_steps=20)


def save(config, step, **changes):
    """Write a checkpoint of a run with this config."""
    config.directory.mkdir(exist_ok=True)
    path = checkpoint_path(config.directory, step)
    metadata = {"step": step, "recipe": recipe_fields(config), "steps_per_epoch": 10, "failed_saves": 1}
    write_checkpoint(path, VALUES, metadata | changes)
    return path


def flip(path):
    content = bytearray(path.read_bytes())
    content[200] ^= 1
    path.write_bytes(content)


@pytest.fixture
def clock(monkeypatch):
    """Time that passes when a test says so; a save takes two seconds of it."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(run_directory, "time", clock)
    monkeypatch.setattr(run_directory, "write_checkpoint", lambda *_: setattr(clock, "now", clock.now + 2))
    return clock


def test_by_default_saving_takes_one_percent_of_the_time(config, clock):
    run, saved = RunDirectory(config), []
    for step in range(1, 2000):
        clock.now += 1
        if run.should_save(step, evaluated=step % 50 == 0):
            run.save(step, VALUES, {})
            saved.append(step)
    assert saved[0] == 30  # then 200 s of steps for a save of two seconds
    assert all(after - before == 200 for before, after in itertools.pairwise(saved))


def test_an_evaluated_step_is_saved_before_its_time(config, clock):
    run = RunDirectory(config)
    clock.now += 1
    assert run.should_save(1, evaluated=True) and not run.should_save(1, evaluated=False)


def test_saves_every_n_steps_and_keeps_the_newest(config):
    config = dataclasses.replace(config, checkpoint_every_steps=3, keep_checkpoints=2)
    with open_run(config) as run:
        for step in range(1, 13):
            if run.should_save(step, evaluated=step == 4):
                assert run.save(step, VALUES, {})
    assert [path.name for path in list_checkpoints(config.directory)] == ["step-9.npz", "step-12.npz"]
    assert {path.name for path in config.directory.iterdir()} == {".lock", "step-9.npz", "step-12.npz"}


def test_a_state_that_is_not_finite_is_not_saved(config, caplog):
    with open_run(config) as run:
        assert not run.save(7, {"kernel": np.array([0, np.nan], np.float32)}, {}) and run.failed_saves == 1
    assert lines_with(caplog.text, "step 7 could not be saved (kernel is not finite); no checkpoint was written")


def test_a_full_disk_leaves_the_older_checkpoint(config, caplog, monkeypatch):
    save(config, 3)
    with open_run(config) as run:
        monkeypatch.setattr(np, "savez", Mock(side_effect=OSError(28, "No space left on device")))
        assert not run.save(6, VALUES, {}) and run.failed_saves == 2  # one before the checkpoint
    assert lines_with(caplog.text, "step 6", "No space left on device", "step-3.npz is kept")
    assert [path.name for path in list_checkpoints(config.directory)] == ["step-3.npz"]


def test_a_file_system_that_cannot_sync_a_directory_saves(config, monkeypatch):
    monkeypatch.setattr(os, "open", Mock(side_effect=OSError(22, "Invalid argument")))
    with open_run(config) as run:
        assert run.save(1, VALUES, {})


def test_a_resumed_run_gets_its_newest_checkpoint(config):
    for step in (9, 10):
        save(config, step)
    with open_run(config) as run:
        values, metadata = run.saved
        assert metadata["step"] == 10 and values["model.kernel"].sum() == 4 and run.failed_saves == 1
        assert run.save(10, VALUES, {})  # which is there already
    assert [path.name for path in list_checkpoints(config.directory)] == ["step-9.npz", "step-10.npz"]


def test_a_damaged_checkpoint_is_renamed_and_the_one_before_is_taken(config, caplog):
    save(config, 9)
    flip(save(config, 10))
    with open_run(config) as run:
        assert run.saved[1]["step"] == 9
    assert len(lines_with(caplog.text, "step-10.npz is damaged", "renamed to step-10.npz.damaged")) == 1
    assert {path.name for path in config.directory.iterdir()} == {".lock", "step-9.npz", "step-10.npz.damaged"}


def test_a_run_with_only_damaged_checkpoints_is_refused(config):
    flip(save(config, 10))
    for _ in range(2):  # the second time it has another name
        with pytest.raises(DataError, match="every checkpoint in .* is damaged; .* --overwrite"), open_run(config):
            pass
    with open_run(dataclasses.replace(config, overwrite=True)) as run:
        assert run.saved is None
        run.clear()
    assert not config.directory.exists()


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda path: path.write_text(""), "train_dir=.*run cannot be written: File exists"),
        (lambda path: (path / "photos").mkdir(parents=True), "train_dir=.*run holds photos, which is of no run"),
        (lambda path: (path / "checkpoints/step-00000001").mkdir(parents=True), "run of an earlier format"),
        (lambda path: (path.mkdir(), (path / "result.json").write_text("{}")), "holds the result of a run, and no"),
    ],
)
def test_directories_in_which_a_run_would_replace_something(config, prepare, message):
    prepare(config.directory)
    with pytest.raises(UsageError, match=message), open_run(config):
        pass


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({"seed": 3}, "seed 0 -> 3"),
        ({"batch_statistics": "synchronized"}, "batch_statistics mean -> synchronized"),
        ({"micro_batches": 2}, "micro_batches 1 -> 2"),
        ({"model": "resnet20", "optimizer": "momentum"}, "model speednet94 -> resnet20"),
        ({"num_gpus": 4, "max_steps": 30, "tta": 2, "variable_placement": "round_robin"}, ""),
    ],
)
def test_a_run_of_another_recipe_is_refused_by_name(config, settings, refused):
    save(config, 10)
    changed = dataclasses.replace(config, **settings)
    if not refused:
        with open_run(changed) as run:
            assert run.saved
        return
    with pytest.raises(UsageError, match=f"other settings .{refused}.*--init_from=.*--overwrite"), open_run(changed):
        pass


def test_a_run_that_another_process_trains_is_refused(config):
    refused = pytest.raises(UsageError, match="another process trains in .*run; end it, or give another --train_dir")
    with open_run(config), refused, open_run(config):
        pass


@pytest.mark.parametrize(
    ("step", "result_step", "settings", "is_finished"),
    [
        (20, 20, {}, True),
        (20, 20, {"max_steps": 30}, False),
        (10, 10, {}, False),
        (20, 10, {}, False),  # the result of an earlier end
        (10, 10, {"target_accuracy": 0.9}, True),
        (10, 10, {"target_accuracy": 0.95}, False),
    ],
)
def test_a_finished_run_has_a_result(config, step, result_step, settings, is_finished):
    save(config, step)
    result = {"step": result_step, "reached": 0.94}
    files.write_json(config.directory / files.RESULT, result)
    with open_run(dataclasses.replace(config, **settings)) as run:
        assert run.stored_result() == (result if is_finished else None)


def test_overwrite_removes_what_a_run_wrote_and_nothing_else(config):
    save(config, 10)
    mine = ["notes.txt", "train/cat/1.png", "eval/table.csv", "export/model.onnx"]
    theirs = ["config.json", "metrics.jsonl", "step-9.npz.damaged", ".tmp-step-11.npz", "train/events.out.tfevents.1.a"]
    for name in [*mine, *theirs]:
        (config.directory / name).parent.mkdir(parents=True, exist_ok=True)
        (config.directory / name).write_text("")
    with open_run(dataclasses.replace(config, overwrite=True)) as run:
        assert (config.directory / "step-10.npz").exists()  # nothing is removed before the run can begin
        run.clear()
        left = {str(path.relative_to(config.directory)) for path in config.directory.rglob("*") if path.is_file()}
        assert left == {".lock", *mine}


def test_differences_are_named_with_short_digests():
    saved, current = {"towers": 2, "code of loss": "a" * 64}, {"towers": 4, "code of loss": "b" * 64}
    assert describe_differences(saved, current) == ["towers 2 -> 4", f"code of loss {'a' * 8} -> {'b' * 8}"]
    assert describe_differences(current, current) == []

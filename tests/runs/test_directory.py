"""The directory of a run: when it is saved, what is refused, what a damaged checkpoint and
`overwrite` do.
"""

import dataclasses
import itertools
import os
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from cifar_towers import files
from cifar_towers.config import TrainConfig
from cifar_towers.config.train_config import recipe_fields
from cifar_towers.errors import DataError, DivergedError, UsageError
from cifar_towers.runs import directory as directory_module
from cifar_towers.runs.checkpoint import checkpoint_path, list_checkpoints, write_checkpoint
from cifar_towers.runs.directory import RunDirectory, code_facts, open_run, warn_of_edited_model
from tests.helpers.messages import lines_with

VALUES = {"model.kernel": np.ones([2, 2], np.float32), "step": np.int64(0)}


@pytest.fixture
def config(tmp_path):
    return TrainConfig(train_dir=str(tmp_path / "run"), max_steps=20)


def save(config, step, **changes):
    """Write a checkpoint of a run with this config."""
    config.directory.mkdir(exist_ok=True)
    path = checkpoint_path(config.directory, step)
    metadata = {
        "step": step,
        "recipe": recipe_fields(config),
        "steps_per_epoch": 10,
        "failed_saves": 1,
        "facts": {},
    }
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
    monkeypatch.setattr(directory_module, "time", clock)
    monkeypatch.setattr(
        directory_module, "write_checkpoint", lambda *_: setattr(clock, "now", clock.now + 2)
    )
    return clock


def test_by_default_saving_takes_one_percent_of_the_time(config, clock):
    run = RunDirectory(config)
    saved = []
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
    assert run.should_save(1, evaluated=True)
    assert not run.should_save(1, evaluated=False)


def test_saves_every_n_steps_and_keeps_the_newest(config):
    config = dataclasses.replace(config, checkpoint_every_steps=3, keep_checkpoints=2)
    with open_run(config) as run:
        for step in range(1, 13):
            if run.should_save(step, evaluated=step == 4):
                assert run.save(step, VALUES, {})

    saved = [path.name for path in list_checkpoints(config.directory)]
    assert saved == ["step-9.npz", "step-12.npz"]
    assert {path.name for path in config.directory.iterdir()} == {".lock", *saved}


def test_a_state_that_cannot_be_saved_leaves_the_older_checkpoint(config, caplog, monkeypatch):
    save(config, 3)
    with open_run(config) as run:
        with pytest.raises(DivergedError, match="^kernel is not finite after step 6; step-3.npz"):
            run.save(6, {"kernel": np.array([0, np.nan], np.float32)}, {})
        monkeypatch.setattr(np, "savez", Mock(side_effect=OSError(28, "No space left on device")))
        assert not run.save(7, VALUES, {})
        assert run.failed_saves == 2  # one before the checkpoint

    assert lines_with(caplog.text, "step 7", "No space left on device", "step-3.npz")
    assert [path.name for path in list_checkpoints(config.directory)] == ["step-3.npz"]


def test_a_save_counts_although_an_old_checkpoint_cannot_be_removed(config, caplog, monkeypatch):
    config = dataclasses.replace(config, keep_checkpoints=1)
    save(config, 3)
    with open_run(config) as run:
        before = run.failed_saves
        unlink = Path.unlink

        def refuse(path, **options):
            if path.name == "step-3.npz":
                raise OSError(1, "Not permitted")
            unlink(path, **options)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", refuse)
            assert run.save(6, VALUES, {})
        assert run.failed_saves == before

    assert lines_with(caplog.text, "step-3.npz could not be removed", "Not permitted")


def test_a_file_system_that_cannot_sync_a_directory_saves(config, monkeypatch):
    monkeypatch.setattr(os, "open", Mock(side_effect=OSError(22, "Invalid argument")))
    with open_run(config) as run:
        assert run.save(1, VALUES, {})


def test_a_run_with_only_damaged_checkpoints_is_refused(config):
    flip(save(config, 10))
    for _ in range(2):  # the second time it has another name
        with pytest.raises(DataError, match=f"{config.directory} .*--overwrite"), open_run(config):
            pass
    with open_run(dataclasses.replace(config, overwrite=True)) as run:
        assert run.saved is None
        run.clear()

    assert not config.directory.exists()


def test_a_volume_that_cannot_be_removed_hides_no_error(config, monkeypatch):
    monkeypatch.setattr(Path, "rmdir", Mock(side_effect=OSError(16, "Device or resource busy")))
    with pytest.raises(UsageError, match="no logits"), open_run(config):
        raise UsageError("no logits")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("", "", "train_dir=.*run .*File exists"),
        ("photos/cat.jpg", "", "train_dir=.*run .*photos"),
        ("result.json", "{}", "run .*--overwrite"),
    ],
)
def test_directories_in_which_a_run_would_replace_something_are_refused(
    config, name, content, message
):
    path = config.directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    if name:
        (config.directory / "config.json").write_text("{}")  # other programs have one too
    with pytest.raises(UsageError, match=message), open_run(config):
        pass

    assert path.read_text() == content


def test_a_run_of_another_recipe_is_refused_by_name(config):
    save(config, 10)
    free = {"num_gpus": 4, "max_steps": 30, "tta": True, "variable_placement": "round_robin"}
    other = dataclasses.replace(
        config, seed=3, model="resnet20", batch_statistics="synchronized", **free
    )
    with pytest.raises(UsageError) as caught, open_run(other):
        pass
    named = "seed 0 -> 3", "model speednet94 -> resnet20", "batch_statistics mean -> synchronized"

    assert lines_with(str(caught.value), *named, "--init_from=", "--overwrite")
    assert not any(name in str(caught.value) for name in free)

    with open_run(dataclasses.replace(config, **free)) as run:
        assert run.saved


def test_a_run_that_another_process_trains_is_refused(config):
    with open_run(config), pytest.raises(UsageError, match="run; .*--train_dir"), open_run(config):
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
    result = {"step": result_step, "reached": 0.94, "dataset": "cifar10"}
    files.write_json(config.directory / files.RESULT, result)
    with open_run(dataclasses.replace(config, **settings)) as run:
        assert run.stored_result() == (result if is_finished else None)


@pytest.mark.parametrize("setting", ["model", "loss"])
def test_a_finished_run_keeps_its_result_if_its_code_is_edited(config, tmp_path, setting, caplog):
    """There is a warning if the model was edited. An edited loss changes no score of a run."""
    path = tmp_path / "mine.py"
    path.write_text("def mine():\n    pass\n")
    config = dataclasses.replace(config, label_smoothing=0.0, **{setting: f"{path}:mine"})
    save(config, 20, facts=code_facts(config))
    result = {"step": 20, "reached": 0.0, "dataset": "cifar10"}
    files.write_json(config.directory / files.RESULT, result)
    for is_edited in (False, True):
        with open_run(config) as run:
            assert run.stored_result() == result
            warn_of_edited_model(config, run.saved[1], run.path)
        assert ("has changed since" in caplog.text) == (is_edited and setting == "model")
        path.write_text("def mine():\n    return 1\n")


def test_a_file_that_only_one_process_imported_is_no_change():
    before = {"towers": 1, "code of model": 64 * "a", "code of model/blocks.py": 64 * "b"}
    after = {"towers": 2, "code of model": 64 * "c", "code of model/others.py": 64 * "d"}
    changed = directory_module.describe_changed_facts(before, after)
    assert changed == ["towers 1 -> 2", "code of model aaaaaaaa -> cccccccc"]


def test_overwrite_removes_what_a_run_wrote_and_nothing_else(config):
    save(config, 10)
    mine = ["notes.txt", "train/cat/1.png", "eval/table.csv", "export/model.onnx"]
    theirs = [
        "config.json",
        "metrics.jsonl",
        "step-9.npz.damaged",
        ".tmp-step-11.npz",
        "train/events.out.tfevents.1.a",
    ]
    for name in [*mine, *theirs]:
        (config.directory / name).parent.mkdir(parents=True, exist_ok=True)
        (config.directory / name).write_text("")
    with open_run(dataclasses.replace(config, overwrite=True)) as run:
        # nothing is removed before the run can begin
        assert (config.directory / "step-10.npz").exists()
        run.clear()
        files_left = [path for path in config.directory.rglob("*") if path.is_file()]
        left = {str(path.relative_to(config.directory)) for path in files_left}
        assert left == {".lock", *mine}

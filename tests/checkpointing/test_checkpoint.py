import shutil
from unittest.mock import Mock

import numpy as np
import pytest
import tensorflow as tf

from cifar_towers.checkpointing import checkpoint, manager
from cifar_towers.errors import DataError, RunError, UsageError


def make_variables(value=0.0, shape=(2,)):
    return {"model.a/b.c": tf.Variable(tf.fill(shape, value)), "step": tf.Variable(0, dtype=tf.int64)}


def save(train_dir, step, values, metadata, keep):
    path = checkpoint.save_checkpoint(train_dir, step, values, metadata)
    manager.prune_checkpoints(train_dir, keep)
    return path


def test_save_and_restore_round_trip(tmp_path):
    path = save(tmp_path, 12, make_variables(3.0), {"towers": 2}, keep=3)
    inode = path.stat().st_ino
    assert save(tmp_path, 12, make_variables(), {}, keep=1) == path and path.stat().st_ino == inode  # kept
    restored = make_variables()
    checkpoint.restore_variables(path, restored)
    np.testing.assert_array_equal(restored["model.a/b.c"], [3, 3])
    assert checkpoint.read_metadata(path) == {"towers": 2, "step": 12}
    found = checkpoint.read_variables(path, ["model.a/b.c"])
    assert list(found) == ["model.a/b.c"]
    np.testing.assert_array_equal(found["model.a/b.c"], [3, 3])
    assert set(checkpoint.read_variables(path)) == {"model.a/b.c", "step"}


def test_checkpoint_under_another_steps_name_is_quarantined(tmp_path):
    older, newer = (save(tmp_path, step, make_variables(), {}, keep=3) for step in (1, 2))
    newer.rename(tmp_path / "checkpoints/step-00000003")
    (tmp_path / "checkpoints/.tmp-4-abc").mkdir()  # left by a killed save
    log = []
    manager.CheckpointManager(tmp_path, None, 0, 3, log.append).quarantine_damaged()
    (message,) = log
    assert "is damaged (it is of step 2)" in message and checkpoint.latest_checkpoint(tmp_path) == older
    assert {path.name for path in older.parent.iterdir()} == {older.name, "damaged-step-00000003"}


@pytest.mark.parametrize(
    ("owner", "name", "message"),
    [
        (checkpoint.files, "sha256", "step-00000001 cannot be read .Input/output error.; try again"),
        (checkpoint.files.os, "rename", "checkpoints cannot be put in order .Input/output error.; make it writable"),
    ],
)
def test_a_start_that_can_neither_read_nor_rename_ends_in_one_line(tmp_path, monkeypatch, owner, name, message):
    intact, damaged = (save(tmp_path, step, make_variables(), {}, keep=3) for step in (1, 2))
    (damaged / "metadata.json").unlink()
    monkeypatch.setattr(owner, name, Mock(side_effect=OSError(5, "Input/output error")))
    with pytest.raises(RunError, match=message) as caught:
        manager.CheckpointManager(tmp_path, None, 0, 3, print).quarantine_damaged()
    assert "\n" not in str(caught.value) and intact.exists() and damaged.exists()


def test_checkpoint_pruned_while_being_read_is_not_called_damaged(tmp_path, monkeypatch):
    old = save(tmp_path, 1, make_variables(), {}, keep=1)
    validate = checkpoint.files.validate

    def meanwhile(directory, hashes=True):
        if directory == old and old.exists():
            save(tmp_path, 2, make_variables(), {}, keep=1)  # which removes the old one
        return validate(directory)

    monkeypatch.setattr(checkpoint.files, "validate", meanwhile)
    assert checkpoint.latest_checkpoint(tmp_path) == checkpoint.checkpoint_path(tmp_path, 2)
    for read in (checkpoint.read_variables, checkpoint.read_metadata):
        with pytest.raises(DataError, match="step-00000001 is gone: its run is training and keeps newer ones; type"):
            read(old)


def test_a_copy_under_another_name_is_no_checkpoint(tmp_path):
    shutil.copytree(save(tmp_path, 10, make_variables(), {}, keep=1), tmp_path / "checkpoints/step-00000010.bak")
    with pytest.raises(UsageError, match="has no checkpoint of step 7; those it has are of: 10$"):
        checkpoint.find_checkpoint(tmp_path, 7)
    manager.CheckpointManager(tmp_path, None, 0, 3, print).quarantine_damaged()
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"step-00000010", "step-00000010.bak"}


def test_prune_keeps_the_newest_and_leaves_nothing_else(tmp_path):
    for step in (9, 10, 100, 101):
        save(tmp_path, step, make_variables(), {}, keep=2)
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path)] == ["step-00000100", "step-00000101"]
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2


@pytest.mark.parametrize("damage", [lambda content: bytes(255 - byte for byte in content), lambda content: content[:9]])
@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("metadata.json", checkpoint.read_metadata),
        ("state.index", checkpoint.read_variables),
        ("state.data-00000-of-00001", checkpoint.read_variables),
    ],
)
def test_damaged_checkpoint_is_named(tmp_path, name, read, damage):
    path = save(tmp_path, 1, make_variables(1.0), {}, keep=1)
    (path / name).write_bytes(damage((path / name).read_bytes()))
    with pytest.raises(DataError, match="step-00000001 is damaged"):
        read(path)


def test_checkpoint_of_another_model_is_refused(tmp_path):
    path = save(tmp_path, 1, make_variables(), {}, keep=1)
    other = {"other": tf.Variable(0.0), "step": tf.Variable(0.0)}
    for wanted, message in ((make_variables(shape=(3,)), "1 variables differ"), (other, "3 variables differ")):
        with pytest.raises(UsageError, match=message):
            checkpoint.restore_variables(path, wanted)
    with pytest.raises(UsageError, match="no variable model.z"):
        checkpoint.read_variables(path, ["model.z"])

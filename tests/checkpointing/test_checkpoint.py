import numpy as np
import pytest
import tensorflow as tf

from cifar_towers.checkpointing import checkpoint, manager, variables
from cifar_towers.errors import DataError, UsageError


def make_variables(value=0.0, shape=(2,)):
    return {"model.a/b.c": tf.Variable(tf.fill(shape, value)), "step": tf.Variable(0, dtype=tf.int64)}


def save(train_dir, step, values, metadata, keep):
    path = variables.save_checkpoint(train_dir, step, values, metadata)
    manager.prune_checkpoints(train_dir, keep)
    return path


def test_save_and_restore_round_trip(tmp_path):
    path = save(tmp_path, 12, make_variables(3.0), {"towers": 2}, keep=3)
    restored = make_variables()
    variables.restore_variables(path, restored)
    np.testing.assert_array_equal(restored["model.a/b.c"], [3, 3])
    assert checkpoint.read_metadata(path) == {"towers": 2, "step": 12}
    found = variables.read_variables(path, ["model.a/b.c"])
    assert list(found) == ["model.a/b.c"]
    np.testing.assert_array_equal(found["model.a/b.c"], [3, 3])
    assert set(variables.read_variables(path)) == {"model.a/b.c", "step"}


def test_checkpoint_under_another_steps_name_is_quarantined(tmp_path):
    older, newer = (save(tmp_path, step, make_variables(), {}, keep=3) for step in (1, 2))
    newer.rename(tmp_path / "checkpoints/step-00000003")
    log = []
    manager.CheckpointManager(tmp_path, None, 0, 3, log.append).quarantine_damaged()
    (message,) = log
    assert "is damaged (it is of step 2)" in message and checkpoint.latest_checkpoint(tmp_path) == older


def test_checkpoint_pruned_while_being_read_is_not_called_damaged(tmp_path, monkeypatch):
    old = save(tmp_path, 1, make_variables(), {}, keep=1)
    validate = checkpoint.files.validate

    def meanwhile(directory, hashes=True):
        if directory == old and old.exists():
            save(tmp_path, 2, make_variables(), {}, keep=1)  # which removes the old one
        return validate(directory)

    monkeypatch.setattr(checkpoint.files, "validate", meanwhile)
    assert checkpoint.latest_checkpoint(tmp_path) == checkpoint.checkpoint_path(tmp_path, 2)
    for read in (variables.read_variables, checkpoint.read_metadata):
        with pytest.raises(
            DataError, match="step-00000001 is gone: its run is training and keeps newer ones; type the"
        ):
            read(old)


def test_tensorflow_reads_the_checkpoint(tmp_path):
    path = save(tmp_path, 1, make_variables(3.0), {}, keep=3)
    reader = tf.train.load_checkpoint(str(path / "state"))
    assert any("step" in name for name in reader.get_variable_to_shape_map())


def test_prune_keeps_the_newest_and_leaves_nothing_else(tmp_path):
    for step in (9, 10, 100, 101):
        save(tmp_path, step, make_variables(), {}, keep=2)
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path)] == ["step-00000100", "step-00000101"]
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2


def test_saving_a_step_again_keeps_the_existing_checkpoint(tmp_path):
    path = save(tmp_path, 1, make_variables(1.0), {}, keep=1)
    inode = path.stat().st_ino
    assert save(tmp_path, 1, make_variables(1.0), {}, keep=1) == path and path.stat().st_ino == inode


def test_leftovers_of_a_killed_save_are_removed(tmp_path):
    (tmp_path / "checkpoints/.tmp-4-abc").mkdir(parents=True)
    manager.CheckpointManager(tmp_path, None, 0, 3, print).quarantine_damaged()
    assert not list((tmp_path / "checkpoints").iterdir())


@pytest.mark.parametrize("name", ["metadata.json", "state.index", "state.data-00000-of-00001"])
def test_damaged_checkpoint_is_named(tmp_path, name):
    path = save(tmp_path, 1, make_variables(1.0), {}, keep=1)
    content = (path / name).read_bytes()
    (path / name).write_bytes(bytes(255 - byte for byte in content))
    with pytest.raises(DataError, match="step-00000001 is damaged"):
        checkpoint.read_metadata(path)
        variables.restore_variables(path, make_variables())


def test_checkpoint_of_another_model_is_refused(tmp_path):
    path = save(tmp_path, 1, make_variables(), {}, keep=1)
    with pytest.raises(UsageError, match=r"1 variables differ"):
        variables.restore_variables(path, make_variables(shape=(3,)))
    with pytest.raises(UsageError, match="no variable model.z"):
        variables.read_variables(path, ["model.z"])

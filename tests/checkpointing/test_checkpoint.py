import numpy as np
import pytest
import tensorflow as tf

from cifar_towers.checkpointing import checkpoint
from cifar_towers.errors import DataError, UsageError


def variables(value=0.0, shape=(2,)):
    return {"model.a/b.c": tf.Variable(tf.fill(shape, value)), "step": tf.Variable(0, dtype=tf.int64)}


def test_what_was_saved_comes_back(tmp_path):
    path = checkpoint.save(tmp_path, 12, variables(3.0), {"towers": 2}, keep=3)
    restored = variables()
    checkpoint.restore(path, restored)
    np.testing.assert_array_equal(restored["model.a/b.c"], [3, 3])
    assert checkpoint.read_metadata(path) == {"towers": 2, "step": 12}
    found = checkpoint.read(path, ["model.a/b.c"])
    assert list(found) == ["model.a/b.c"]
    np.testing.assert_array_equal(found["model.a/b.c"], [3, 3])
    assert set(checkpoint.read(path)) == {"model.a/b.c", "step"}


def test_a_checkpoint_under_another_steps_name_is_damaged(tmp_path):
    older, newer = (checkpoint.save(tmp_path, step, variables(), {}, keep=3) for step in (1, 2))
    newer.rename(tmp_path / "checkpoints/step-00000003")
    (told,) = checkpoint.tidy(tmp_path)
    assert "is damaged (it is of step 2)" in told and checkpoint.newest(tmp_path) == older


def test_a_run_that_goes_on_while_it_is_read_is_not_called_damaged(tmp_path, monkeypatch):
    old = checkpoint.save(tmp_path, 1, variables(), {}, keep=1)
    look = checkpoint.atomic_io.damage

    def meanwhile(directory):
        if directory == old and old.exists():
            checkpoint.save(tmp_path, 2, variables(), {}, keep=1)  # which removes the old one
        return look(directory)

    monkeypatch.setattr(checkpoint.atomic_io, "damage", meanwhile)
    assert checkpoint.newest(tmp_path) == checkpoint.path_of(tmp_path, 2)
    for read in (checkpoint.read, checkpoint.read_metadata):
        with pytest.raises(DataError, match="step-00000001 is gone, as its run goes on and keeps newer ones; type the"):
            read(old)


def test_tensorflow_reads_it(tmp_path):
    path = checkpoint.save(tmp_path, 1, variables(3.0), {}, keep=3)
    reader = tf.train.load_checkpoint(str(path / "state"))
    assert any("step" in name for name in reader.get_variable_to_shape_map())


def test_the_newest_are_kept_and_nothing_else_is_left(tmp_path):
    for step in (9, 10, 100, 101):
        checkpoint.save(tmp_path, step, variables(), {}, keep=2)
    assert [path.name for path in checkpoint.saved(tmp_path)] == ["step-00000100", "step-00000101"]
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2


def test_saving_a_step_again_keeps_what_there_is(tmp_path):
    path = checkpoint.save(tmp_path, 1, variables(1.0), {}, keep=1)
    inode = path.stat().st_ino
    assert checkpoint.save(tmp_path, 1, variables(1.0), {}, keep=1) == path and path.stat().st_ino == inode


def test_leftovers_of_a_killed_save_are_swept(tmp_path):
    (tmp_path / "checkpoints/.tmp-4-abc").mkdir(parents=True)
    checkpoint.tidy(tmp_path)
    assert not list((tmp_path / "checkpoints").iterdir())


@pytest.mark.parametrize("name", ["facts.json", "state.index", "state.data-00000-of-00001"])
def test_a_damaged_checkpoint_is_named(tmp_path, name):
    path = checkpoint.save(tmp_path, 1, variables(1.0), {}, keep=1)
    content = (path / name).read_bytes()
    (path / name).write_bytes(bytes(255 - byte for byte in content))
    with pytest.raises(DataError, match="step-00000001 is damaged"):
        checkpoint.read_metadata(path)
        checkpoint.restore(path, variables())


def test_another_model_is_refused_by_name(tmp_path):
    path = checkpoint.save(tmp_path, 1, variables(), {}, keep=1)
    with pytest.raises(UsageError, match=r"1 variables differ"):
        checkpoint.restore(path, variables(shape=(3,)))
    with pytest.raises(UsageError, match="no variable model.z"):
        checkpoint.read(path, ["model.z"])

import itertools
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import tensorflow as tf

from cifar_towers import files
from cifar_towers.checkpointing import manager
from cifar_towers.checkpointing.checkpoint import checkpoint_path, save_checkpoint


@pytest.fixture
def clock(monkeypatch):
    """Time that passes when a test says so; a save takes two seconds of it."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(manager, "time", clock)
    monkeypatch.setattr(manager, "save_checkpoint", lambda *_: setattr(clock, "now", clock.now + 2))
    monkeypatch.setattr(manager, "prune_checkpoints", lambda *_: None)
    return clock


def make(tmp_path, every=0, log=None, **state):
    return manager.CheckpointManager(tmp_path, state, every, 3, log)


def test_by_default_saving_takes_one_percent_of_the_time(tmp_path, clock):
    manager_ = make(tmp_path)
    saved = []
    for step in range(1, 2000):
        clock.now += 1
        if manager_.should_save(step, evaluated=step % 50 == 0):
            manager_.save(step, {})
            saved.append(step)
    assert saved[0] == 30  # then 200 s of steps for a save of two seconds
    assert all(after - before == 200 for before, after in itertools.pairwise(saved))


def test_evaluated_step_is_saved_before_its_time(tmp_path, clock):
    manager_ = make(tmp_path)
    clock.now += 1
    assert manager_.should_save(1, evaluated=True) and not manager_.should_save(1, evaluated=False)


def test_save_every_n_steps(tmp_path, clock):
    manager_ = make(tmp_path, every=3)
    assert [step for step in range(1, 10) if manager_.should_save(step, step == 4)] == [3, 6, 9]


def test_state_with_nan_is_not_saved(tmp_path, clock):
    log = []
    manager_ = make(tmp_path, log=log.append, step=tf.Variable(7), kernel=tf.Variable([0.0, np.nan]))
    assert not manager_.save(7, {}) and manager_.failed_saves == 1
    assert log == ["step 7 could not be saved (kernel is not finite); no checkpoint was written"]


@pytest.mark.parametrize("recorded, expected", [(0, 1), (2, 2)])
def test_rollbacks_newer_than_the_checkpoint_count(tmp_path, recorded, expected):
    path = save_checkpoint(tmp_path, 3, {"step": tf.Variable(3)}, {"rollbacks": 1})
    if recorded:
        files.write_json(tmp_path / files.ROLLBACKS, {"rollbacks": recorded, "skipped_steps": 3})
    metadata = make(tmp_path, step=tf.Variable(0)).restore(path)
    assert (metadata["step"], metadata["rollbacks"]) == (3, expected)
    assert metadata["skipped_steps"] == (3 if recorded else 0)


def test_saves_that_failed_count_after_a_restart(tmp_path, monkeypatch):
    manager_ = make(tmp_path, log=[].append, step=tf.Variable(0))
    with monkeypatch.context() as patch:
        patch.setattr(files, "commit", Mock(side_effect=OSError(28, "No space left on device")))
        assert not manager_.save(1, {})
    assert manager_.save(2, {}) and manager_.failed_saves == 1
    manager_ = make(tmp_path, step=tf.Variable(0))
    manager_.restore(checkpoint_path(tmp_path, 2))
    assert manager_.failed_saves == 1


def test_a_rollback_may_go_to_a_checkpoint_after_skipped_steps(tmp_path):
    """A signal saved it between them; its weights are those of the last good step."""
    for number, skipped in ((2, 0), (4, 1)):
        assert make(tmp_path, step=tf.Variable(number)).save(number, {"skipped_in_a_row": skipped})
    manager_ = make(tmp_path, step=tf.Variable(0))
    assert manager_.roll_back(last_good_step=3, rollbacks=1, skipped_steps=2)["step"] == 4
    restored = manager_.restore(checkpoint_path(tmp_path, 4))
    assert (restored["skipped_steps"], restored["skipped_in_a_row"]) == (2, 0)
    assert manager_.roll_back(last_good_step=1, rollbacks=2) is None


@pytest.mark.parametrize("restarted", [False, True])
def test_a_rollback_to_the_same_checkpoint_goes_further_back(tmp_path, restarted):
    """Also if the run was killed and started again in between, so that it ends with the same weights."""
    step = tf.Variable(0)
    for number in (2, 4):
        step.assign(number)
        assert make(tmp_path, step=step).save(number, {})
    manager_ = make(tmp_path, step=step)
    assert manager_.roll_back(last_good_step=4, rollbacks=1)["step"] == 4
    if restarted:
        manager_ = make(tmp_path, step=step)
        assert manager_.restore(checkpoint_path(tmp_path, 4))["rollbacks"] == 1
    assert manager_.roll_back(last_good_step=4, rollbacks=2)["step"] == step.numpy() == 2


def test_workers_get_what_the_chief_restores_and_write_nothing(tmp_path):
    """Worker 1 of two gets what the chief's calls returned."""
    ours, metadata = tf.Variable(0.0), {"step": 3}
    answers = iter((True, metadata, {"weight": np.float32(7)}, None))
    workers = SimpleNamespace(index=1, size=2, is_chief=False, broadcast_from_chief=lambda make: next(answers))
    follower = manager.CheckpointManager(tmp_path, {"weight": ours}, 1, 3, print, workers)
    assert not follower.should_save(1, evaluated=True)
    assert follower.save(1, {}) and follower.save(1, {}, wait=True)
    assert follower.restore_latest(lambda: None) == metadata and ours.numpy() == 7
    assert follower.roll_back(3, 1) is None and not list(tmp_path.iterdir())

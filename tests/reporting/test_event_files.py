import os
import shutil

import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.scalar.summary_v2 import scalar_pb

from cifar_towers.files import EVENT_FILES
from cifar_towers.reporting.event_files import EventWriter, read_events
from cifar_towers.reporting.tensorboard_writer import TensorBoardWriter


def scalars_in(directory, tag="loss"):
    """{step: value} of a tag."""
    events = EventAccumulator(str(directory)).Reload().Tensors(tag)
    assert len({event.step for event in events}) == len(events)
    return {event.step: tf.make_ndarray(event.tensor_proto).item() for event in events}


def write(events, steps):
    for step in steps:
        events.write(step, [scalar_pb("loss", 1 / (step + 1))])


def test_truncated_run_has_one_curve(tmp_path):
    write(EventWriter(tmp_path), [1, 2])
    assert scalars_in(tmp_path) == {1: 0.5, 2: pytest.approx(1 / 3)}
    write(EventWriter(tmp_path), [3, 4, 5])  # killed
    again = EventWriter(tmp_path)
    again.truncate_after(3)
    write(again, [4, 5, 6])
    assert list(scalars_in(tmp_path)) == [1, 2, 3, 4, 5, 6]
    again.truncate_after(5)  # as on a rollback, in the same process
    write(again, [6, 7])
    assert list(scalars_in(tmp_path)) == [1, 2, 3, 4, 5, 6, 7]


def test_towers_have_one_curve_after_a_rollback(tmp_path):
    writer = TensorBoardWriter(tmp_path)
    for last_good_step in (2, 0):
        for step in (1, 2, 3, 4):
            writer.write_tower_scalars(step, {"towers/loss": [0.5, 0.25]})
        writer.truncate_after(last_good_step, 0)
    for step in (1, 2):
        writer.write_tower_scalars(step, {"towers/loss": [0.5, 0.25]})
    for name in ("tower_0", "tower_1"):
        assert list(scalars_in(tmp_path / name, "towers/loss")) == [1, 2]
        assert not list((tmp_path / name).glob(".*"))


def test_truncated_file_is_read_up_to_there(tmp_path):
    events = EventWriter(tmp_path)
    write(events, [1, 2, 3])
    events.close()
    (path,) = tmp_path.glob(EVENT_FILES)
    os.truncate(path, path.stat().st_size - 5)
    assert [event.step for event in read_events(path)] == [0, 1, 2]
    again = EventWriter(tmp_path)
    again.truncate_after(1)
    write(again, [2, 3])
    assert list(scalars_in(tmp_path)) == [1, 2, 3]


def test_removed_directory_is_made_again(tmp_path):
    events = EventWriter(tmp_path / "run" / "train")
    write(events, [1, 2])
    shutil.rmtree(tmp_path / "run")
    write(events, [3, 4, 5])
    assert list(scalars_in(tmp_path / "run" / "train")) == [3, 4, 5]


def test_failed_write_is_logged_once_and_retried(tmp_path, caplog):
    (tmp_path / "train").write_text("in the way")
    events = EventWriter(tmp_path / "train")
    write(events, [1, 2, 3])
    assert len(caplog.records) == 1 and "train cannot be written" in caplog.text
    (tmp_path / "train").unlink()
    write(events, [4, 5])
    assert list(scalars_in(tmp_path / "train")) == [4, 5]

import io
import os
import shutil
from unittest.mock import Mock

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.histogram.summary_v2 import histogram_pb
from tensorboard.plugins.hparams import api_pb2, backend_context, list_session_groups
from tensorboard.plugins.scalar.summary_v2 import scalar_pb
from tensorboard.util.tensor_util import make_ndarray

from cifar_towers import files
from cifar_towers.reporting import tensorboard_writer
from cifar_towers.reporting.tensorboard_writer import EventWriter, TensorBoardWriter, read_events
from cifar_towers.towers import average_gradients, run_on_towers, split_batch
from tests.runs.short_runs import events_of, tensors_of

SETTINGS = {"recipe": "speed94", "lr": 0.25, "batch_size": np.int64(512), "ema": True}


def write(directory, *summaries):
    """One a step, from step 0."""
    events = EventWriter(directory)
    for step, summary in enumerate(summaries):
        events.write(step, [summary])


def read(directory, tag):
    """Return the only tensor of a tag, and the plugin that it is for."""
    events = events_of(directory)
    (value,) = tensors_of(events, tag).values()
    return value, events.SummaryMetadata(tag).plugin_data.plugin_name


def tensorboard(logdir):
    """Return the context that TensorBoard's plugins are made with."""
    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(logdir)).Reload()
    return TBContext(logdir=str(logdir), data_provider=MultiplexerDataProvider(multiplexer, str(logdir)))


def content(summary):
    return make_ndarray(summary.value[0].tensor)


def test_image_is_read_back(tmp_path):
    shown = np.random.default_rng(0).integers(0, 256, (4, 7, 3), np.uint8)
    write(tmp_path, tensorboard_writer.image("mistakes", shown))
    (width, height, png), plugin = read(tmp_path, "mistakes")
    assert plugin == "images" and (width, height) == (b"7", b"4")
    assert np.array_equal(np.array(Image.open(io.BytesIO(png))), shown)


@pytest.mark.parametrize("data", [[0, 1, 1, 2, 5, 5, 8], [-3.0, 4.0], [2.5] * 9, [0.0], []])
def test_histograms_equal_tensorboards(tmp_path, data):
    low, high = (min(data), max(data)) if data else (np.inf, -np.inf)
    counts = np.histogram(data, 8, (low, high))[0] if data else np.zeros(8, int)
    write(tmp_path, tensorboard_writer.histogram("weights", low, high, counts))
    value, plugin = read(tmp_path, "weights")
    assert plugin == "histograms" and value.dtype == np.float64
    np.testing.assert_allclose(value, content(histogram_pb("weights", data, 8)))


def test_histograms_of_equal_values_and_of_a_range_that_overflows_float32():
    first, last = (tensorboard_writer.histogram("weights", 3, 3, counts) for counts in ([7, 0, 0], [0, 0, 7]))
    assert first == last and content(last).tolist() == [[3, 3, 0], [3, 3, 0], [3, 3, 7]]
    most = np.finfo(np.float32).max
    assert np.isfinite(content(tensorboard_writer.histogram("weights", -most, most, [1, 2]))).all()


def test_a_run_has_its_settings_beside_its_result(tmp_path):
    for name, accuracy in (("stopped", None), ("done", 0.75)):
        writer = TensorBoardWriter(tmp_path / name)
        writer.write_settings(SETTINGS)
        if accuracy:
            writer.write_result(9, {"accuracy": accuracy})
    request = api_pb2.ListSessionGroupsRequest(slice_size=9, allowed_statuses=api_pb2.Status.values())
    context = backend_context.Context(tensorboard(tmp_path))
    shown = list_session_groups.Handler(RequestContext(), context, "", request).run().session_groups
    assert [group.name for group in shown] == ["done/result", "stopped/result"]
    assert [(metric.name.tag, metric.value) for metric in shown[0].metric_values] == [("final/accuracy", 0.75)]
    assert [group.sessions[0].status for group in shown] == [api_pb2.STATUS_SUCCESS, api_pb2.STATUS_UNKNOWN]
    hparams = shown[0].hparams
    assert hparams.keys() == SETTINGS.keys() and hparams["recipe"].string_value == "speed94"
    assert hparams["ema"].bool_value is True and hparams["batch_size"].number_value == 512


def traced(towers):
    weight = tf.Variable([[2.0]], name="layer/kernel")

    def on_tower(_, shard):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((shard @ weight) ** 2)
        return [(tape.gradient(loss, weight), weight)]

    @tf.function(autograph=False)
    def step(batch):
        gradients = average_gradients(run_on_towers(on_tower, towers, split_batch(batch, towers)))
        for gradient, variable in gradients:
            variable.assign_sub(gradient)

    return weight, step.get_concrete_function(tf.TensorSpec([9, 1]))


def test_towers_are_drawn_side_by_side(towers):
    weight, function = traced(towers(3))
    ((_, placeholder),) = [pair for pair in function.graph.captures if pair[0] is weight.handle]
    assert placeholder.op.name.startswith("tower_0/")  # where the variable was first read
    graph = function.graph.as_graph_def()
    shown = tensorboard_writer.relabel_graph(graph, {placeholder.op.name: "layer/kernel"})
    names = {node.name for node in shown.node}
    assert len(names) == len(graph.node) and "variables/layer/kernel" in names
    assert {f"tower_{k}" for k in range(3)} <= {name.split("/")[0] for name in names}
    assert not [name for name in names if name.startswith("gradient_tape") or "/" not in name]
    assert [name for name in names if name.startswith("tower_2/gradients/")]
    for node in shown.node:
        sources = [source.lstrip("^").split(":")[0] for source in node.input]
        assert set(sources) <= names
        tower = node.name.split("/")[0]
        if tower.startswith("tower_"):
            assert not [s for s in sources if s.startswith("tower_") and s.split("/")[0] != tower]


def scalars_in(directory, tag="loss"):
    """{step: value} of a tag, which has one value a step."""
    events = events_of(directory)
    found = tensors_of(events, tag)
    assert len(found) == len(events.Tensors(tag))
    return found


def write_steps(events, steps):
    for step in steps:
        events.write(step, [scalar_pb("loss", 1 / (step + 1))])


def test_truncated_run_has_one_curve(tmp_path):
    write_steps(EventWriter(tmp_path), [1, 2])
    assert scalars_in(tmp_path) == {1: 0.5, 2: pytest.approx(1 / 3)}
    write_steps(EventWriter(tmp_path), [3, 4, 5])  # killed
    again = EventWriter(tmp_path)
    again.truncate_after(3)
    write_steps(again, [4, 5, 6])
    assert list(scalars_in(tmp_path)) == [1, 2, 3, 4, 5, 6]
    again.truncate_after(5)  # as on a rollback, in the same process
    write_steps(again, [6, 7])
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
    write_steps(events, [1, 2, 3])
    events.close()
    (path,) = tmp_path.glob(files.EVENT_FILES)
    os.truncate(path, path.stat().st_size - 5)
    assert [event.step for event in read_events(path)] == [0, 1, 2]
    again = EventWriter(tmp_path)
    again.truncate_after(1)
    write_steps(again, [2, 3])
    assert list(scalars_in(tmp_path)) == [1, 2, 3]


def test_removed_directory_is_made_again(tmp_path):
    events = EventWriter(tmp_path / "run" / "train")
    write_steps(events, [1, 2])
    shutil.rmtree(tmp_path / "run")
    write_steps(events, [3, 4, 5])
    assert list(scalars_in(tmp_path / "run" / "train")) == [3, 4, 5]


def test_full_disk_leaves_no_empty_file_for_each_event(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        full = Mock(side_effect=tf.errors.ResourceExhaustedError(None, None, "No space left on device"))
        patch.setattr(tensorboard_writer.tf.io.TFRecordWriter, "flush", full)
        events = EventWriter(tmp_path)
        write_steps(events, [1, 2, 3])
    assert full.call_count == 3 and not list(tmp_path.iterdir())
    write_steps(events, [4])
    assert list(scalars_in(tmp_path)) == [4]


def test_failed_write_is_logged_once_and_retried(tmp_path, caplog):
    (tmp_path / "train").write_text("in the way")
    events = EventWriter(tmp_path / "train")
    write_steps(events, [1, 2, 3])
    assert len(caplog.records) == 1 and "train cannot be written" in caplog.text
    (tmp_path / "train").unlink()
    write_steps(events, [4, 5])
    assert list(scalars_in(tmp_path / "train")) == [4, 5]

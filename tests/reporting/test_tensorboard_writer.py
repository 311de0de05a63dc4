"""Event files as TensorBoard reads them."""

import numpy as np
import tensorflow as tf
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.hparams import api_pb2, backend_context, list_session_groups

from cifar_towers.reporting.tensorboard_writer import TensorBoardWriter
from tests.helpers.short_runs import events_of, png_of, tensors_of

SETTINGS = {"recipe": "speed94", "lr": 0.25, "batch_size": 512, "ema": True}


def test_image_and_scalars_are_read_back(tmp_path):
    shown = np.random.default_rng(0).integers(0, 256, (4, 7, 3), np.uint8)
    writer = TensorBoardWriter(tmp_path)
    writer.write("eval", 5, {"losses/total_loss (raw)": 0.5}, {"mistakes/test": png_of(shown)})
    events = events_of(tmp_path / "eval")

    assert tensors_of(events, "losses/total_loss (raw)") == {5: 0.5}

    width, height, png = tensors_of(events, "mistakes/test")[5]
    assert (width, height) == (b"7", b"4")
    assert np.array_equal(tf.io.decode_png(png), shown)


def test_a_histogram_of_nearly_equal_values_is_written(tmp_path):
    values = np.float32([1, 1, np.nextafter(np.float32(1), 2)])
    TensorBoardWriter(tmp_path).write("train", 1, {}, {}, {"weights/one": values})
    buckets = tensors_of(events_of(tmp_path / "train"), "weights/one")[1]
    assert buckets[:, 2].sum() == 3
    assert buckets[0, 0] == 1


def test_towers_share_variables_alone_in_the_graph(tmp_path):
    """Each has its gradients, also those that TensorFlow names "gradient_tape/tower_0/..."."""
    weight = tf.Variable([[2.0]], name="weight")

    @tf.function
    def step(x):
        gradients = []
        for tower in ("tower_0", "tower_1"):
            with tf.name_scope(tower):
                with tf.GradientTape() as tape:
                    y = tf.matmul(x, weight)
                gradients.append(tape.gradient(y, weight))
        return gradients

    TensorBoardWriter(tmp_path).write_graph(step.get_concrete_function(tf.ones([1, 1])))
    events = events_of(tmp_path / "train")
    graph = tf.compat.v1.GraphDef.FromString(events.Graph().SerializeToString())

    inputs = {}
    for node in graph.node:
        box = node.name.partition("/")[0]
        inputs.setdefault(box, set()).update(name.partition("/")[0] for name in node.input)
    for tower in ("tower_0", "tower_1"):
        assert inputs[tower] == {tower, "variables", "x"}
    assert "gradient_tape" not in inputs
    assert "variables/weight" in [node.name for node in graph.node]


def test_a_run_has_its_settings_beside_its_result(tmp_path):
    """Settings of an aborted start at step 0 are removed."""
    TensorBoardWriter(tmp_path / "done").start(SETTINGS | {"lr": 0.5})
    writer = TensorBoardWriter(tmp_path / "done")
    writer.start(SETTINGS)
    writer.write("eval", 9, {"accuracy/test": 0.75})
    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(tmp_path)).Reload()
    provider = MultiplexerDataProvider(multiplexer, str(tmp_path))
    context = backend_context.Context(TBContext(logdir=str(tmp_path), data_provider=provider))
    request = api_pb2.ListSessionGroupsRequest(
        slice_size=9, allowed_statuses=api_pb2.Status.values()
    )
    (shown,) = (
        list_session_groups.Handler(RequestContext(), context, "", request).run().session_groups
    )

    assert shown.name == "done/eval"
    assert [(metric.name.tag, metric.value) for metric in shown.metric_values] == [
        ("accuracy/test", 0.75)
    ]
    assert shown.hparams.keys() == SETTINGS.keys()
    assert shown.hparams["recipe"].string_value == "speed94"
    assert shown.hparams["lr"].number_value == 0.25

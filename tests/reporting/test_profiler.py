import re
import resource

import pytest
import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from cifar_towers.reporting import profiler
from cifar_towers.reporting.profiler import PARTS, StepProfiler, part_of, profile_step, read_trace
from cifar_towers.towers import average_gradients, run_on_towers, split_batch


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("tower_0/conv1/Conv2D", "forward"),
        ("gradient_tape/tower_1/conv1/Conv2D/Conv2DBackpropFilter", "backward"),
        ("tower_0/backward/PartitionedCall", "backward"),
        ("train_step/gradient_tape/tower_0/MatMul", "backward"),
        ("tower_0/part_1/average_gradients/AddN", "average"),
        ("all_reduce/AddN", "average"),
        ("apply/Mul", "apply"),
        ("weight_averages/sub", "apply"),
        ("split_batch/split", "other"),
        ("gradient_tape/proxy/tower_0/MatMul", "proxy"),
    ],
)
def test_parts_of_the_step(name, part):
    assert part_of(name) == part


@pytest.fixture
def count():
    """count(): a small step: three products."""
    w = tf.Variable(tf.ones([4, 4]))

    @tf.function
    def count():
        for _ in range(3):
            with tf.name_scope("tower_0"):
                w.assign(w @ w / 4)

    count()
    return count


def step_events(trace):
    """Return the starts of the events that mark a step."""
    planes = xplane_pb2.XSpace.FromString(trace.read_bytes()).planes
    events = [event for plane in planes if plane.name == "/host:CPU" for event in profiler._events(plane)]
    return [start for _, name, start, _, stats in events if name == "train" and "step_num" in stats]


@tf.function
def evaluate():
    return tf.linalg.inv(tf.random.uniform([3, 3]))


def make_step(window, step, number=0):
    window.before(number)
    step()
    return window.after(number + 1)


def run(window, step, steps):
    """Make the steps as a run does, with an evaluation after each; the summaries that the profiler returned."""
    summaries = []
    for number in steps:
        summaries.append(make_step(window, step, number))
        evaluate()
    return [summary for summary in [*summaries, window.close()] if summary]


def traces(train_dir):
    return sorted(train_dir.glob("train/plugins/profile/*/*.xplane.pb"))


def test_shares_of_a_step(towers):
    """On two towers; XLA's kernels, which carry no name, count to the forward pass."""
    w = tf.Variable(tf.random.normal([400, 400]))
    halve = tf.function(lambda x: x / 2, jit_compile=True)

    def on_tower(tower, shard):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(halve(shard) @ w)
        return loss, [(tape.gradient(loss, w), w)]

    @tf.function
    def step(x):
        losses, tower_grads = zip(*run_on_towers(on_tower, towers(2), split_batch(x, towers(2))), strict=True)
        for gradient, variable in average_gradients(tower_grads):
            with tf.name_scope("apply"):
                variable.assign_sub(gradient)
        return losses

    step(tf.ones([1600, 400]))
    shares = profile_step(lambda: step(tf.ones([1600, 400])))
    assert tuple(shares) == PARTS and sum(shares.values()) == pytest.approx(1)
    assert shares["forward"] > 0.05 and shares["backward"] > 0.05 and shares["average"] > 0 and shares["apply"] > 0


def test_window_traces_its_steps_without_evaluations_between_them(tmp_path, count):
    (summary,) = run(StepProfiler(tmp_path, 2, 5), count, range(8))
    (trace,) = traces(tmp_path)
    assert b"MatrixInverse" in trace.read_bytes()
    seconds_per_step, shares = read_trace(trace)
    assert 0 < seconds_per_step < 5 and shares["forward"] > 0
    assert len(step_events(trace)) == 3
    assert re.search(r"steps 3 to 5: [\d.]+ ms per step: forward [\d.]+ %, backward 0.0 %, ", summary)
    assert "\n" not in summary


@pytest.mark.parametrize(
    ("steps", "which", "num_steps"),
    [
        (range(3, 9), "steps 4 to 5", 2),
        (range(4), "steps 3 to 4", 2),
        ([4], "step 5", 1),
        ([0, 1, 2, 3, 1, 2, 3, 4, 5, 2, 3, 4, 5], "steps 3 to 5", 5),  # rolled back twice
    ],
)
def test_run_that_begins_ends_or_is_rolled_back_inside_the_window(tmp_path, count, steps, which, num_steps):
    (summary,) = run(StepProfiler(tmp_path, 2, 5), count, steps)
    assert summary.startswith(f"profile of {which}: ")
    assert len(step_events(traces(tmp_path)[0])) == num_steps


@pytest.mark.parametrize("steps", [range(2), range(5, 8)])
def test_run_outside_the_window_is_not_traced(tmp_path, count, steps):
    assert run(StepProfiler(tmp_path, 2, 5), count, steps) == [] and not any(tmp_path.iterdir())


def test_interrupted_step_is_not_counted(tmp_path, count):
    window = StepProfiler(tmp_path, 0, 5)
    window.before(0)
    assert window.close() is None and not traces(tmp_path)
    window = StepProfiler(tmp_path, 0, 5)
    make_step(window, count)
    window.before(1)
    count()
    assert window.close().startswith("profile of step 1: ") and len(step_events(traces(tmp_path)[0])) == 1
    assert window.after(2) is None and window.close() is None


@pytest.mark.parametrize("plugin", ["json", "not_here"])
def test_summary_says_how_to_view_the_trace(tmp_path, count, monkeypatch, plugin):
    monkeypatch.setattr(profiler, "PLUGIN", plugin)
    (summary,) = run(StepProfiler(tmp_path, 0, 1), count, range(1))
    assert summary.endswith(f"tensorboard --logdir={tmp_path}")
    assert ("pip install not_here" in summary) == (plugin == "not_here")


def profiler_is_free():
    tf.profiler.experimental.start("")
    tf.profiler.experimental.stop(save=False)


def test_unwritable_trace_ends_no_run(tmp_path, count, caplog):
    (tmp_path / "train").write_text("in the way")
    assert run(StepProfiler(tmp_path, 0, 2), count, range(5)) == []
    assert len(caplog.records) == 1 and "cannot be written" in caplog.text and "not a directory" in caplog.text
    profiler_is_free()


def test_truncated_trace_is_removed(tmp_path, count, caplog):
    window = StepProfiler(tmp_path, 0, 5)
    make_step(window, count)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        assert window.close() is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "cannot be written" in caplog.text and "too large" in caplog.text
    assert (tmp_path / "train").is_dir() and not traces(tmp_path)
    profiler_is_free()


def test_profiler_in_use_is_left_alone(tmp_path, count, caplog):
    tf.profiler.experimental.start(str(tmp_path / "other"))
    window = StepProfiler(tmp_path, 0, 4)
    window.before(0)
    tf.profiler.experimental.stop()
    assert run(window, count, range(1, 5)) == []
    assert len(caplog.records) == 1 and "Another profiler is running" in caplog.text
    assert not traces(tmp_path) and list((tmp_path / "other").rglob("*.xplane.pb"))


@pytest.mark.parametrize("gpus", [0, 1])
def test_kernels_count_where_there_are_gpus_and_host_operations_elsewhere(tmp_path, gpus):
    """One operation begins between the steps: it does not count."""
    space = xplane_pb2.XSpace()
    host_names = ["train", "tower_0/a/MatMul:MatMul", "apply/Mul:Mul", "Some::Method", "two words"]
    steps, kernels = [(1, 1_000, 3_000), (1, 9_000, 3_000)], [(1, start, 2_000) for start in (500, 4_000, 8_500)]
    operations = [(2, 1_500, 30), (3, 1_600, 10), (3, 5_000, 999), (4, 1_700, 9), (5, 1_800, 9)]
    host = "/host:CPU", 5, host_names, steps + operations, {"metadata_id": 1, "int64_value": 7}
    gpu = "/device:GPU:0", 6, ["sgemm_128", "copy"], [*kernels, (2, 600, 10)], {"metadata_id": 2, "ref_value": 3}
    for name, nanoseconds, event_names, events, stat_of_first in (host, gpu)[: 1 + gpus]:
        plane = space.planes.add(name=name)
        for number, name in enumerate(event_names, start=1):
            plane.event_metadata[number].name = name
        for number, name in enumerate(["step_num", "tf_op", "gradient_tape/tower_0/a/MatMul:MatMul"], start=1):
            plane.stat_metadata[number].name = name
        line = plane.lines.add(timestamp_ns=nanoseconds)
        for number, picoseconds, length in events:
            event = line.events.add(metadata_id=number, offset_ps=picoseconds, duration_ps=length)
            if number == 1:
                event.stats.add(**stat_of_first)
    (tmp_path / "x.xplane.pb").write_bytes(space.SerializeToString())
    seconds_per_step, shares = read_trace(tmp_path / "x.xplane.pb")
    assert seconds_per_step == pytest.approx(3e-9)
    expected = {"backward": 1.0} if gpus else {"forward": 0.75, "apply": 0.25}
    assert shares == pytest.approx(dict.fromkeys(PARTS, 0.0) | expected)

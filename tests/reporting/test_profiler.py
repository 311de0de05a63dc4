import re
import resource
import time

import pytest
import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from cifar_towers.reporting import profiler
from cifar_towers.reporting.profiler import PARTS, OpTime, StepProfile, StepProfiler, part_of, profile_step, read_trace
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
def step(towers):
    """step(x): two towers with two products each, and a function that XLA compiles on each."""
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
    return step


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


def test_profile_has_all_operations(step):
    x = tf.ones([1600, 400])
    start = time.perf_counter()
    step(x)
    took = time.perf_counter() - start
    profile = profile_step(lambda: step(x))
    products = [op for op in profile.ops if op.op_type == "MatMul"]
    assert len(products) == 4  # two towers, forward and backward
    assert 0 < sum(op.seconds for op in products) < 20 * took
    compiled = [op for op in profile.ops if op.op_type == "XLA"]
    assert len(compiled) == 2 and all(part_of(op.name) == "forward" and op.seconds > 0 for op in compiled)
    shares = profile_step(lambda: step(x)).shares()
    assert tuple(shares) == PARTS and sum(shares.values()) == pytest.approx(1)
    assert shares["forward"] > 0.05 and shares["backward"] > 0.05 and shares["average"] > 0 and shares["apply"] > 0


def test_table_shows_a_mean_step():
    names = {"tower_0/a": 0.003, "tower_1/a": 0.003, "gradient_tape/tower_0/b": 0.002}
    ops = [OpTime(name, name[-1].upper(), seconds) for name, seconds in names.items()]
    assert StepProfile(2, 0.01, ops, on_gpu=False).table().splitlines() == [
        "forward 75.0 %  backward 25.0 %  average 0.0 %  apply 0.0 %  other 0.0 %",
        "  ms/step    share    calls  operation",
        "     3.00   75.0 %      1.0  A",
        "     1.00   25.0 %      0.5  B",
    ]
    assert "kernels  operation" in StepProfile(2, 0.01, ops, on_gpu=True).table()
    assert StepProfile(1, 0.0, [], on_gpu=False).table().startswith("forward 0.0 %")


@pytest.mark.parametrize(("types", "rows", "last"), [(13, 13, "type12"), (15, 13, "all other (3 types)")])
def test_table_sums_up_short_types(types, rows, last):
    ops = [OpTime("apply/x", f"type{number}", 0.001 * (20 - number)) for number in range(types)]
    lines = StepProfile(1, 1.0, ops, on_gpu=False).table().splitlines()[2:]
    assert len(lines) == rows and lines[0].endswith("1.0  type0") and lines[-1].endswith(last)
    assert sum(float(line.split()[0]) for line in lines) == pytest.approx(1e3 * sum(one.seconds for one in ops))


def test_window_traces_its_steps_without_evaluations_between_them(tmp_path, count):
    (summary,) = run(StepProfiler(tmp_path, 2, 5), count, range(8))
    (trace,) = traces(tmp_path)
    profile = read_trace(trace)
    assert profile.num_steps == 3 and 0 < profile.seconds < 5
    assert profile.by_op_type()["MatMul"][1] == 3 and "MatrixInverse" not in profile.by_op_type()
    assert b"MatrixInverse" in trace.read_bytes()
    lines = summary.splitlines()
    assert re.fullmatch(
        r"profile of steps 2 to 4: a step takes [\d.]+ ms, with [\d.]+ ms of operations, summed over towers and .*",
        lines[0],
    )
    assert re.search(r"^ +[\d.]+ +[\d.]+ % +3\.0  MatMul$", summary, re.MULTILINE)
    assert str(trace.parent) in lines[-1]


@pytest.mark.parametrize(
    ("steps", "which", "num_steps"),
    [
        (range(3, 9), "steps 3 to 4", 2),
        (range(4), "steps 2 to 3", 2),
        ([4], "step 4", 1),
        ([0, 1, 2, 3, 1, 2, 3, 4, 5, 2, 3, 4, 5], "steps 2 to 4", 5),  # rolled back twice
    ],
)
def test_run_that_begins_ends_or_is_rolled_back_inside_the_window(tmp_path, count, steps, which, num_steps):
    (summary,) = run(StepProfiler(tmp_path, 2, 5), count, steps)
    assert summary.startswith(f"profile of {which}: ")
    profile = read_trace(traces(tmp_path)[0])
    assert profile.num_steps == num_steps and profile.by_op_type()["MatMul"][1] == 3


@pytest.mark.parametrize("steps", [range(2), range(5, 8), []])
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
    assert window.close().startswith("profile of step 0: ") and read_trace(traces(tmp_path)[0]).num_steps == 1
    assert window.after(2) is None and window.close() is None


@pytest.mark.parametrize(("plugin", "how"), [("json", "tensorboard --logdir={}"), ("not_here", "pip install xprof")])
def test_summary_ends_with_how_to_view_the_trace(tmp_path, count, monkeypatch, plugin, how):
    monkeypatch.setattr(profiler, "PLUGIN", plugin)
    (summary,) = run(StepProfiler(tmp_path, 0, 1), count, range(1))
    assert summary.endswith(how.format(tmp_path))


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


def test_removed_directory_is_made_again(tmp_path, count):
    (tmp_path / "train").mkdir()
    window = StepProfiler(tmp_path, 0, 2)
    make_step(window, count)
    (tmp_path / "train").rmdir()
    assert "MatMul" in window.close() and traces(tmp_path)


def test_gpu_kernels_belong_to_their_operations(tmp_path):
    space = xplane_pb2.XSpace()
    host, gpu = space.planes.add(name="/host:CPU"), space.planes.add(name="/device:GPU:0")
    on_host = ["train", "tower_0/dense/MatMul:MatMul", "apply/Mul:Mul"]
    for plane, names in ((host, on_host), (gpu, ["sgemm_128", "copy"])):
        for number, name in enumerate(names, start=1):
            plane.event_metadata[number].name = name
        for number, name in enumerate(["step_num", "tf_op", "tower_0/dense/MatMul:MatMul"], start=1):
            plane.stat_metadata[number].name = name
    thread, stream = host.lines.add(timestamp_ns=5), gpu.lines.add(timestamp_ns=6)
    for start in (1_000, 9_000):  # picoseconds; the second kernel runs between the steps
        mark = thread.events.add(metadata_id=1, offset_ps=start, duration_ps=3_000)
        mark.stats.add(metadata_id=1, int64_value=7)
    thread.events.add(metadata_id=2, offset_ps=1_500, duration_ps=10)  # launches a kernel
    thread.events.add(metadata_id=3, offset_ps=1_600, duration_ps=20)  # is done by the host
    for start in (500, 4_000, 8_500):
        kernel = stream.events.add(metadata_id=1, offset_ps=start, duration_ps=2_000)
        kernel.stats.add(metadata_id=2, ref_value=3)
    stream.events.add(metadata_id=2, offset_ps=600, duration_ps=10)
    (tmp_path / "x.xplane.pb").write_bytes(space.SerializeToString())
    profile = read_trace(tmp_path / "x.xplane.pb")
    ops = [OpTime("tower_0/dense/MatMul", "MatMul", 2e-9)] * 2 + [OpTime("apply/Mul", "Mul", 2e-11)]
    assert profile == StepProfile(2, pytest.approx(6e-9), ops, on_gpu=True)

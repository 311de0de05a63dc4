import pytest
import tensorflow as tf

from cifar_towers.reporting.profiler import StepProfiler


def run(profiler, steps):
    for step in steps:
        profiler.before(step)
        tf.linalg.inv(tf.random.uniform([3, 3]))
        profiler.after(step + 1)
    profiler.close()


@pytest.mark.parametrize(("steps", "num_traces"), [(range(8), 1), (range(4), 1), (range(2), 0), (range(3, 8), 0)])
def test_trace_of_the_steps_that_are_profiled(tmp_path, steps, num_traces):
    run(StepProfiler(tmp_path, 2, 5), steps)
    traces = list(tmp_path.glob("train/plugins/profile/*/*.xplane.pb"))
    assert len(traces) == num_traces and all(b"MatrixInverse" in trace.read_bytes() for trace in traces)


def test_profile_that_cannot_be_written_is_one_warning(tmp_path, caplog):
    (tmp_path / "train").write_text("in the way")
    run(StepProfiler(tmp_path, 0, 2), range(4))
    assert len(caplog.records) == 1 and "no profile in" in caplog.text
    run(StepProfiler(tmp_path / "other", 0, 2), range(4))  # the profiler is free
    assert list(tmp_path.glob("other/train/plugins/profile/*/*.xplane.pb"))

from types import SimpleNamespace

import pytest

from cifar_towers.benchmark import peak_flops

CONVOLUTION = 2 * 8 * 8 * 8 * 9 * 32 * 64  # of the smaller shapes here
MATMUL = 2 * 256**3


@pytest.fixture
def clock(monkeypatch):
    """clock(seconds): a machine on which the timed runs take so long, one after another, and the last for ever."""
    monkeypatch.setattr(peak_flops, "CONVOLUTIONS", (((8, 8, 8, 32), (3, 3, 32, 64)),))
    monkeypatch.setattr(peak_flops, "SIDE", 256)

    def tick(*seconds):
        left, readings = list(seconds), [0.0]

        def read():
            if len(readings) % 2 == 0:  # the end of a run
                readings.append(readings[-1] + (left.pop(0) if len(left) > 1 else left[0]))
            else:
                readings.append(readings[-1])
            return readings[-1]

        monkeypatch.setattr(peak_flops, "time", SimpleNamespace(perf_counter=read))

    return tick


def test_a_rate_is_the_counted_operations_over_the_time_of_a_run(clock):
    clock(0.125)
    found = peak_flops.measure("float32", seconds=0.0)
    assert found == (CONVOLUTION / 0.125 / 1e9, MATMUL / 0.125 / 1e9)
    assert peak_flops.measure("float32", seconds=0.0, gpus=3) == tuple(3 * rate for rate in found)


def test_the_fastest_run_counts_and_short_ones_hold_several_calls(clock):
    """After one that is not timed, one call is too short, and so are two; of runs of four the third is the fastest."""
    convolution = [9.0, 0.015625, 0.03125, 0.0625, 0.25, 0.5, 0.125]
    matmul = [9.0, 0.5, 0.25, 0.5, 0.75]
    clock(*convolution, *matmul)
    found = peak_flops.measure("float32", seconds=0.0)
    assert found == (4 * CONVOLUTION / 0.125 / 1e9, MATMUL / 0.25 / 1e9)


def test_it_is_measured_for_as_long_as_it_may_take(clock):
    """1.95 s of convolutions: eight runs of a quarter of a second, of which the last is the fastest."""
    runs = [9.0, 0.25, *[0.25] * 7, 0.2421875]
    clock(*runs, 1.0)
    assert peak_flops.measure("float32", seconds=3.9).convolution == CONVOLUTION / 0.2421875 / 1e9

import itertools
from types import SimpleNamespace

import pytest

from scripts.speedrun import peak

CONVOLUTION = 2 * 8 * 8 * 8 * 9 * 32 * 64  # operations of the smaller shapes here
MATMUL = 2 * 256**3


@pytest.fixture
def set_run_seconds(monkeypatch):
    """set_run_seconds(seconds): the timed runs take these times, one after another; the last is repeated."""
    monkeypatch.setattr(peak, "CONVOLUTIONS", (((8, 8, 8, 32), (3, 3, 32, 64)),))
    monkeypatch.setattr(peak, "MATRIX_SIZE", 256)

    def set_seconds(*seconds):
        repeated = itertools.chain(seconds, itertools.repeat(seconds[-1]))
        clock = itertools.accumulate(passed for duration in repeated for passed in (0.0, duration))
        monkeypatch.setattr(peak, "time", SimpleNamespace(perf_counter=lambda: next(clock)))

    return set_seconds


def test_fastest_run_counts_and_short_runs_have_several_calls(set_run_seconds):
    """After the warm-up, one and two calls are too short; of runs of four calls the third is the fastest."""
    convolution = [9.0, 0.015625, 0.03125, 0.0625, 0.25, 0.5, 0.125]
    matmul = [9.0, 0.5, 0.25, 0.5, 0.75]
    set_run_seconds(*convolution, *matmul)
    rates = peak.measure("float32", seconds=0.0)
    assert rates == {"convolution": 4 * CONVOLUTION / 0.125 / 1e9, "matmul": MATMUL / 0.25 / 1e9}
    set_run_seconds(0.125)
    assert peak.measure("float32", seconds=0.0, gpus=3)["matmul"] == pytest.approx(3 * MATMUL / 0.125 / 1e9)


def test_measuring_takes_the_given_seconds(set_run_seconds):
    """1.95 s of convolutions: eight runs of a quarter of a second, of which the last is the fastest."""
    set_run_seconds(9.0, 0.25, *[0.25] * 7, 0.2421875, 1.0)
    assert peak.measure("float32", seconds=3.9)["convolution"] == CONVOLUTION / 0.2421875 / 1e9

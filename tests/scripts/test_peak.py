import itertools
from types import SimpleNamespace

import pytest

from scripts.speedrun import peak

CONVOLUTION = 2 * 8 * 8 * 8 * 9 * 32 * 64  # operations of the smaller shapes here
MATMUL = 2 * 256**3


def test_fastest_run_counts_and_short_runs_have_several_calls(monkeypatch):
    """After the warm-up, one and two calls are too short; of runs of four calls the third is the fastest."""
    monkeypatch.setattr(peak, "CONVOLUTIONS", (((8, 8, 8, 32), (3, 3, 32, 64)),))
    monkeypatch.setattr(peak, "MATRIX_SIZE", 256)
    convolution = [9.0, 0.015625, 0.03125, 0.0625, 0.25, 0.5, 0.125]
    matmul = [9.0, 0.5, 0.25, 0.5, 0.75]
    clock = itertools.accumulate(passed for duration in convolution + matmul for passed in (0.0, duration))
    monkeypatch.setattr(peak, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    rates = peak.measure("float32", seconds=0.0, gpus=3)
    assert rates == pytest.approx({"convolution": 3 * 4 * CONVOLUTION / 0.125 / 1e9, "matmul": 3 * MATMUL / 0.25 / 1e9})

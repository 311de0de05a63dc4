"""Measurements of this machine: `scripts/benchmark.py` and `scripts/speedrun.py`."""

"""Placements, strategies and numbers of towers, measured on the machine at hand: `scripts/benchmark.py`."""

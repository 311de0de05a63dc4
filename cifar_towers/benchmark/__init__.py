"""Every way to place and combine, measured on the machine at hand: `scripts/benchmark.py`."""

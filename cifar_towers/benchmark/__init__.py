"""What is measured on the machine at hand: `scripts/benchmark.py` and `scripts/speedrun.py`."""

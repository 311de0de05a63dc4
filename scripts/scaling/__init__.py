"""A cost model of synchronous steps on machines we do not have: `python -m scripts.scaling` and `.table`."""

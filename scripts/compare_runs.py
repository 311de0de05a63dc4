#!/usr/bin/env python3
"""A comparison of two runs, to the bit: `compare_runs.py runs/a runs/b`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cifar_towers.cli.main import compare_runs

if __name__ == "__main__":
    compare_runs()

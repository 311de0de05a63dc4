#!/usr/bin/env python3
"""Placements, strategies and numbers of towers, measured here: `benchmark.py --recipe=speed94 --towers=1,2,4`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cifar_towers.cli.main import benchmark

if __name__ == "__main__":
    benchmark()

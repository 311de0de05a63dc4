#!/usr/bin/env python3
"""A table of runs, the best of a recipe, and their removal: `runs.py 'speed94*' --sort=accuracy`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cifar_towers.cli.main import runs

if __name__ == "__main__":
    runs()

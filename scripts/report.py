#!/usr/bin/env python3
"""One HTML page about some runs: `report.py runs/speed94-seed0 runs/speed94-seed1 --out=speed94.html`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cifar_towers.cli.main import report

if __name__ == "__main__":
    report()

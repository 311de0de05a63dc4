#!/usr/bin/env python3
"""Times a recipe over seeds: `speedrun.py --recipe=speed94 --target=0.94 --seeds=0,1,2`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cifar_towers.cli.main import speedrun

if __name__ == "__main__":
    speedrun()

#!/usr/bin/env python3
"""Several local workers, restarted when one is lost: `launch.py --num_workers=2 -- --seed=1`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cifar_towers.cli.main import launch

if __name__ == "__main__":
    launch()

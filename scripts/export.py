#!/usr/bin/env python3
"""A trained model for use elsewhere: `export.py --train_dir=runs/speed94-seed0 --format=saved_model`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cifar_towers.cli.main import export

if __name__ == "__main__":
    export()

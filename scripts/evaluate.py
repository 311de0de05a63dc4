#!/usr/bin/env python3
"""The score of a run's checkpoint: `evaluate.py --train_dir=runs/speed94-seed0 --tta=2`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cifar_towers.cli.main import evaluate

if __name__ == "__main__":
    evaluate()

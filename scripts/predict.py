#!/usr/bin/env python3
"""The classes of image files: `predict.py --train_dir=runs/speed94-seed0 picture.jpg folder/`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cifar_towers.cli.main import predict

if __name__ == "__main__":
    predict()

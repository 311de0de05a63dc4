#!/usr/bin/env python3
"""The training of a net on towers, as `cifar-towers train`: `train.py --recipe=speed94
--num_gpus=2`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cifar_towers.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))

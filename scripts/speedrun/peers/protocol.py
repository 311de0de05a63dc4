"""Flags and protocol of all peers, over standard input and output. Needs NumPy only.

A peer warms up and prints the number of parameters that it trains. For each input line with a number it makes that
many steps and prints the seconds of each as a JSON list, until the input ends.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

WARM_UP_STEPS = 2  # one that traces and compiles, and one more


def make_parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the flags that the comparison gives all peers; a peer may add its own."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch_size", type=int, required=True, help="images per step, or per tower")
    parser.add_argument("--precision", required=True, help="float32 or bfloat16")
    parser.add_argument("--data", type=Path, required=True, help="file of the arrays that `load` returns")
    return parser


def load(path: Path) -> dict[str, np.ndarray]:
    """Load the arrays of a file: `images` [N, H, W, 3] float32, `labels` [N] int64, `raw` [N, 32, 32, 3] uint8."""
    with np.load(path) as file:
        return {name: file[name] for name in ("images", "labels", "raw")}


def serve(run: Callable[[int], Iterable[float]], trained: int) -> None:
    """Serve requests until the input ends.

    Args:
      run: makes n steps and yields the seconds of each.
      trained: number of parameters that a step trains.
    """
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps the output free of what libraries print
    list(run(WARM_UP_STEPS))
    print(trained, file=output, flush=True)
    for request in sys.stdin:
        print(json.dumps(list(run(int(request)))), file=output, flush=True)

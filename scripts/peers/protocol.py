"""How a peer is asked to run: the same few flags, and orders on its standard input. Needs NumPy alone.

A peer warms up, says `ready` and how many numbers its steps train, and then for each line with a number makes that
many steps and answers with the seconds of each, as a JSON list. An empty line, or the end of its input, ends it. With
--steps=N it does one such visit by itself and prints images/s.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

WARM_UP = 2  # steps before it is ready: tracing and compiling, and one more


def parser(description: str) -> argparse.ArgumentParser:
    """What all peers understand; a peer adds what is its own."""
    made = argparse.ArgumentParser(description=description, allow_abbrev=False)
    made.add_argument("--model", default="speednet94", help="speednet94, resnet20, cifarnet; not every peer has all")
    made.add_argument("--batch_size", type=int, default=128, help="images of a step (of each tower, if there are any)")
    made.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    made.add_argument(
        "--data", type=Path, required=True, help=".npz: `images` as a net sees them, `labels`, `raw` uint8"
    )
    made.add_argument("--steps", type=int, default=0, help="make so many, print images/s and leave; 0: wait for orders")
    return made


def load(path: Path, batch_size: int) -> dict[str, np.ndarray]:
    """The arrays of a file: `images` [N, H, W, 3] float32, `labels` [N] int64, `raw` [N, 32, 32, 3] uint8."""
    with np.load(path) as file:
        arrays = {name: file[name] for name in ("images", "labels", "raw")}
    if len(arrays["labels"]) < batch_size:
        leave(f"--batch_size={batch_size} is more than the {len(arrays['labels'])} images in {path}; give fewer")
    return arrays


def serve(run: Callable[[int], Iterable[float]], images: int, steps: int, trained: int) -> None:
    """Answers until it gets nothing; or makes `steps`. `run(n)` makes n steps of `images`, which train so many numbers,
    and gives the seconds of each."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    list(run(WARM_UP))
    if steps:
        print(f"{images / statistics.median(run(steps)):,.1f} images/s", file=answers, flush=True)
        return
    print(f"ready {trained}", file=answers, flush=True)
    for order in iter(sys.stdin.readline, ""):
        if not order.strip():
            return
        print(json.dumps(list(run(int(order)))), file=answers, flush=True)


def leave(why: str) -> None:
    """Ends the program with one line."""
    print(why, file=sys.stderr)
    sys.exit(2)

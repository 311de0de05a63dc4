#!/usr/bin/env python3
"""A comparison of two git revisions: are the losses and weights of small runs the same to the bit?

  compare_revisions.py main~3                                  against HEAD
  compare_revisions.py v1.0 my-branch --runs=mirrored,resume   two revisions, some of the runs
  compare_revisions.py main --keep=/tmp/revisions              stores results by commit: each commit trains once

Uncommitted changes are left out. Exit codes: 0 all runs are the same, 1 a run differs or failed, 2 usage.
"""

import argparse
import contextlib
import hashlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

REPOSITORY = Path(__file__).resolve().parents[1]
TIMEOUT_SECONDS = 600  # of one process
IMAGES = {"train": 320, "test": 40}  # 10 steps an epoch, so that 12 steps reach the second
COMMON = """--precision=float32 --seed=0 --batch_size=32 --epochs=3 --eval_every_epochs=0 --whitening_images=320
    --summary_every_steps=10 --checkpoint_every_steps=1 --keep_checkpoints=100"""
CIFARNET = "--model=cifarnet --crop=24 --flip=random --brightness=63 --standardize=image"
SPEEDNET = "--nesterov --label_smoothing=0.1 --bias_learning_rate=1 --whitening_epochs=0.5 --weight_decay=1e-3"
RUNS = {  # flags that both revisions have
    "cifarnet-1-tower": f"{CIFARNET} --num_gpus=1",
    "cifarnet-2-towers": f"{CIFARNET} --num_gpus=2 --max_nonfinite_steps=2",
    "speednet93-ema": f"--model=speednet93 {SPEEDNET} --ema_decay=0.9 --lookahead --tta=2 --num_gpus=1",
    "speednet94-muon": f"""--model=speednet94 {SPEEDNET} --optimizer=muon --image_size_schedule=0=24,40%=32
        --hard_example_pool=64 --num_gpus=2""",
    "resnet20-synchronized": "--model=resnet20 --batch_statistics=synchronized --shift=4 --num_gpus=2",
    "mirrored": f"--model=speednet93 {SPEEDNET} --strategy=mirrored --num_gpus=2",
    "pipeline": "--model=resnet20 --parallelism=model --micro_batches=2 --num_gpus=2",
    "resume": "--model=speednet93 --ema_decay=0.9 --lookahead --cutout=4 --num_gpus=1",
}
MAX_STEPS = {"resume": (7, 12)}  # one process each, in one train_dir: the second resumes in the middle of an epoch
RECORDED = {  # keys, by kind of record
    "train": ("loss", "gradient_norm", "learning_rate"),
    "eval": ("loss", "accuracy"),
}


def main(arguments: list[str] | None = None) -> int:
    """Print a row for each run, and return the exit code."""
    args = parse_arguments(arguments)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _: sys.exit(128 + received))  # worktrees are removed on the way out
    with tempfile.TemporaryDirectory(prefix="compare-revisions-") as directory, contextlib.ExitStack() as stack:
        write_images(Path(directory, "images"))
        for commit in {args.first, args.second}:
            stack.enter_context(check_out(commit, Path(directory)))
        print(f"comparing {args.first[:12]} with {args.second[:12]}")
        print(f"{'run':<22} {'steps':>5}  {'losses':<32}  {'weights':<56}  seconds", flush=True)
        same = [compare_run(name, args.first, args.second, Path(directory), args.keep) for name in args.runs]
    return 0 if all(same) else 1


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the commits to compare, the names of the runs, and the directory to keep results in."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: parser.exit(2, f"compare_revisions.py: {message}; see --help\n")
    parser.add_argument("first", type=resolve_commit, help="a git revision")
    parser.add_argument("second", type=resolve_commit, nargs="?", default="HEAD", help="another [%(default)s]")
    parser.add_argument("--runs", type=lambda text: text.split(","), default=list(RUNS), help=", ".join(RUNS))
    parser.add_argument("--keep", type=Path, help="directory of results by commit, of this machine only")
    args = parser.parse_args(arguments)
    if unknown := sorted(set(args.runs) - RUNS.keys()):
        parser.error(f"there is no run {unknown[0]!r}; the runs are {', '.join(RUNS)}")
    return args


def resolve_commit(revision: str) -> str:
    """Return the full hash of a revision's commit."""
    try:
        return git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    except subprocess.CalledProcessError:
        raise argparse.ArgumentTypeError(f"{revision!r} is not a revision of {REPOSITORY}") from None


@contextlib.contextmanager
def check_out(commit: str, directory: Path) -> Iterator[None]:
    """Check a commit out in the worktree `directory`/<commit>, which is removed at the end."""
    git("worktree", "add", "--detach", str(directory / commit), commit)
    try:
        yield
    finally:
        git("worktree", "remove", "--force", str(directory / commit))


def compare_run(name: str, first: str, second: str, directory: Path, keep: Path | None) -> bool:
    """Print the row of a run, and return whether it is the same at both commits."""
    results = []
    for number, commit in enumerate((first, second)):
        # a commit compared with itself is trained twice: is training deterministic?
        kept = None if number and first == second else keep
        try:
            results.append(load_or_train(name, commit, directory, directory / f"run{number}", kept))
        except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
            print(f"{name:<22}     -  failed at {commit[:12]}: {error}", flush=True)
            return False
    losses, weights = (first_difference(*(result[kind] for result in results)) for kind in ("losses", "weights"))
    steps, seconds = len(results[0]["losses"]), "  ".join(f"{result['seconds']:3.0f}" for result in results)
    print(f"{name:<22} {steps:>5}  {losses or 'same':<32}  {weights or 'same':<56}  {seconds}", flush=True)
    return not losses and not weights


def first_difference(first: dict[str, dict], second: dict[str, dict]) -> str:
    """Name the first step, and its first value, that differ between two mappings step -> name -> value.

    The name is empty if nothing differs.
    """
    for step in sorted(first.keys() | second.keys(), key=int):
        one, other = first.get(step, {}), second.get(step, {})
        for name in one | other:
            if name not in one or name not in other:
                return f"from step {step}: {name} only at {'first' if name in one else 'second'}"
            if repr(one[name]) != repr(other[name]):  # not `!=`: NaN equals NaN
                return f"from step {step}: {name}"
    return ""


def load_or_train(name: str, commit: str, directory: Path, output: Path, keep: Path | None) -> dict[str, Any]:
    """Return a run's losses, weights and seconds: those that `keep` has of the same command, or else by training."""
    made_by = [COMMON, RUNS[name], str(MAX_STEPS.get(name)), str(IMAGES), importlib.metadata.version("tensorflow")]
    path = keep.resolve() / commit / f"{name}.json" if keep else None
    if path and path.exists() and (stored := json.loads(path.read_text()))["made_by"] == made_by:
        return stored
    train_dir, start = output / name, time.monotonic()
    flags = [*COMMON.split(), *RUNS[name].split()]
    flags += [f"--dataset=folder:{directory / 'images'}", f"--train_dir={train_dir}"]
    for max_steps in MAX_STEPS.get(name, (12,)):
        train(directory / commit, output / "cache", [*flags, f"--max_steps={max_steps}"])
    result = {"made_by": made_by, "seconds": time.monotonic() - start, **read_run(train_dir)}
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(result))
        partial.replace(path)
    return result


def train(worktree: Path, cache: Path, flags: list[str]) -> None:
    """Run `scripts/train.py` of a worktree on the CPU, with its own cache of prepared data.

    Raises:
      RuntimeError: the program failed, as with a flag that the revision does not have; the message is its last line.
    """
    own = {"PYTHONPATH": str(worktree), "PYTHONDONTWRITEBYTECODE": "1", "CUDA_VISIBLE_DEVICES": "-1"}
    environment = os.environ | own | {"XDG_CACHE_HOME": str(cache)}
    command = [sys.executable, str(worktree / "scripts/train.py"), *flags]
    program = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    if program.returncode:
        lines = (program.stderr or program.stdout or "no message").strip().splitlines()
        raise RuntimeError(f"exit code {program.returncode}: {lines[-1]}")


def read_run(train_dir: Path) -> dict[str, dict[str, dict]]:
    """Read what a run wrote, by step and name: its `losses`, and the SHA-256 of its `weights` and other variables.

    Raises:
      RuntimeError: the run wrote no training records or no checkpoints.
    """
    tf = import_tensorflow()
    losses, weights = {}, {}
    for record in map(json.loads, (train_dir / "metrics.jsonl").read_text().splitlines()):
        values = losses.setdefault(str(record["step"]), {})
        keys = RECORDED.get(record["kind"], ())
        if missing := set(keys) - record.keys():
            raise RuntimeError(f"a {record['kind']} record of {train_dir} has no {', '.join(sorted(missing))}")
        if record["kind"] == "train":
            values |= {key: record[key] for key in keys}
        elif record["kind"] == "eval":  # several at a step: raw and averaged weights
            values[f"evaluation {len(values)}"] = [record[key] for key in keys]
    for checkpoint in sorted((train_dir / "checkpoints").glob("step-*")):
        reader = tf.train.load_checkpoint(str(checkpoint / "state"))
        values = weights[str(int(checkpoint.name.removeprefix("step-")))] = {}
        for name in sorted(reader.get_variable_to_shape_map().keys() - {"_CHECKPOINTABLE_OBJECT_GRAPH"}):
            tensor = np.asarray(reader.get_tensor(name))
            content = f"{tensor.dtype} {tensor.shape} ".encode() + tensor.tobytes()
            values[name.removesuffix("/.ATTRIBUTES/VARIABLE_VALUE")] = hashlib.sha256(content).hexdigest()
    if not losses or not weights:
        raise RuntimeError(f"{train_dir} holds no {'checkpoints' if losses else 'records'}")
    result = json.loads((train_dir / "result.json").read_text())
    weights[max(weights, key=int)]["weights_sha256"] = result["weights_sha256"]
    return {"losses": losses, "weights": weights}


def import_tensorflow() -> Any:
    """Import TensorFlow without showing what it logs meanwhile, and return the module."""
    stderr = os.dup(2)
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), 2)
    try:
        import tensorflow as tf
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
    return tf


def write_images(root: Path) -> None:
    """Write random blurred images in ten classes, for `--dataset=folder:`; the same each time."""
    generator = np.random.default_rng(0)
    for split, count in IMAGES.items():
        for index in range(count):
            path = root / split / f"class{index % 10}" / f"{index:03d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(generator.integers(0, 256, (8, 8, 3), dtype=np.uint8)).resize((32, 32)).save(path)


def git(*arguments: str) -> str:
    """Run git, and return what it prints, without the end of the line."""
    command = ["git", "-C", str(REPOSITORY), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.rstrip()


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Trains small runs at two git revisions and checks that losses and weights are the same to the bit.

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
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

REPOSITORY = Path(__file__).resolve().parents[1]
TIMEOUT_SECONDS = 600  # of one process
IMAGES = {"train": 320, "test": 40}  # 10 steps an epoch, so that 12 steps reach the second
COMMON = """--precision=float32 --seed=0 --batch_size=32 --epochs=3 --eval_every_epochs=0 --whitening_images=320
    --summary_every_steps=10 --checkpoint_every_steps=1 --keep_checkpoints=100"""
CIFARNET = "--model=cifarnet --crop=24 --flip=random --brightness=63 --standardize=image"
SPEEDNET = "--nesterov --label_smoothing=0.1 --bias_learning_rate=1 --whitening_epochs=0.5 --weight_decay=1e-3"
RUNS = {  # flags by their newest names
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
EARLIER_NAMES = {  # of renamed flags, by the newest name: what earlier revisions call them
    "max_nonfinite_steps": "max_bad_steps",
    "image_size_schedule": "image_sides",
    "hard_example_pool": "hardest_of",
    "intra_op_threads": "threads_per_op",
    "overwrite": "fresh",
    "allow_changed_data": "changed_data",
}


class Revision(NamedTuple):
    """A commit that is checked out in `directory`/worktree, and the flags that its `train.py` has."""

    commit: str
    directory: Path
    flags: set[str]


def main(arguments: list[str] | None = None) -> int:
    """Prints a row for each run; returns the exit code."""
    args = parse_arguments(arguments)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _: sys.exit(128 + received))  # worktrees are removed on the way out
    with tempfile.TemporaryDirectory(prefix="compare-revisions-") as directory, contextlib.ExitStack() as stack:
        write_images(Path(directory, "images"))
        revisions = [
            stack.enter_context(check_out(commit, Path(directory, name)))
            for name, commit in (("first", args.first), ("second", args.second))
        ]
        print(f"comparing {args.first[:12]} with {args.second[:12]}")
        print(f"{'run':<22} {'steps':>5}  {'losses':<32}  {'weights':<56}  seconds", flush=True)
        same = [compare_run(name, revisions, args.keep) for name in args.runs]
    return 0 if all(same) else 1


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The commits to compare, the names of the runs, and the directory to keep results in."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: parser.exit(2, f"compare_revisions.py: {message}; see --help\n")
    parser.add_argument("first", type=resolve_commit, help="a git revision")
    parser.add_argument("second", type=resolve_commit, nargs="?", default="HEAD", help="another [%(default)s]")
    parser.add_argument("--runs", type=lambda text: text.split(","), default=list(RUNS), help=", ".join(RUNS))
    parser.add_argument("--keep", type=Path, help="directory to keep results in, by commit; for this machine only")
    args = parser.parse_args(arguments)
    if unknown := sorted(set(args.runs) - RUNS.keys()):
        parser.error(f"there is no run {unknown[0]!r}; the runs are {', '.join(RUNS)}")
    return args


def resolve_commit(revision: str) -> str:
    """The full hash of a revision's commit."""
    try:
        return git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    except subprocess.CalledProcessError:
        raise argparse.ArgumentTypeError(f"{revision!r} is not a revision of {REPOSITORY}") from None


@contextlib.contextmanager
def check_out(commit: str, directory: Path) -> Iterator[Revision]:
    """Check a commit out in a worktree that is removed at the end."""
    worktree = directory / "worktree"
    git("worktree", "add", "--detach", str(worktree), commit)
    try:
        try:
            text = run_train_program(directory, ["--helpfull"])
        except RuntimeError as error:
            sys.exit(f"compare_revisions.py: train.py --helpfull fails at {commit[:12]}: {error}")
        yield Revision(commit, directory, set(re.findall(r"^ +--(?:\[no\])?(\w+)", text, re.M)))
    finally:
        git("worktree", "remove", "--force", str(worktree))


def compare_run(name: str, revisions: list[Revision], keep: Path | None) -> bool:
    """Whether a run is the same at both revisions; prints its row."""
    results = []
    for revision in revisions:
        repeated = revision is revisions[1] and revision.commit == revisions[0].commit
        try:  # a commit compared with itself is trained twice: is training deterministic?
            results.append(load_or_train(name, revision, None if repeated else keep))
        except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
            print(f"{name:<22}     -  failed at {revision.commit[:12]}: {error}", flush=True)
            return False
    losses, weights = (first_difference(*(result[kind] for result in results)) for kind in ("losses", "weights"))
    steps, seconds = len(results[0]["losses"]), "  ".join(f"{result['seconds']:3.0f}" for result in results)
    print(f"{name:<22} {steps:>5}  {losses or 'same':<32}  {weights or 'same':<56}  {seconds}", flush=True)
    return not losses and not weights


def first_difference(first: dict[str, dict], second: dict[str, dict]) -> str:
    """The first step, and its first value, that differ between two mappings step -> name -> value; else empty."""
    for step in sorted(first.keys() | second.keys(), key=int):
        one, other = first.get(step, {}), second.get(step, {})
        for name in one | other:
            if name not in one or name not in other:
                return f"from step {step}: {name} only at {'first' if name in one else 'second'}"
            if repr(one[name]) != repr(other[name]):  # not `!=`: NaN equals NaN
                return f"from step {step}: {name}"
    return ""


def load_or_train(name: str, revision: Revision, keep: Path | None) -> dict[str, Any]:
    """A run's losses, weights and seconds: from `keep` if stored there by the same command, else by training."""
    made_by = [COMMON, RUNS[name], str(MAX_STEPS.get(name)), str(IMAGES), importlib.metadata.version("tensorflow")]
    path = keep.resolve() / revision.commit / f"{name}.json" if keep else None
    if path and path.exists() and (stored := json.loads(path.read_text()))["made_by"] == made_by:
        return stored
    train_dir, start = revision.directory / name, time.monotonic()
    flags = translate_flags([*COMMON.split(), *RUNS[name].split()], revision.flags)
    flags += [f"--dataset=folder:{revision.directory.parent / 'images'}", f"--train_dir={train_dir}"]
    for max_steps in MAX_STEPS.get(name, (12,)):
        run_train_program(revision.directory, [*flags, f"--max_steps={max_steps}"])
    result = {"made_by": made_by, "seconds": time.monotonic() - start, **read_run(train_dir)}
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(result))
        partial.replace(path)
    return result


def translate_flags(flags: Iterable[str], known: set[str]) -> list[str]:
    """Flags by the names that a revision has: the newest, or else the earlier one."""
    translated = []
    for flag in flags:
        name, equals, value = flag.removeprefix("--").partition("=")
        earlier = EARLIER_NAMES.get(name)
        translated.append(f"--{earlier if name not in known and earlier in known else name}{equals}{value}")
    return translated


def run_train_program(directory: Path, flags: list[str]) -> str:
    """What `scripts/train.py` of the worktree prints, on the CPU and with a cache of prepared data of its own."""
    own = {"PYTHONPATH": str(directory / "worktree"), "PYTHONDONTWRITEBYTECODE": "1", "CUDA_VISIBLE_DEVICES": "-1"}
    command = [sys.executable, str(directory / "worktree/scripts/train.py"), *flags]
    environment = os.environ | own | {"XDG_CACHE_HOME": str(directory / "cache")}
    program = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    if program.returncode:
        lines = (program.stderr or program.stdout or "no message").strip().splitlines()
        raise RuntimeError(f"exit code {program.returncode}: {lines[-1]}")
    return program.stdout


def read_run(train_dir: Path) -> dict[str, dict[str, dict]]:
    """What a run wrote, each step -> name -> value: its `losses`, and the SHA-256 of its `weights` and other variables.

    Raises:
      RuntimeError: it wrote no training records or no checkpoints.
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
    """The module; what it logs while it is imported is not shown."""
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
    """Random blurred images in ten classes, for `--dataset=folder:`; the same each time."""
    generator = np.random.default_rng(0)
    for split, count in IMAGES.items():
        for index in range(count):
            path = root / split / f"class{index % 10}" / f"{index:03d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(generator.integers(0, 256, (8, 8, 3), dtype=np.uint8)).resize((32, 32)).save(path)


def git(*arguments: str) -> str:
    """What git prints, without the end of the line."""
    command = ["git", "-C", str(REPOSITORY), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.rstrip()


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""A comparison of two git revisions: are the losses and weights of small runs the same to the bit?

  compare_revisions.py main~3                                  against HEAD
  compare_revisions.py v1.0 my-branch --runs=mirrored,resume   two revisions, some of the runs
  compare_revisions.py main --keep=/tmp/revisions              each commit trains once

Uncommitted changes are left out. Exit codes: 0 all runs are the same, 1 a run differs or failed, 2
usage.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cifar_towers import files
from cifar_towers.errors import RunError
from cifar_towers.inference.compare import COMPARED, compare_runs, record_key
from cifar_towers.reporting.records import read_records

REPOSITORY = Path(__file__).resolve().parents[1]
TIMEOUT_SECONDS = 600  # of one process
IMAGES = {"train": 320, "test": 40}  # 10 steps an epoch, so that 12 steps reach the second
COMMON = """--precision=float32 --seed=0 --batch_size=32 --epochs=3 --eval_every_epochs=0
    --whitening_images=320 --summary_every_steps=10 --checkpoint_every_steps=1
    --keep_checkpoints=100"""
CIFARNET = "--model=cifarnet --crop=24 --flip=random --brightness=63 --standardize=image"
SPEEDNET = """--nesterov --label_smoothing=0.1 --bias_learning_rate=1 --whitening_epochs=0.5
    --weight_decay=1e-3"""
RUNS = {  # flags that both revisions have
    "cifarnet-1-tower": f"{CIFARNET} --num_gpus=1",
    "cifarnet-2-towers": f"{CIFARNET} --num_gpus=2",
    "speednet93-ema": f"""--model=speednet93 {SPEEDNET} --ema_decay=0.9 --lookahead --tta
        --num_gpus=1""",
    "speednet94-muon": f"""--model=speednet94 {SPEEDNET} --optimizer=muon
        --image_size_schedule=0=24,40%=32 --hard_example_pool=64 --num_gpus=2""",
    "resnet20-synchronized": """--model=resnet20 --batch_statistics=synchronized --shift=4
        --num_gpus=2""",
    "mirrored": f"--model=speednet93 {SPEEDNET} --strategy=mirrored --num_gpus=2",
    "resume": "--model=speednet93 --ema_decay=0.9 --lookahead --cutout=4 --num_gpus=1",
}
MAX_STEPS = {
    "resume": (7, 12)
}  # one process each, in one train_dir: the second resumes in the middle of an epoch


def main(arguments: list[str] | None = None) -> int:
    """Print the comparison of each run, and return the exit code."""
    args = parse_arguments(arguments)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(
            number, lambda received, _: sys.exit(128 + received)
        )  # worktrees are removed on the way out
    with (
        tempfile.TemporaryDirectory(prefix="compare-revisions-") as directory,
        contextlib.ExitStack() as stack,
    ):
        worktrees = [Path(directory, commit) for commit in (args.first, args.second)]
        for worktree in {*worktrees}:
            stack.enter_context(check_out(worktree))
        print(f"comparing {args.first[:12]} with {args.second[:12]}", flush=True)
        keep = args.keep or Path(directory, "runs")
        write_images(keep / "images")
        same = [compare_run(name, *worktrees, keep) for name in args.runs]
    return 0 if all(same) else 1


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the commits to compare, the names of the runs, and the directory to keep runs in."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.error = lambda message: parser.exit(2, f"compare_revisions.py: {message}; see --help\n")
    parser.add_argument("first", type=resolve_commit, help="a git revision")
    parser.add_argument(
        "second", type=resolve_commit, nargs="?", default="HEAD", help="another [%(default)s]"
    )
    parser.add_argument(
        "--runs", type=lambda text: text.split(","), default=list(RUNS), help=", ".join(RUNS)
    )
    parser.add_argument(
        "--keep", type=Path, help="directory of runs by commit, of this machine and these versions"
    )
    args = parser.parse_args(arguments)
    if unknown := sorted(set(args.runs) - RUNS.keys()):
        parser.error(f"there is no run {unknown[0]!r}; the runs are {', '.join(RUNS)}")
    return args


def resolve_commit(revision: str) -> str:
    """Return the full hash of a revision's commit."""
    try:
        return git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    except subprocess.CalledProcessError:
        raise argparse.ArgumentTypeError(
            f"{revision!r} is not a revision of {REPOSITORY}"
        ) from None


@contextlib.contextmanager
def check_out(worktree: Path) -> Iterator[None]:
    """Check out the commit that a worktree has its name from. The worktree is removed at the
    end.
    """
    git("worktree", "add", "--detach", str(worktree), worktree.name)
    try:
        yield
    finally:
        git("worktree", "remove", "--force", str(worktree))


def compare_run(name: str, first: Path, second: Path, keep: Path) -> bool:
    """Print how a run differs between two worktrees, and return whether it is the same."""
    try:
        one = find_or_train(name, first, keep, keep / "images")
        # a commit compared with itself is trained twice: is training deterministic?
        other = find_or_train(
            name, second, first.with_name("again") if first == second else keep, keep / "images"
        )
        same, text = compare_runs(one, other)
        unmatched = sorted(list_contents(one) ^ list_contents(other))
    except (RunError, RuntimeError, OSError, subprocess.TimeoutExpired) as error:
        print(f"{name}: failed: {error}", flush=True)
        return False
    if unmatched:
        same, text = False, f"{text}\nonly in one of them: {', '.join(unmatched[:3])}"
    seconds = [sum(files.read_json(run / files.RESULT)["seconds"].values()) for run in (one, other)]
    print(f"{name}: {'same' if same else 'different'}, {seconds[0]:.0f} s and {seconds[1]:.0f} s")
    print(textwrap.indent(text, "  "), flush=True)
    return same


def find_or_train(name: str, worktree: Path, keep: Path, images: Path) -> Path:
    """Return the directory of a commit's run below `keep`. Train it on the CPU, unless it is there
    already.

    Raises:
      RuntimeError: `scripts/train.py` failed, as by a flag that the commit does not have; the
        message is its last line.
    """
    run = keep / worktree.name / name
    if run.exists():
        return run
    own = {
        "PYTHONPATH": str(worktree),
        "PYTHONDONTWRITEBYTECODE": "1",
        "CUDA_VISIBLE_DEVICES": "-1",
    }
    environment = (
        os.environ | own | {"XDG_CACHE_HOME": f"{worktree}-cache"}
    )  # each prepares its data itself
    run.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=run.parent) as directory:
        train_dir = Path(directory, name)
        command = [
            sys.executable,
            str(worktree / "scripts/train.py"),
            *COMMON.split(),
            *RUNS[name].split(),
        ]
        command += [f"--dataset=folder:{images}", f"--train_dir={train_dir}"]
        for max_steps in MAX_STEPS.get(name, (12,)):
            whole = [*command, f"--max_steps={max_steps}"]
            program = subprocess.run(
                whole, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS
            )
            if program.returncode:
                lines = (program.stderr or program.stdout or "no message").strip().splitlines()
                raise RuntimeError(
                    f"{worktree.name[:12]}, exit code {program.returncode}: {lines[-1]}"
                )
        train_dir.rename(run)
    return run


def list_contents(run: Path) -> set[str]:
    """List the evaluations and steps that a run has recorded.

    Raises:
      RuntimeError: a record lacks a value that is compared, or there are no records or no weights.
    """
    records = [record for record in read_records(run / files.METRICS) if record["kind"] in COMPARED]
    for record in records:
        if missing := set(COMPARED[record["kind"]]) - record.keys():
            raise RuntimeError(
                f"a {record['kind']} record of {run} has no {', '.join(sorted(missing))}"
            )
    if not records or not files.read_json(run / files.RESULT).get("weights_sha256"):
        raise RuntimeError(f"{run} holds no {'weights' if records else 'records'}")
    return {
        f"{record['kind']} {' '.join(map(str, record_key(record)))}".strip() for record in records
    }


def write_images(root: Path) -> None:
    """Write random blurred images in ten classes, for `--dataset=folder:`; the same each time."""
    generator = np.random.default_rng(0)
    for split, count in IMAGES.items():
        for index in range(count):
            path = root / split / f"class{index % 10}" / f"{index:03d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(generator.integers(0, 256, (8, 8, 3), dtype=np.uint8)).resize(
                (32, 32)
            ).save(path)


def git(*arguments: str) -> str:
    """Run git, and return what it prints, without the end of the line."""
    command = ["git", "-C", str(REPOSITORY), *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.rstrip()


if __name__ == "__main__":
    sys.exit(main())

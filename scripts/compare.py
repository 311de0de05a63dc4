#!/usr/bin/env python3
"""Compare two runs, or two git revisions: are losses and weights the same to the bit?

  compare.py runs/a runs/b                            two runs: from which step do they differ?
  compare.py main~3                                   small runs of a revision and of HEAD
  compare.py v1.0 my-branch --runs=mirrored,resume    two revisions, some of the small runs
  compare.py main --keep=revisions                    keeps the runs: a commit trains them once

An argument that is a directory is a run, otherwise it is a revision. With HEAD, everything must be
committed. Exit codes: 0 same, 1 different or failed, 2 usage, 3 a file of a run is damaged.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cifar_towers import files
from cifar_towers.config.settings import PROCESS
from cifar_towers.config.train_config import names_of
from cifar_towers.errors import RunError, UsageError, error_line, printable
from cifar_towers.evaluation.score import score_name
from cifar_towers.reporting.records import read_records
from cifar_towers.runs.checkpoint import list_checkpoints, read_checkpoint
from cifar_towers.runs.run import Run, load_run
from cifar_towers.runs.table import flatten

REPOSITORY = Path(__file__).resolve().parents[1]
TIMEOUT_SECONDS = 600  # of one process
IMAGES = {"train": 320, "test": 40}  # 10 steps an epoch, so that 12 steps reach the second

# The small runs of a revision. Both revisions need to have all of these flags.
COMMON = """--precision=float32 --seed=0 --batch_size=32 --epochs=3 --eval_every_epochs=0
    --summary_every_steps=10 --checkpoint_every_steps=1 --keep_checkpoints=100"""
CIFARNET = "--model=cifarnet --crop=24 --flip=random --brightness=63 --standardize=image"
SPEEDNET = "--nesterov --label_smoothing=0.1 --bias_learning_rate=1 --weight_decay=1e-3"
RUNS = {
    "cifarnet-1-tower": f"{CIFARNET} --num_gpus=1",
    "cifarnet-2-towers": f"{CIFARNET} --num_gpus=2",
    "speednet93-ema": f"--model=speednet93 {SPEEDNET} --ema_decay=0.9 --lookahead --num_gpus=1",
    "speednet94-muon": f"""--model=speednet94 {SPEEDNET} --optimizer=muon
        --image_size_schedule=0=24,40%=32 --num_gpus=2""",
    "resnet20-synchronized": """--model=resnet20 --batch_statistics=synchronized --shift=4
        --num_gpus=2""",
    "mirrored": f"--model=speednet93 {SPEEDNET} --strategy=mirrored --num_gpus=2",
    "resume": "--model=speednet93 --ema_decay=0.9 --lookahead --cutout=4 --num_gpus=1",
}
# The steps at which the processes of a run end. They share a train_dir: the second process of
# `resume` resumes in the middle of an epoch.
MAX_STEPS = dict.fromkeys(RUNS, (12,)) | {"resume": (7, 12)}

# Settings that differ between any two runs and do not change what is trained.
INCIDENTAL = {"command", "recipe", "seeds", *names_of(PROCESS)}
MAX_LISTED = 8  # entries of a list that is shown in full
COMPARED = {  # values of records, by kind
    "train": ("loss", "accuracy", "gradient_norm", "learning_rate"),
    "eval": ("loss", "accuracy"),
}


def main(arguments: list[str] | None = None) -> int:
    """Print the comparison, and return the exit code."""
    args = parse_arguments(arguments)
    try:
        if Path(args.first).is_dir():
            same, text = compare_runs(Path(args.first), Path(args.second))
            print(text)
        else:
            same = compare_revisions(args.first, args.second, args.runs, args.keep)
    except RunError as error:
        print(error_line(error), file=sys.stderr)
        return error.exit_code
    return 0 if same else 1


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("first", help="directory of a run, or a git revision")
    parser.add_argument("second", nargs="?", default="HEAD", help="the other one [%(default)s]")
    parser.add_argument(
        "--runs",
        type=lambda text: text.split(","),
        default=list(RUNS),
        help=f"small runs of the revisions: {', '.join(RUNS)} [all]",
    )
    parser.add_argument(
        "--keep",
        type=Path,
        help="directory to keep the small runs in, by commit; not for other machines or versions",
    )

    args = parser.parse_args(arguments)
    unknown = sorted(set(args.runs) - RUNS.keys())
    if unknown:
        parser.error(f"there is no run {unknown[0]!r}; the runs are {', '.join(RUNS)}")
    return args


# Two runs -----------------------------------------------------------------------------------------


class Finding(NamedTuple):
    """One result of a comparison of two runs."""

    same: bool | None  # None if it cannot be compared
    line: str


def compare_runs(first: Path, second: Path) -> tuple[bool, str]:
    """Compare two runs: their settings and environments, what they have of common steps, and their
    last weights.

    Returns:
      Whether the records and weights that both runs have are equal, False if there are none; and
      the lines to print.

    Raises:
      UsageError: one of the directories holds no run.
      DataError: a file or checkpoint that both runs have is damaged.
    """
    one = load_run(first)
    other = load_run(second)

    changes = describe_changes("settings", one.config, other.config)
    changes += describe_changes("environments", one.environment, other.environment)
    lines = changes or ["settings and environments: same"]

    compared = [
        compare_records("losses", COMPARED["train"], one.history, other.history),
        compare_records("evaluations", COMPARED["eval"], one.evaluations, other.evaluations),
        compare_checkpoints(one, other),
        compare_last_weights(one, other),
    ]
    findings = [finding for finding in compared if finding]
    lines += [finding.line for finding in findings]

    results = [finding.same for finding in findings if finding.same is not None]
    if not results:
        lines.append("the runs have no step in common, so nothing can be compared")
    same = bool(results) and all(results)
    return same, "\n".join(map(printable, lines))


def describe_changes(noun: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return a line with the values that differ, or no line."""
    first = flatten(one, INCIDENTAL)
    second = flatten(other, INCIDENTAL)

    changes = []
    for key in sorted(first.keys() | second.keys()):
        before = first.get(key)
        after = second.get(key)
        if before != after:
            changes.append(f"{key} {shorten(before)} -> {shorten(after)}")
    return [f"{noun} differ: {', '.join(changes)}"] if changes else []


def shorten(value: Any) -> str:
    """Return a value as text; of a long list only its length."""
    if isinstance(value, list) and len(value) > MAX_LISTED:
        return f"a list of {len(value)}"
    return str(value)


def compare_records(
    noun: str,
    names: Sequence[str],
    one: Sequence[Mapping[str, Any]],
    other: Sequence[Mapping[str, Any]],
) -> Finding | None:
    """Find the first common step at which a value differs; None if no step is common."""
    first = {record_key(record): record for record in one}
    second = {record_key(record): record for record in other}
    common = sorted(first.keys() & second.keys())
    if not common:
        return None

    for step, score in common:
        differing = []
        for name in names:
            value = first[step, score].get(name)
            other_value = second[step, score].get(name)
            if repr(value) != repr(other_value):  # NaN equals NaN
                differing.append(f"{name} {value} and {other_value}")
        if differing:
            where = f"step {step}, {score}" if score else f"step {step}"
            equal = [earlier for earlier, _ in common if earlier < step]
            since = f" (same until step {equal[-1]})" if equal else ""
            return Finding(False, f"{noun}: from {where}: {', '.join(differing)}{since}")

    steps = {step for step, _ in common}
    return Finding(True, f"{noun}: same at all {len(steps)} common steps, the last {max(steps)}")


def record_key(record: Mapping[str, Any]) -> tuple[int, str]:
    """Return a record's step, and the name of its score: a step may have several evaluations."""
    return record["step"], score_name(record) if record["kind"] == "eval" else ""


def compare_checkpoints(one: Run, other: Run) -> Finding | None:
    """Find the first common checkpoint with different values; None if no checkpoint is common."""
    first_paths = {path.name: path for path in list_checkpoints(one.directory)}
    second_paths = {path.name: path for path in list_checkpoints(other.directory)}
    common = [name for name in first_paths if name in second_paths]
    if not common:
        return None

    for name in common:
        first, _ = read_checkpoint(first_paths[name])
        second, _ = read_checkpoint(second_paths[name])
        difference = describe_values(first, second)
        if difference:
            return Finding(False, f"weights: from {name}: {difference}")
    return Finding(True, f"weights: same at {', '.join(common)}")


def describe_values(first: Mapping[str, np.ndarray], second: Mapping[str, np.ndarray]) -> str:
    """Describe the variables that differ most between two checkpoints; empty if none does."""
    kinds = {(name, value.shape, value.dtype) for name, value in first.items()}
    other_kinds = {(name, value.shape, value.dtype) for name, value in second.items()}
    unmatched = sorted({name for name, *_ in kinds ^ other_kinds})
    if unmatched:
        return f"other variables, among them {', '.join(unmatched[:3])}"

    distances = {}  # the largest difference over the largest value
    for name, value in first.items():
        other_value = second[name]
        if value.tobytes() != other_value.tobytes():  # -0.0 differs from 0.0
            difference = np.abs(value.astype(np.float64) - other_value).max()
            distances[name] = difference / max(float(np.abs(value).max()), 1e-300)
    if not distances:
        return ""

    differing = sorted(distances, key=lambda name: -distances[name])
    largest = ", ".join(f"{name} ({distances[name]:.1e})" for name in differing[:3])
    summary = f"{len(differing)} of {len(first)} variables"
    return f"{summary}; largest relative differences: {largest}"


def compare_last_weights(one: Run, other: Run) -> Finding:
    """Compare the last weights of two runs that ended at the same step."""
    if not one.result or not other.result or one.step != other.step:
        states = [f"{run.directory} is {run.state} at step {run.step}" for run in (one, other)]
        return Finding(None, f"{', '.join(states)}: only the common part is compared")

    first = one.result["weights_sha256"]
    second = other.result["weights_sha256"]
    where = f"weights after step {one.step}"
    if first == second:
        return Finding(True, f"{where}: same, sha256 {first[:16]}")
    return Finding(False, f"{where}: sha256 {first[:16]} and {second[:16]}")


# Two revisions ------------------------------------------------------------------------------------


def compare_revisions(first: str, second: str, names: Sequence[str], keep: Path | None) -> bool:
    """Print the comparison of each small run of two revisions, and return whether all are the same.

    Args:
      names: keys of `RUNS`.
      keep: directory in which the runs stay; None: they are removed.

    Raises:
      UsageError: there is no such revision, or HEAD is not what the files are.
    """
    compares_head = "HEAD" in (first, second)
    changed = git("status", "--porcelain").splitlines() if compares_head else []
    if changed:
        raise UsageError(f"HEAD does not have the changes in {changed[0][3:]}; commit them")
    for number in (signal.SIGINT, signal.SIGTERM):
        # an exception, so that worktrees are removed on the way out
        signal.signal(number, lambda received, _: sys.exit(128 + received))

    commits = [find_commit(first), find_commit(second)]
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="compare-")))
        worktrees = [directory / commit for commit in commits]
        for worktree in dict.fromkeys(worktrees):
            stack.enter_context(check_out(worktree))
        print(f"comparing {commits[0][:12]} with {commits[1][:12]}", flush=True)

        runs = keep or directory / "runs"
        images = runs / "images"
        write_images(images)
        same = [compare_small_run(name, *worktrees, runs, images) for name in names]
    return all(same)


def find_commit(revision: str) -> str:
    """Return the full hash of a revision's commit."""
    commit = f"{revision}^{{commit}}"
    try:
        return git("rev-parse", "--verify", "--quiet", "--end-of-options", commit)
    except subprocess.CalledProcessError:
        raise UsageError(f"{revision!r} is no directory and no revision of {REPOSITORY}") from None


@contextlib.contextmanager
def check_out(worktree: Path) -> Iterator[None]:
    """Check out the commit that the worktree is named after, and remove the worktree at the end."""
    git("worktree", "add", "--detach", str(worktree), worktree.name)
    try:
        yield
    finally:
        git("worktree", "remove", "--force", str(worktree))


def compare_small_run(name: str, first: Path, second: Path, keep: Path, images: Path) -> bool:
    """Print how a run differs between two worktrees, and return whether it is the same."""
    # a commit compared with itself is trained twice: is training deterministic?
    keep_second = keep if first != second else first.with_name("again")
    try:
        one = find_or_train(name, first, keep, images)
        other = find_or_train(name, second, keep_second, images)
        same, text = compare_runs(one, other)
        unmatched = sorted(list_contents(one) ^ list_contents(other))
    except (RunError, RuntimeError, OSError, subprocess.TimeoutExpired) as error:
        print(f"{name}: failed: {error}", flush=True)
        return False

    if unmatched:
        same = False
        text = f"{text}\nonly in one of them: {', '.join(unmatched[:3])}"
    verdict = "same" if same else "different"
    print(f"{name}: {verdict}, {read_seconds(one):.0f} s and {read_seconds(other):.0f} s")
    print(textwrap.indent(text, "  "), flush=True)
    return same


def read_seconds(run: Path) -> float:
    """Return the time that a finished run has taken, of all its phases."""
    return sum(files.read_json(run / files.RESULT)["seconds"].values())


def find_or_train(name: str, worktree: Path, keep: Path, images: Path) -> Path:
    """Return the directory of a commit's run below `keep`. Train it on the CPU if it is not there.

    Raises:
      RuntimeError: `scripts/train.py` failed, e.g. as the commit lacks a flag; the message has its
        last line.
    """
    run = keep / worktree.name / name
    if run.exists():
        return run

    environment = os.environ | {
        "PYTHONPATH": str(worktree),
        "PYTHONDONTWRITEBYTECODE": "1",
        "CUDA_VISIBLE_DEVICES": "-1",
        "XDG_CACHE_HOME": f"{worktree}-cache",  # each commit prepares its data itself
    }
    run.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=run.parent) as directory:
        train_dir = Path(directory, name)
        command = [sys.executable, str(worktree / "scripts/train.py")]
        command += [*COMMON.split(), *RUNS[name].split()]
        command += [f"--dataset=folder:{images}", f"--train_dir={train_dir}"]
        for max_steps in MAX_STEPS[name]:
            program = subprocess.run(
                [*command, f"--max_steps={max_steps}"],
                env=environment,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_SECONDS,
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
    if not records:
        raise RuntimeError(f"{run} holds no records")

    contents = set()
    for record in records:
        kind = record["kind"]
        missing = sorted(set(COMPARED[kind]) - record.keys())
        if missing:
            raise RuntimeError(f"a {kind} record of {run} has no {', '.join(missing)}")
        step, score = record_key(record)
        contents.add(f"{kind} {step} {score}".strip())

    if not files.read_json(run / files.RESULT).get("weights_sha256"):
        raise RuntimeError(f"{run} holds no weights")
    return contents


def write_images(root: Path) -> None:
    """Write random blurred images in ten classes, for `--dataset=folder:`; the same each time."""
    generator = np.random.default_rng(0)
    for split, count in IMAGES.items():
        for index in range(count):
            path = root / split / f"class{index % 10}" / f"{index:03d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = generator.integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).resize((32, 32)).save(path)


def git(*arguments: str) -> str:
    """Run git, and return what it prints, without the end of the line."""
    command = ["git", "-C", str(REPOSITORY), *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.rstrip()


if __name__ == "__main__":
    sys.exit(main())

"""`python -m tests.faults`: injects faults into runs, saves and files, and counts the failures.

Every trial is a line of trials.jsonl, in a directory per state of the code. A restart of the same
command skips the trials it finds there. Trials follow from their numbers alone, except the moments
at which signals arrive.
"""

import argparse
import hashlib
import importlib
import os
import re
import sys
from pathlib import Path

from cifar_towers.hardware import tensorflow_imported

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
MODULES = ("saving", "damage", "fulldisk", "nan_injection", "runs", "signals", "cluster")


def main() -> int:
    """Parse the command line, inject faults, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--long", action="store_true", help="many more trials (hours)")
    parser.add_argument("--only", default="", help="regular expression on the names of experiments")
    args = parser.parse_args()

    with tensorflow_imported():
        return inject_faults(args.only, long=args.long)


def inject_faults(only: str, *, long: bool) -> int:
    """Run the experiments whose names match `only`, and print what came of all trials. Exit code 0
    if there were trials of ours and none failed, 2 if no name matches, else 1.
    """
    from tests.faults import harness, subjects

    code = sorted(Path("cifar_towers").rglob("*.py"))
    code += sorted(Path("tests/faults").rglob("*.py"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in code)).hexdigest()[:8]
    length = "long" if long else "quick"
    log = harness.TrialLog(Path("runs/faults", f"{length}-{digest}", "trials.jsonl"))

    experiments = []
    for name in MODULES:
        experiments += importlib.import_module(f"tests.faults.{name}").EXPERIMENTS
    chosen = [experiment for experiment in experiments if re.search(only, experiment.name)]
    if not chosen:
        names = ", ".join(experiment.name for experiment in experiments)
        print(f"--only={only} is none of {names}", file=sys.stderr)
        return 2

    for experiment in chosen:
        harness.run(experiment, log, long=long)
    print(harness.summary(log))

    untried = [experiment for experiment in chosen if not log.of(experiment.name, subjects.OURS)]
    for experiment in untried:
        print(f"NOT TRIED {experiment.name}: {experiment.missing or 'it has no trials'}")
    failed = [row for row in log.rows if not row["ok"] and row["subject"] == subjects.OURS]
    for row in failed:
        print(f"FAILED {row['fault']} {row['index']}: {row['details']}: {row['outcome']}")
    return 1 if failed or untried else 0


if __name__ == "__main__":
    sys.exit(main())

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

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

from tests.faults import harness, subjects

MODULES = ("saving", "damage", "fulldisk", "nan_injection", "runs", "signals", "cluster")


def main() -> int:
    """Exit code 0 if no trial of ours failed, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--long", action="store_true", help="as many trials as in docs/robustness.md (hours)"
    )
    parser.add_argument("--only", default="", help="regular expression on the names of experiments")
    args = parser.parse_args()
    code = (
        path
        for folder in ("cifar_towers", "tests/faults")
        for path in sorted(Path(folder).rglob("*.py"))
    )
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in code)).hexdigest()[:8]
    log = harness.TrialLog(
        Path("runs/faults", f"{'long' if args.long else 'quick'}-{digest}", "trials.jsonl")
    )
    for name in MODULES:
        for experiment in importlib.import_module(f"tests.faults.{name}").EXPERIMENTS:
            if re.search(args.only, experiment.name):
                harness.run(experiment, log, long=args.long)
    print(harness.summary(log))
    failed = [row for row in log.rows if not row["ok"] and row["subject"] == subjects.OURS]
    for row in failed:
        print(f"FAILED {row['fault']} {row['index']}: {row['details']}: {row['outcome']}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""`python -m tests.faults`: injects faults into runs, saves and files, and counts the failures.

Every trial is a row of trials.csv, in a directory per state of the code. A restart of the same command skips the rows
it finds.
Trials follow from the seed alone, except the moments at which signals arrive.
"""

import argparse
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

MODULES = ("saving", "damage", "data_damage", "fulldisk", "nan_injection", "leak_check", "runs", "signals", "cluster")


def main() -> int:
    """Exit code 0 if no trial of ours failed, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__.split("\n")[0])
    parser.add_argument("--long", action="store_true", help="as many trials as in docs/robustness.md (hours)")
    parser.add_argument("--only", default="", help="regular expression on the names of experiments")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/faults"))
    args = parser.parse_args()
    code = harness.code_digest(Path("cifar_towers"), Path("tests/faults"), Path("configs"))
    out = args.out / f"{'long' if args.long else 'quick'}-{code}"
    log = harness.TrialLog(out / "trials.csv")
    for name in MODULES:
        for experiment in importlib.import_module(f"tests.faults.{name}").EXPERIMENTS:
            if re.search(args.only, experiment.name):
                harness.run(experiment, log, long=args.long, seed=args.seed)
    tables = harness.results_table(log), harness.response_times(log)
    text = "\n\n".join(filter(None, tables))
    (out / "table.md").write_text(text + "\n")
    print(text)
    failed = [row for row in log.rows if row["ok"] != "True" and row["subject"] == subjects.OURS]
    for row in failed:
        print(f"FAILED {row['fault']} {row['trial']}: {row['details']}: {row['outcome']}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""`python -m tests.faults`: tries what can happen to a run, and says how often it did harm.

Every trial is a row of trials.csv in the output directory; what is there already is not tried again, so the same
command goes on where it was stopped. Trials follow from the seed alone, but for the moments at which signals arrive.
"""

import argparse
import os
import re
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

from tests.faults import cluster, damage, fulldisk, harness, leak_check, nan_injection, runs, saving, subjects

EXPERIMENTS = [
    *saving.EXPERIMENTS,
    *damage.EXPERIMENTS,
    *fulldisk.EXPERIMENTS,
    *nan_injection.EXPERIMENTS,
    *leak_check.EXPERIMENTS,
    *runs.EXPERIMENTS,
    *cluster.EXPERIMENTS,
]


def main() -> int:
    """Exit code 0 if nothing of ours failed, 1 if something did."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__.split("\n")[0])
    parser.add_argument("--long", action="store_true", help="as many trials as the published figures take (hours)")
    parser.add_argument("--only", default="", help="experiments whose names this regular expression is found in")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/faults"))
    given = parser.parse_args()
    out = given.out / ("long" if given.long else "quick")
    log = harness.Log(out / "trials.csv")
    for experiment in EXPERIMENTS:
        if re.search(given.only, experiment.name):
            harness.run(experiment, log, long=given.long, seed=given.seed)
    told = [harness.table(log.rows), runs.latencies(log.rows), cluster.noticed(log.rows)]
    told = "\n\n".join(filter(None, told))
    (out / "table.md").write_text(told + "\n")
    print(told)
    failed = [row for row in log.rows if row["ok"] != "True" and row["subject"] == subjects.OURS]
    for row in failed:
        print(f"FAILED {row['fault']} {row['trial']}: {row['what']}: {row['outcome']}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Draw the accuracy of runs over their minutes of training, as in README.

  plot_accuracy.py runs/speed94-seed0 runs/speed95-seed0 --out=docs/accuracy.png

It is the accuracy on held-out images if all runs have some, otherwise the test accuracy. A run is
evaluated along the way by --eval_every_epochs. Evaluations take no part of the minutes.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cifar_towers.runs.run import Run
from cifar_towers.runs.table import read_runs, shared_score


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="directories of runs")
    parser.add_argument("--out", default="accuracy.png", help="picture; default: %(default)s")
    args = parser.parse_args()
    draw(read_runs(args.runs)).savefig(args.out, dpi=110)
    print(f"written to {args.out}")


def draw(runs: Sequence[Run]) -> Figure:
    """Draw the accuracies of each run: a line without test-time augmentation, a star with it.

    A run is named after its recipe, or its directory if another run has the same recipe.
    """
    figure = Figure((8, 4.2), layout="constrained")
    axes = figure.subplots()
    titles = [run.title for run in runs]
    split = shared_score(runs).removesuffix("_tta")
    for run in runs:
        final = run.scores.get(f"{split}_tta", run.scores[split])
        plain = [r for r in run.evaluations if (r["split"], r["tta"]) == (split, False)]
        minutes = [record["training_seconds"] / 60 for record in plain]
        title = run.title if titles.count(run.title) == 1 else run.name
        name = f"{title}: {100 * final['accuracy']:.2f} %"
        (line,) = axes.plot(
            minutes, [100 * record["accuracy"] for record in plain], marker="o", label=name
        )
        if final["tta"]:
            axes.plot(
                minutes[-1],
                100 * final["accuracy"],
                marker="*",
                markersize=13,
                color=line.get_color(),
            )
    machines = {
        "{processor}, {cores} cores, {precision}".format_map(run.environment) for run in runs
    }
    axes.set_title(
        f"{'; '.join(sorted(machines))}\nlines: without test-time augmentation; stars: with it",
        fontsize=9,
    )
    axes.set(xlabel="minutes of training", ylabel=f"{split} accuracy, %")
    axes.grid(alpha=0.4)
    axes.legend(loc="lower right")
    return figure


if __name__ == "__main__":
    main()

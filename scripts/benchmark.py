#!/usr/bin/env python3
"""Images per second of training steps on this machine.

  benchmark.py towers --recipe=speed94 --towers=1,2                 placements and strategies
  benchmark.py frameworks --nets=resnet20 --frameworks=ours,keras   this project beside others
  benchmark.py frameworks --nets=nets.py:net --frameworks=ours,keras   the same with a net of yours

Each measurement is a process of its own. Every round takes all cases in another random order. A
case that fails is left out. Ctrl-C ends the rounds (of one net), and what is finished is reported.
Other flags, such as --dataset=synthetic, are those of a training and are passed on to it.
"""

import argparse
import datetime
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cifar_towers import files
from cifar_towers.config import TrainConfig
from cifar_towers.config.flags import parse_command_line
from cifar_towers.errors import RunError, error_line
from cifar_towers.hardware import gpu_names, tensorflow_imported
from cifar_towers.reporting.records import align_columns, format_rate

REPOSITORY = Path(__file__).resolve().parents[1]
JSON_FILE = "benchmark.json"
PICTURE_FILE = "benchmark.png"
TRAIN_COMMAND = [sys.executable, str(REPOSITORY / "scripts/train.py")]

WARM_UP_STEPS = 5
WINDOW_STEPS = 20  # a training writes the rate of its last 20 steps
CPU_WINDOWS = 1
GPU_WINDOWS = 9  # where steps take milliseconds

NETS = {  # recipe, with another image size if it has several -> its net, image size and batch size
    "speed94": ("speednet94", 32, 1024),
    "speed94-at-20": ("speednet94", 20, 1024),
    "resnet20": ("resnet20", 32, 128),
    "cifarnet": ("cifarnet", 24, 128),
}
OWN_NET = (32, 128)  # the image size and batch size of a net of yours
OURS = {"ours": [], "ours-xla": ["--jit_compile"]}  # the flags of each
FRAMEWORKS = (*OURS, "keras", "keras-onednn", "pytorch", "pytorch-compiled")
ONEDNN = "TF_ENABLE_ONEDNN_OPTS"

Rates = Mapping[str, Sequence[float]]  # images per second of each case, a number per round


def main() -> None:
    """Run the benchmark that the command line names."""
    args, flags = parse_arguments()
    try:
        with tensorflow_imported():
            args.benchmark(args, flags)
    except RunError as error:
        sys.exit(error_line(error))


def parse_arguments(arguments: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Return the arguments of a benchmark, and the flags that it passes on to its trainings."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True)

    towers = commands.add_parser("towers", allow_abbrev=False, description=benchmark_towers.__doc__)
    towers.set_defaults(benchmark=benchmark_towers)
    towers.add_argument(
        "--towers",
        type=lambda text: [int(number) for number in text.split(",")],
        help="numbers of towers, e.g. 1,2,4; "
        "default: 1 to all GPUs by doubling, or 1 and 2 without GPUs",
    )
    towers.add_argument("--out", help="directory of the results; default: runs/benchmark-<recipe>")

    frameworks = commands.add_parser(
        "frameworks", allow_abbrev=False, description=benchmark_frameworks.__doc__
    )
    frameworks.set_defaults(benchmark=benchmark_frameworks)
    frameworks.add_argument(
        "--frameworks",
        type=names_among(FRAMEWORKS),
        default="ours,keras,keras-onednn,pytorch,pytorch-compiled",
        help="default: %(default)s; ours-xla adds --jit_compile; keras-onednn has "
        f"{ONEDNN}=1, which ours has too; PyTorch is installed by pip install -e '.[bench]'",
    )
    frameworks.add_argument(
        "--nets",
        type=names_among(tuple(NETS), or_own_nets=True),
        default="speed94,resnet20,cifarnet",
        help=f"of {', '.join(NETS)}; or file.py:function, a Keras net of yours, in batches of 128 "
        "images of 32x32; default: %(default)s",
    )
    frameworks.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")

    for command in (towers, frameworks):
        command.add_argument(
            "--rounds", type=int, default=3, help="measurements of each case; default: %(default)s"
        )
    return parser.parse_known_args(arguments)


def names_among(known: Sequence[str], or_own_nets: bool = False) -> Callable[[str], list[str]]:
    """Return a function that parses names separated by commas."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in known and not (or_own_nets and is_own(name)):
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(known)}")
        return names

    return parse


# The two benchmarks -------------------------------------------------------------------------------


def benchmark_towers(args: argparse.Namespace, flags: Sequence[str]) -> None:
    """Compare placements, strategies and numbers of towers of a recipe, on GPUs with and without
    XLA. Print a table and the flags of the fastest case; write them and a picture.
    """
    config = parse_command_line(TrainConfig, flags)
    gpus = gpu_names()
    training = [*flags, *short_training(config, on_gpus=bool(gpus))]

    def rate_of(case: str) -> float:
        return training_rate([*training, *case.split()])

    cases = make_cases(args.towers or default_counts(len(gpus)), has_gpus=bool(gpus))
    rates = measure(cases, rate_of, args.rounds)
    write_report(Path(args.out or f"runs/benchmark-{config.name}"), config, gpus, rates)


def benchmark_frameworks(args: argparse.Namespace, flags: Sequence[str]) -> None:
    """Compare this project with other frameworks, on one GPU or all cores. Ours is a training, with
    input, augmentation and the recipe's optimizer. The others are bare steps of the same net and
    batch with momentum SGD.
    """
    for net in args.nets:
        _, size, batch_size = net_and_sizes(net)
        rates = measure_frameworks(net, args.frameworks, args.precision, args.rounds, flags)
        title = f"{net}, {batch_size:,} images of {size}x{size}, {args.precision}"
        print(f"\n{title}\n{format_table(rates, batch_size)}\n", flush=True)


def default_counts(num_gpus: int) -> list[int]:
    """Return 1, 2, 4 and so on up to the number of GPUs, or 1 and 2 without GPUs."""
    limit = num_gpus or 2
    doubled = [2**power for power in range(limit.bit_length())]
    return sorted({*doubled, limit})


def make_cases(counts: Sequence[int], has_gpus: bool) -> list[str]:
    """Return the cases to compare as flags, for each number of towers."""
    from cifar_towers.towers.placement import PLACEMENTS

    cases = []
    for count in counts:
        placements = list(PLACEMENTS)
        if count == 1:  # a CPU alone has only one place
            placements = ["cpu", "round_robin"] if has_gpus else ["cpu"]
        ways = [f"--variable_placement={name}" for name in placements]
        if count > 1:
            ways.append("--strategy=mirrored")

        # by default, compiled steps have their variables on the GPUs
        if has_gpus:
            ways.append("--jit_compile")
        if has_gpus and count > 1:
            ways.append("--strategy=mirrored --jit_compile")
        cases += [f"--num_gpus={count} {way}" for way in ways]
    return cases


def measure_frameworks(
    net: str, frameworks: Sequence[str], precision: str, rounds: int, flags: Sequence[str] = ()
) -> Rates:
    """Return the images per second of each framework that does not fail."""
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    on_gpus = bool(gpu_names())
    model, size, batch_size = net_and_sizes(net)
    recipe, _, _ = net.partition("-")
    crop = size if size < 32 else 0
    defaults = ["--dataset=auto"]
    if is_own(net):
        defaults.append("--learning_rate=0.01")
        recipe = "resnet20"
    training = [
        *defaults,
        *flags,
        f"--recipe={recipe}",
        f"--model={model}",
        "--image_size=32",
        f"--crop={crop}",
        "--image_size_schedule=",
        f"--batch_size={batch_size}",
        f"--precision={precision}",
    ]
    training += short_training(parse_command_line(TrainConfig, training), on_gpus)

    def rate_of(framework: str) -> float:
        if framework in OURS:
            return training_rate([*training, *OURS[framework]])
        return peer_rate(framework, net, precision, on_gpus)

    return measure(frameworks, rate_of, rounds)


def is_own(net: str) -> bool:
    """Return whether a net is `file.py:function`, and not one of `NETS`."""
    return ".py:" in net


def net_and_sizes(net: str) -> tuple[str, int, int]:
    """Return the model, the image size and the batch size of one of `NETS` or of a net of yours."""
    return (net, *OWN_NET) if is_own(net) else NETS[net]


# One way to time a training -----------------------------------------------------------------------


def measure(cases: Sequence[str], rate_of: Callable[[str], float], rounds: int) -> Rates:
    """Return the images per second of each case, a number per round. The random orders of the
    rounds are the same in every benchmark.

    A case that fails is left out. Ctrl-C ends the rounds; what is measured is returned.
    """
    rates: dict[str, list[float]] = {case: [] for case in cases}
    try:
        for number in range(rounds):
            for case in random.Random(number).sample(list(rates), len(rates)):
                print(f"round {number + 1}: {case}: ", end="", flush=True)
                try:
                    rate = rate_of(case)
                except RunError as error:
                    del rates[case]
                    print(f"left out: {error}", flush=True)
                    continue
                rates[case].append(rate)
                print(f"{rate:,.0f} images/s", flush=True)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    return {case: values for case, values in rates.items() if values}


def short_training(config: TrainConfig, on_gpus: bool) -> list[str]:
    """Return flags for a training of a few steps on images of full size, without summaries, and
    without evaluations before the end.
    """
    windows = GPU_WINDOWS if on_gpus else CPU_WINDOWS
    steps = WARM_UP_STEPS + WINDOW_STEPS * windows
    return [
        f"--max_steps={steps}",
        f"--epochs={max(config.epochs, steps)}",  # an epoch has at least one step
        "--image_size_schedule=",
        "--eval_every_epochs=0",
        "--notta",
        f"--summary_every_steps={10 * WINDOW_STEPS}",  # rates are written ten times as often
    ]


def training_rate(flags: Sequence[str]) -> float:
    """Train once; return the images per second, without compilation and saving.

    Raises:
      RunError: the training failed, with the last line that it printed.
    """
    with tempfile.TemporaryDirectory(prefix="benchmark-") as train_dir:
        run([*TRAIN_COMMAND, *flags, f"--train_dir={train_dir}"])
        lines = Path(train_dir, files.METRICS).read_text().splitlines()
    records = [json.loads(line) for line in lines]
    rates = [record["images_per_sec"] for record in records if record["kind"] == "train"]
    return statistics.median(rates[1:])  # the first record is of the warm-up


def peer_rate(framework: str, net: str, precision: str, on_gpus: bool) -> float:
    """Return the images per second of another framework's steps (scripts/peers.py).

    Raises:
      RunError: the process failed, with the last line that it printed.
    """
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow"}
    environment.pop(ONEDNN, None)  # this project sets it
    if framework == "keras-onednn":
        environment[ONEDNN] = "1"

    sizes = net_and_sizes(net)
    steps = WINDOW_STEPS * (GPU_WINDOWS if on_gpus else CPU_WINDOWS)  # as many as of our training
    if sizes[-1] >= 1024 and not on_gpus:
        steps = 5  # of five to fifteen seconds each
    arguments = [framework.removesuffix("-onednn"), *map(str, sizes), precision, str(steps)]
    command = [sys.executable, str(REPOSITORY / "scripts/peers.py"), *arguments]
    return float(run(command, env=environment).splitlines()[-1])


def run(command: Sequence[str], **options: Any) -> str:
    """Run a command and return what it prints."""
    done = subprocess.run(command, capture_output=True, text=True, **options)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise RunError(lines[-1] if lines else f"exit code {done.returncode}")
    return done.stdout


# Reports ------------------------------------------------------------------------------------------


def write_report(out: Path, config: TrainConfig, gpus: Sequence[str], rates: Rates) -> None:
    """Print the table and the flags of the fastest case; write them as JSON, and the picture."""
    from cifar_towers.reporting.run_logger import describe_machine

    machine = describe_machine()
    kinds_of_gpu = [f"{gpus.count(gpu)} x {gpu}" for gpu in sorted({*gpus})]
    devices = ", ".join([machine["processor"], f"{machine['cores']} cores", *kinds_of_gpu])
    title = f"{config.name}, batches of {config.batch_size:,}; {devices}"
    print(f"\n{title}\n{format_table(rates, config.batch_size)}")

    cases = []
    for case, values in by_rate(rates):
        low, median, high = quartiles(values)
        results = {"images_per_sec": values, "median": median, "quartiles": [low, high]}
        cases.append({"flags": case, **results})
    content = {
        "recipe": config.name,
        "model": config.model,
        "batch_size": config.batch_size,
        "dataset": config.dataset,
        "date": datetime.date.today().isoformat(),
        "processor": machine["processor"],
        "cores": machine["cores"],
        "gpus": gpus,
        "packages": machine["packages"],
        "cases": cases,
        "fastest": cases[0]["flags"],
    }
    out.mkdir(parents=True, exist_ok=True)
    files.write_json(out / JSON_FILE, content)
    plot(rates, title).savefig(out / PICTURE_FILE, dpi=120)
    print(f"\nwritten to {out}: {JSON_FILE}, {PICTURE_FILE}\nfastest: {content['fastest']}")


def format_table(rates: Rates, batch_size: int) -> str:
    """Return a table with a line per case, the fastest first."""
    if not rates:
        raise RunError("nothing could be measured; the lines above say why")
    rows = [["", "images/s", "quartiles", "ms per step", "fastest / its", "rounds"]]
    fastest = max(statistics.median(values) for values in rates.values())
    for case, values in by_rate(rates):
        low, median, high = quartiles(values)
        spread = f"{format_rate(low)}-{format_rate(high)}"
        milliseconds = f"{1000 * batch_size / median:,.1f}"
        factor = f"{fastest / median:.2f}"
        rows.append([case, format_rate(median), spread, milliseconds, factor, str(len(values))])
    return align_columns(rows)


def plot(rates: Rates, title: str) -> Figure:
    """Draw the median of every case as a bar, with its quartiles as error bars, the fastest on
    top.
    """
    ordered = by_rate(rates)
    low, median, high = np.transpose([quartiles(values) for _, values in ordered])
    figure = Figure((9, 1.2 + 0.35 * len(ordered)), layout="constrained")
    panel = figure.subplots()
    names = [case for case, _ in ordered]
    bars = panel.barh(names, median, xerr=[median - low, high - median], capsize=3)
    panel.bar_label(bars, fmt=format_rate, padding=4)
    panel.invert_yaxis()
    panel.set(title=title, xlabel="images/s: median and quartiles")
    panel.title.set_fontsize(9)
    panel.margins(x=0.12)
    return figure


def by_rate(rates: Rates) -> list[tuple[str, Sequence[float]]]:
    """Return the cases with their rates, sorted by the median, the fastest first."""
    return sorted(rates.items(), key=lambda item: -statistics.median(item[1]))


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile."""
    low, median, high = np.percentile(values, (25, 50, 75)).tolist()
    return low, median, high


if __name__ == "__main__":
    main()

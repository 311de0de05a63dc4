#!/usr/bin/env python3
"""Training steps of this project beside those of other frameworks on this machine, in images per
second.

  compare_frameworks.py                                            all nets, three rounds
  compare_frameworks.py --nets=resnet20 --frameworks=ours,keras    some of them

Each measurement is a process of its own. Every round takes all frameworks in another order. Ours is
a training, with input, augmentation and the recipe's optimizer; ours-xla adds --jit_compile. The
others are bare steps of the same net and batch with momentum SGD (scripts/peers.py), on all cores
or on the first GPU: keras is Keras `fit` as TensorFlow comes, keras-onednn has
TF_ENABLE_ONEDNN_OPTS=1, which ours has too.
"""

import argparse
import importlib.util
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cifar_towers.benchmark import BenchmarkCase, short_training, visit
from cifar_towers.cli.main import parse_command_line
from cifar_towers.config import TrainConfig
from cifar_towers.errors import RunError
from cifar_towers.reporting.records import align_columns

REPOSITORY = Path(__file__).resolve().parents[1]
FRAMEWORKS = ("ours", "ours-xla", "keras", "keras-onednn", "pytorch", "pytorch-compiled")
ONEDNN = "TF_ENABLE_ONEDNN_OPTS"
HAS_GPU = shutil.which("nvidia-smi") is not None
NETS = {  # recipe, with another image size if it has several -> its net, image size and batch size
    "speed94": ("speednet94", 32, 1024),
    "speed94-at-20": ("speednet94", 20, 1024),
    "resnet20": ("resnet20", 32, 128),
    "cifarnet": ("cifarnet", 24, 128),
}


def main() -> None:
    """Measure all nets, and print a table for each."""
    args = parse_arguments()
    has_pytorch = importlib.util.find_spec("torch") is not None
    frameworks = [name for name in args.frameworks if has_pytorch or not name.startswith("pytorch")]
    if frameworks != args.frameworks:
        print("PyTorch is left out, as it is not installed: pip install -e '.[bench]'")
    for net in args.nets:
        _, size, batch_size = NETS[net]
        rates = measure(net, frameworks, args.rounds, args.precision)
        print(
            f"\n{net}, {batch_size:,} images of {size}x{size}, "
            f"{args.precision}\n{format_table(rates)}\n",
            flush=True,
        )


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the arguments of the command line, with lists of frameworks and nets."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = ",".join(name for name in FRAMEWORKS if HAS_GPU or name != "ours-xla")
    parser.add_argument("--frameworks", default=default, help="default: %(default)s")
    parser.add_argument(
        "--nets",
        default="speed94,resnet20,cifarnet",
        help=f"of {', '.join(NETS)}; default: %(default)s",
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="number of measurements of each; default: %(default)s"
    )
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args(arguments)
    for option, known in (("frameworks", FRAMEWORKS), ("nets", tuple(NETS))):
        names = getattr(args, option).split(",")
        if unknown := [name for name in names if name not in known]:
            parser.error(f"--{option}: {unknown[0]} is not one of {', '.join(known)}")
        setattr(args, option, names)
    return args


def measure(
    net: str, frameworks: Sequence[str], rounds: int, precision: str
) -> dict[str, list[float]]:
    """Return the images per second of each framework, a number per round. A framework that fails is
    left out.
    """
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    rates: dict[str, list[float]] = {framework: [] for framework in frameworks}
    for number in range(rounds):
        for framework in random.Random(number).sample([*rates], len(rates)):
            try:
                rate = (
                    rate_of_ours(net, precision, jit_compile=framework == "ours-xla")
                    if framework.startswith("ours")
                    else rate_of_peer(framework, net, precision)
                )
            except RunError as error:
                del rates[framework]
                print(f"{framework} is left out: {error}", flush=True)
            else:
                rates[framework].append(rate)
                print(f"round {number + 1}: {framework}: {rate:,.0f} images/s", flush=True)
    return rates


def rate_of_ours(net: str, precision: str, jit_compile: bool) -> float:
    """Return the images per second of a short training on one GPU or two towers on the CPU."""
    _, size, batch_size = NETS[net]
    recipe, crop = net.partition("-")[0], size if size < 32 else 0
    flags = [
        f"--recipe={recipe}",
        f"--crop={crop}",
        "--image_size_schedule=",
        f"--batch_size={batch_size}",
    ]
    flags += ["--dataset=auto", f"--precision={precision}"]
    config = short_training(parse_command_line(TrainConfig, flags), on_gpus=HAS_GPU)
    case = BenchmarkCase(0, "towers", "", jit_compile)
    with tempfile.TemporaryDirectory() as directory:
        return visit(
            config, case, [sys.executable, str(REPOSITORY / "scripts/train.py")], Path(directory)
        )[0]


def rate_of_peer(framework: str, net: str, precision: str) -> float:
    """Return the images per second of bare steps of another framework."""
    environment = {
        name: value for name, value in os.environ.items() if name != ONEDNN
    }  # this project sets it
    environment |= {ONEDNN: "1"} if framework == "keras-onednn" else {}
    environment |= {"TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow"}
    steps = "20" if HAS_GPU or NETS[net][-1] < 1024 else "5"  # of five to fifteen seconds each
    arguments = [framework.removesuffix("-onednn"), *map(str, NETS[net]), precision, steps]
    command = [sys.executable, "-m", "scripts.peers", *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RunError([f"exit code {done.returncode}", *done.stderr.strip().splitlines()][-1])
    return float(done.stdout.splitlines()[-1])


def format_table(rates: dict[str, list[float]]) -> str:
    """Return the median of each framework, and the rate of ours divided by it."""
    medians = {
        framework: statistics.median(values) for framework, values in rates.items() if values
    }
    rows = [["framework", "images/s", "min-max", "ours / its"]]
    for framework, median in sorted(medians.items(), key=lambda item: -item[1]):
        low, high = min(rates[framework]), max(rates[framework])
        ratio = f"{medians['ours'] / median:.2f}" if "ours" in medians else "-"
        rows.append([framework, f"{median:,.0f}", f"{low:,.0f}-{high:,.0f}", ratio])
    return align_columns(rows)


if __name__ == "__main__":
    main()

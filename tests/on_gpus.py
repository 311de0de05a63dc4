"""The program of `make test-gpu`: tests, steps beside Keras, the benchmark and speed94 on a machine
with GPUs.

Without GPUs it runs nothing. It adds a row to the table of docs/gpus.md. Look at the row before you
commit it.
"""

import argparse
import datetime
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from cifar_towers.files import read_json
from scripts.benchmark import NETS, measure_frameworks
from tests.helpers.programs import COMMAND

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "docs/gpus.md"
STEPS = {
    "cifarnet": "cifarnet",
    "resnet20": "resnet20",
    "speed94-at-20": "speed94 at 20x20",
    "speed94": "speed94 at 32x32",
}
HEADER = "| GPUs | Driver, TensorFlow | Tests | speed94: with TTA, without TTA | "
HEADER += "The same with `--jit_compile` | ms per step | Failed |"
RUNS = {"speed94": [], "speed94-xla": ["--jit_compile"]}
BENCHMARK = [sys.executable, "scripts/benchmark.py", "towers", "--recipe=speed94"]
FRAMEWORKS = ["ours", "ours-xla", "keras"]
NO_GPU = "no GPU here: nothing was run, and nothing counts as passed"


def main() -> int:
    """Run all parts, even after one has failed, and return 1 if any has."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--without-bench",
        action="store_true",
        help="leave out the benchmark, a minute per case and round",
    )
    parser.add_argument(
        "--rounds", type=int, default=2, help="visits of each step; default: %(default)s"
    )
    arguments = parser.parse_args()
    devices = _devices()
    if not devices["gpus"]:
        print(NO_GPU)
        return 0
    print(f"on {describe(devices)}", flush=True)
    failed = []
    with tempfile.TemporaryDirectory() as directory:
        junit = Path(directory, "tests.xml")
        tests = [
            sys.executable,
            "-m",
            "pytest",
            "-m",
            "gpu",
            "tests/training",
            f"--junitxml={junit}",
        ]
        if _run(tests, CIFAR_TOWERS_TEST_ON_GPUS="1"):
            failed.append("tests")
        counts = read_counts(junit.read_text()) if junit.exists() else "not run"
        if not arguments.without_bench and _run(BENCHMARK):
            failed.append("make bench")
        results = []
        for name, flags in RUNS.items():
            if _run(
                [
                    *COMMAND,
                    "train",
                    "--recipe=speed94",
                    *flags,
                    f"--train_dir={Path(directory, name)}",
                ]
            ):
                failed.append(name)
            results.append(read_json(Path(directory, name, "result.json")))
        rates = {
            net: measure_frameworks(net, FRAMEWORKS, "bfloat16", arguments.rounds) for net in STEPS
        }
    row = make_row(devices, counts, results, rates, failed)
    TABLE.write_text(add_row(TABLE.read_text(), row))
    print(f"{HEADER}\n{row}\nadded to {TABLE}")
    return bool(failed)


def describe(devices: dict) -> str:
    """Return `2 x NVIDIA A100`, from the answer of the process that looked."""
    names = devices["gpus"]
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def read_counts(junit: str) -> str:
    """Return `58 passed, 1 failed` of a JUnit file."""
    suite = re.search(r"<testsuite [^>]*>", junit).group()
    number = {
        name: int(re.search(rf'\b{name}="(\d+)"', suite).group(1))
        for name in ("tests", "failures", "errors")
    }
    bad = number["failures"] + number["errors"]
    return f"{number['tests'] - bad} passed, {bad} failed"


def make_row(
    devices: dict, counts: str, results: list[dict], rates: dict[str, dict], failed: list[str]
) -> str:
    """Return the row of the table of docs/gpus.md, with a dash for each unknown value."""
    cells = [
        f"{describe(devices)}, {datetime.date.today()}",
        f"{devices['driver'] or '-'}, {devices['tensorflow']}",
        counts,
        *map(describe_run, results),
        describe_all_steps(rates),
        ", ".join(failed) or "nothing",
    ]
    return f"| {' | '.join(cells)} |"


def describe_run(result: dict) -> str:
    """Return `94.05 %, 93.33 %; 9.8 s + 21.5 s of compilation` of a result; a dash without one."""
    if not result:
        return "-"
    accuracy = {score["tta"]: f"{100 * score['accuracy']:.2f} %" for score in result["evaluations"]}
    seconds = sum(result["seconds"].get(phase, 0) for phase in ("train", "input", "report"))
    compilation = result["seconds"].get("compile", 0)
    time = f"{seconds:.1f} s + {compilation:.1f} s of compilation"
    return f"{accuracy.get(True, '-')}, {accuracy.get(False, '-')}; {time}"


def describe_all_steps(rates: dict[str, dict]) -> str:
    """Return the median steps of each net, as `cifarnet: ours 8.1, keras 2.3; resnet20: ours 9.2`;
    a dash without any.
    """
    described = []
    for net, title in STEPS.items():
        steps = describe_steps(NETS[net][-1], rates.get(net, {}))
        if steps:
            described.append(f"{title}: {steps}")
    return "; ".join(described) or "-"


def describe_steps(batch_size: int, rates: dict[str, list[float]]) -> str:
    """Return the median step of each framework in ms, as `ours 8.1, ours-xla 2.2, keras 2.3`."""
    medians = {
        framework: statistics.median(values) for framework, values in rates.items() if values
    }
    return ", ".join(
        f"{framework} {1000 * batch_size / rate:.1f}" for framework, rate in medians.items()
    )


def add_row(page: str, row: str) -> str:
    """Return the page with the row under its table's header, newest first."""
    head, separator, rest = page.partition(HEADER)
    if not separator:
        raise ValueError(f"{TABLE} has lost the header of its table: {HEADER}")
    newline, rule, rows = rest.split("\n", 2)
    return f"{head}{HEADER}{newline}\n{rule}\n{row}\n{rows}"


def _devices() -> dict:
    """Ask a process that ends before others need the GPUs for their names, their driver and
    TensorFlow's version.
    """
    program = (
        "import json, tensorflow as tf; from cifar_towers.hardware import gpu_names\n"
        "print(json.dumps({'gpus': gpu_names(), 'tensorflow': tf.__version__}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    try:
        smi = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = (
            subprocess.run(smi, capture_output=True, text=True, timeout=60)
            .stdout.split("\n")[0]
            .strip()
        )
    except OSError:
        driver = ""
    return json.loads(done.stdout.splitlines()[-1]) | {"driver": driver}


def _run(command: list, **environment: str) -> int:
    print("\n$ " + " ".join(map(str, command)), flush=True)
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment).returncode


if __name__ == "__main__":
    sys.exit(main())

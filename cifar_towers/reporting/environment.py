"""The content of environment.json: machine, software, devices, data, variables and layers of a run."""

import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from cifar_towers.hardware import cpuinfo, gpu_names
from cifar_towers.reporting.run_info import RunInfo
from cifar_towers.towers.pipeline import layer_costs
from cifar_towers.towers.placement import short_device

PACKAGES = ("cifar-towers", "tensorflow", "keras", "tensorflow-datasets", "tensorboard", "numpy", "absl-py")


def describe_run(run: RunInfo) -> dict:
    """The environment of a run."""
    try:
        layers = layer_costs(run.model, open_size=run.config.crop or run.dataset.info.image_size)
    except ValueError:  # not a graph of layers
        layers = []
    return describe_machine() | {
        "towers": [{"name": tower.name, "device": tower.device} for tower in run.towers],
        "precision": run.precision,
        "gpus": gpu_names(),
        "data_sha256": run.dataset.digests(),
        "synthetic_data": run.banner,
        "class_names": list(run.dataset.info.class_names),
        "variables": [
            {
                "name": name,
                "shape": variable.shape.as_list(),
                "bytes": variable.shape.num_elements() * variable.dtype.size,
                "device": short_device(variable.device),
            }
            for name, variable in run.variables.items()
        ],
        "model": layers,
    }


def describe_machine() -> dict:
    """The command, versions, processor and git revision of this process."""
    return {
        "command": ["python", *sys.argv] if sys.argv[0].endswith(".py") else sys.argv,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": cpuinfo("model name") or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "packages": {name: _version(name) for name in PACKAGES},
        "onednn": os.environ.get("TF_ENABLE_ONEDNN_OPTS", "as TensorFlow chooses"),  # earlier runs hold it
        "git_revision": _git_revision(),
    }


def next_commands(train_dir: Path) -> list[str]:
    """What to type after a training in this directory, with the programs of this installation."""
    script, python = Path(_from_here(sys.argv[0])), _from_here(sys.executable)
    tensorboard = _from_here(Path(sys.executable).with_name("tensorboard"))

    def program(name: str) -> str:
        return f"{python} {script.with_name(name)}.py" if script.suffix == ".py" else f"cifar-towers-{name}"

    return [
        f"{tensorboard} --logdir={train_dir}",
        f"{program('evaluate')} --train_dir={train_dir}",
        f"{program('predict')} --train_dir={train_dir} picture.jpg",
    ]


def _from_here(program: str | Path) -> str:
    """A program's path as one would type it."""
    if shutil.which(Path(program).name) == str(program):
        return Path(program).name
    return str(Path(program).relative_to(Path.cwd())) if Path(program).is_relative_to(Path.cwd()) else str(program)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _git_revision() -> str:
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():  # an installed copy may stand inside another project's repository
        return "unknown"
    command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=10).stdout
        return output.strip() or "unknown"
    except (OSError, subprocess.SubprocessError):
        return "unknown"

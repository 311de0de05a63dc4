"""What a program runs on, and what a run is made of: the content of environment.json."""

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from cifar_towers.data.dataset import Dataset
from cifar_towers.towers import Tower
from cifar_towers.towers.devices import gpu_names
from cifar_towers.towers.pipeline import layer_costs
from cifar_towers.towers.placement import short_device
from cifar_towers.training.state import TrainState

PACKAGES = ("cifar-towers", "tensorflow", "keras", "tensorflow-datasets", "tensorboard", "numpy", "absl-py")


def of_run(
    towers: Sequence[Tower], precision: str, dataset: Dataset, banner: str, state: TrainState, side: int
) -> dict:
    """Where a run runs, on what, and what it is made of.

    Args:
      precision: what the towers compute in. side: of the images that the net sees.
      banner: what is to be said of data that is not real; else empty.
    """
    try:
        layers = layer_costs(state.model, open_size=side)
    except ValueError:  # a model that cannot be looked into
        layers = []
    return machine() | {
        "towers": [{"name": tower.name, "device": tower.device} for tower in towers],
        "precision": precision,
        "gpus": gpu_names(),
        "data_sha256": dataset.digests(),
        "synthetic_data": banner,
        "class_names": list(dataset.info.class_names),
        "variables": [
            {
                "name": name,
                "shape": v.shape.as_list(),
                "bytes": v.shape.num_elements() * v.dtype.size,
                "device": short_device(v.device),
            }
            for name, v in state.named_variables().items()
        ],
        "model": [layer._asdict() for layer in layers],
    }


def machine() -> dict:
    """What a program runs on: command, versions, processor, code."""
    return {
        "command": ["python", *sys.argv] if sys.argv[0].endswith(".py") else sys.argv,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "packages": {name: _version(name) for name in PACKAGES},
        "onednn": os.environ.get("TF_ENABLE_ONEDNN_OPTS", "as TensorFlow chooses"),
        "git_revision": _git_revision(),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _git_revision() -> str:
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():  # an installed copy: what is around it is somebody else's
        return "unknown"
    try:
        told = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty"], capture_output=True, text=True, timeout=10
        )
        return told.stdout.strip() or "unknown"
    except (OSError, subprocess.SubprocessError):
        return "unknown"

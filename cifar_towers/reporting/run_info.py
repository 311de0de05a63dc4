"""A run's data, model, devices and scores: the values that reports, environment.json and records are made of."""

import contextlib
import dataclasses
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import keras
import psutil
import tensorflow as tf

from cifar_towers.config import TrainConfig, parse_shares
from cifar_towers.config.schedules import RunLength
from cifar_towers.data.dataset import Dataset
from cifar_towers.errors import count
from cifar_towers.evaluation.score import Evaluation
from cifar_towers.hardware import cpuinfo, gpu_names
from cifar_towers.registry import split_path
from cifar_towers.reporting import figures, tags
from cifar_towers.reporting.commands import command
from cifar_towers.towers import Tower
from cifar_towers.towers.pipeline import layer_costs
from cifar_towers.towers.placement import short_device
from cifar_towers.towers.sharding import share_out

PACKAGES = ("cifar-towers", "tensorflow", "keras", "tensorflow-datasets", "tensorboard", "numpy", "absl-py")


@dataclasses.dataclass(frozen=True)
class RunInfo:
    """A run as it is before its first step."""

    config: TrainConfig  # with a value in place of every `auto`
    dataset: Dataset
    banner: str  # a warning that the data are synthetic, or empty
    local_towers: Sequence[Tower]  # of this process, that the batch or the model is split over
    towers: Sequence[Tower]  # of the step: a single one where the model is split
    precision: str
    length: RunLength
    image_size_at: Callable[[int], int]  # step -> height and width of its images in pixels
    model: keras.Model
    variables: Mapping[str, tf.Variable]  # all that is saved, by name
    activation_layers: Sequence[str]  # names of the layers in `StepDiagnostics.activations`

    def describe_parallelism(self) -> str:
        """Return number, images and devices of the towers, as `2 towers of 768 images on /CPU:0, /CPU:1`."""
        config, num_towers = self.config, len(self.towers)
        devices = ", ".join(tower.device for tower in self.local_towers)
        if config.strategy == "multi_worker":
            devices = f"{num_towers // len(self.local_towers)} workers"
        parts = f"{config.micro_batches} x " if config.micro_batches > 1 else ""
        shares = parse_shares(config.tower_shares) or [1] * num_towers
        shard_sizes = share_out(config.batch_size, shares, config.micro_batches)
        sizes = [size // config.micro_batches for size in shard_sizes]
        images = f"{parts}{', '.join(map(str, sizes)) if config.tower_shares else sizes[0]} images"
        stages = f" in {len(self.local_towers)} stages" if config.parallelism == "model" else ""
        mirrored = ", mirrored" if config.strategy == "mirrored" else ""
        return f"{count(num_towers, 'tower')} of {images}{stages} on {devices}{mirrored}"


def evaluation_record(evaluation: Evaluation, evaluations: Sequence[Evaluation]) -> dict[str, Any]:
    """Return an evaluation as in metrics.jsonl and result.json; without a confusion matrix of many classes.

    The temperature of a test score is fitted on the validation score that has the same weights and views.
    """
    score, validation = evaluation.score, evaluation._replace(split="validation")[:3]
    held_out = [each.score for each in evaluations if each[:3] == validation and evaluation.split == "test"]
    record = {"split": evaluation.split, "weights": evaluation.weights, "tta": evaluation.tta} | score.record(*held_out)
    if len(score.confusion) <= figures.MAX_CLASSES:
        record["confusion"] = score.confusion.tolist()
    return record


def describe_run(run: RunInfo) -> dict[str, Any]:
    """Return the content of environment.json: machine, software, devices, data, variables and layers of a run."""
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


def describe_machine() -> dict[str, Any]:
    """Return command, versions, processor and git revision of this process."""
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


def next_commands(config: TrainConfig) -> list[str]:
    """Return what to type after a training."""
    run = [f"--train_dir={config.directory}", *([f"--model={config.model}"] if config.user_model else [])]
    data = [f"--dataset={config.dataset}"] if split_path(config.dataset)[0] else []  # where it is now
    data += [f"--data_dir={config.data_dir}"] if config.data_dir else []
    return [
        command("tensorboard", f"--logdir={config.directory}"),
        command("evaluate.py", *run, *data),
        command("predict.py", *run, "picture.jpg"),
    ]


def resource_usage(towers: Sequence[Tower]) -> dict[str, float]:
    """Return values by tag: host memory and each GPU's peak memory in MB, and its utilization in percent.

    The tags are `memory/host_mb`, `memory/GPU:0_mb` and, for every GPU of the machine, `gpu_utilisation/0`. What is not
    available is left out.
    """
    gpus = sorted({tower.device.removeprefix("/") for tower in towers if "GPU" in tower.device})
    values = {f"{tags.MEMORY}/host_mb": psutil.Process().memory_info().rss / 1e6}
    for gpu in gpus:
        values[f"{tags.MEMORY}/{gpu}_mb"] = tf.config.experimental.get_memory_info(gpu)["peak"] / 1e6
    return values | (_gpu_utilization() if gpus else {})


def _gpu_utilization() -> dict[str, float]:
    """Ask NVIDIA's management library, if its bindings (package nvidia-ml-py) and a driver are installed."""
    try:
        import pynvml
    except ImportError:
        return {}
    values = {}
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        for index in range(pynvml.nvmlDeviceGetCount()):
            rates = pynvml.nvmlDeviceGetUtilizationRates(pynvml.nvmlDeviceGetHandleByIndex(index))
            values[f"{tags.GPU_UTILIZATION}/{index}"] = float(rates.gpu)
    return values


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
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip() or "unknown"
    except (OSError, subprocess.SubprocessError):
        return "unknown"

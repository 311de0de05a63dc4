"""The settings of every program but `train`. Imports no TensorFlow, so that a usage error is
immediate.
"""

import dataclasses

from cifar_towers.config.settings import Settings, setting
from cifar_towers.config.train_config import PRECISION_HELP, PRECISIONS, DeviceSettings
from cifar_towers.registry import check_dataset, check_model

EXPORT_FORMATS = ("saved_model", "keras", "litert", "onnx")


@dataclasses.dataclass(frozen=True)
class TrainedRunConfig(DeviceSettings):
    """A run, one of its checkpoints, and which of its weights."""

    title = "Run"

    train_dir: str = setting(
        "", "directory of the run", required="which run? give --train_dir=runs/..."
    )
    step: int = setting(0, "step of the checkpoint; 0: the newest", low=0)
    weights: str = setting(
        "auto",
        "which weights to use: raw; ema: their moving average; auto: the average if the run has "
        "one",
        choices=("auto", "raw", "ema"),
    )
    model: str = setting(
        "",
        "if the run trained your own model: the function that returns it, as "
        "package.module:function or path/to/file.py:function; the program executes that code",
        check=check_model,
    )


@dataclasses.dataclass(frozen=True)
class ComputeConfig(TrainedRunConfig):
    """Settings of a trained model's computation."""

    tta: bool = setting(False, "test-time augmentation: mirrored and shifted images")
    precision: str = setting(
        "auto",
        f"{PRECISION_HELP}; a run trained in float32 stays in float32",
        choices=("auto", *PRECISIONS),
    )


@dataclasses.dataclass(frozen=True)
class RunDataConfig(TrainedRunConfig):
    """The present place of a run's data."""

    title = "Data"

    dataset: str = setting(
        "",
        "another test set, or the new place of the run's data, e.g. folder:<path>; default: as in "
        "training",
        check=check_dataset,
    )
    data_dir: str = setting(
        "",
        "directory of prepared data sets; give it again if the training had it; default: that of "
        "TensorFlow Datasets",
    )


@dataclasses.dataclass(frozen=True)
class EvaluateConfig(ComputeConfig, RunDataConfig):
    """Settings of `cifar-towers evaluate`."""

    title = "Evaluation"

    split: str = setting(
        "test", "part of the data set to evaluate", choices=("test", "validation", "train")
    )
    num_images: int = setting(0, "number of images to evaluate; 0: all", low=0)
    allow_changed_data: bool = setting(
        False, "evaluate even if the images have changed since the run began"
    )
    json: bool = setting(False, "print one JSON object to standard output, instead of text")


@dataclasses.dataclass(frozen=True)
class PredictConfig(ComputeConfig):
    """Settings of `cifar-towers predict`."""

    title = "Prediction"

    json: bool = setting(False, "print one JSON object per image")
    pictures: tuple[str, ...] = setting(
        (),
        "image files and folders",
        required="which images? write: cifar-towers predict --train_dir=runs/... image.jpg folder/",
    )


@dataclasses.dataclass(frozen=True)
class ExportConfig(RunDataConfig):
    """Settings of `cifar-towers export`."""

    title = "Export"

    format: str = setting("saved_model", "file format", choices=EXPORT_FORMATS)
    out: str = setting("", "new directory of the export; default: export/<format> in train_dir")
    check: int = setting(
        1000,
        "compare the export with the checkpoint on this many test images; 0: do not",
        low=0,
        high=10_000,
    )


@dataclasses.dataclass(frozen=True)
class RunsConfig(Settings):
    """Settings of `cifar-towers runs`."""

    title = "Table"

    runs_dir: str = setting("runs", "directory to search for runs")
    json: bool = setting(False, "print one JSON object per run, instead of text")
    patterns: tuple[str, ...] = setting((), "patterns of names, e.g. 'speed94*'")


@dataclasses.dataclass(frozen=True)
class ReportConfig(Settings):
    """Settings of `cifar-towers report`."""

    title = "Report"

    out: str = setting(
        "",
        "file of the page; default: report.html in the directory that you name, or in the current "
        "one if you name several",
    )
    runs: tuple[str, ...] = setting(
        (),
        "runs' directories",
        required="which runs? write: cifar-towers report runs/one [runs/other ...] [--out=FILE]",
    )


@dataclasses.dataclass(frozen=True)
class LaunchConfig(Settings):
    """Settings of `cifar-towers launch`."""

    title = "Launch"

    num_workers: int = setting(
        0,
        "number of workers to start on this machine; 0: start one process, e.g. one worker of a "
        "cluster",
        low=0,
        high=1024,
    )
    max_restarts: int = setting(
        3,
        "restart at most N times, and never after exit codes 0, 2, 3 and 4",
        low=0,
    )
    command: tuple[str, ...] = setting((), "flags of a training")

"""Every setting of the programs beside `train.py`. Like config.py it must not import TensorFlow."""

import dataclasses
from typing import ClassVar

from cifar_towers.config import DeviceConfig, TrainConfig
from cifar_towers.config.settings import REST, check_limits, setting
from cifar_towers.errors import DataError, UsageError, describe_exit_codes
from cifar_towers.registry import TTA_LEVELS, check_dataset, check_model, describe_tta_levels

EXPORTS = ("saved_model", "keras", "litert", "onnx")


@dataclasses.dataclass(frozen=True)
class TrainedConfig(DeviceConfig):
    """What of a run is used."""

    train_dir: str = setting("", "Run", "the run that trained it")
    step: int = setting(0, "Run", "which of its checkpoints, by the step; 0: the newest", low=0)
    weights: str = setting(
        "auto",
        "Run",
        "as trained, or their moving average; auto: the average where the run kept one",
        choices=("auto", "raw", "ema"),
    )
    model: str = setting(
        "",
        "Run",
        "for a run with a net of your own: the function that makes it, as package.module:function or "
        "path/to/file.py:function; agrees to running it",
        check=check_model,
    )

    def __post_init__(self):
        super().__post_init__()
        if not self.train_dir:
            raise UsageError("which run? give --train_dir=runs/...")


@dataclasses.dataclass(frozen=True)
class ScoringConfig(TrainedConfig):
    """How a trained net computes."""

    exit_codes: ClassVar[str] = f"{DeviceConfig.exit_codes} or the output cannot be written"

    tta: int = setting(0, "Run", f"test-time augmentation: {describe_tta_levels()}", low=0, high=max(TTA_LEVELS))
    precision: str = setting("auto", "Run", "what to compute in", choices=("auto", "float32", "bfloat16", "float16"))


@dataclasses.dataclass(frozen=True)
class RunDataConfig(TrainedConfig):
    """Where a run's data are now."""

    dataset: str = setting(
        "",
        "Data",
        "where the run's data are now, as folder:<path>; by default where they were when it was trained",
        check=check_dataset,
    )
    data_dir: str = setting("", "Data", "where the prepared data sets are")


@dataclasses.dataclass(frozen=True)
class EvaluateConfig(ScoringConfig, RunDataConfig):
    """Settings of scoring a checkpoint."""

    split: str = setting("test", "Evaluation", "which examples", choices=("test", "validation", "train"))
    changed_data: bool = setting(False, "Evaluation", "score images though the run was made with others")
    json: bool = setting(False, "Evaluation", "print one JSON object and nothing else")


@dataclasses.dataclass(frozen=True)
class PredictConfig(ScoringConfig):
    """Settings of predicting the classes of pictures."""

    json: bool = setting(False, "Prediction", "print one JSON object a picture")
    pictures: tuple[str, ...] = setting((), REST, "files and folders")

    def __post_init__(self):
        super().__post_init__()
        if not self.pictures:
            raise UsageError("which pictures? write: predict.py --train_dir=runs/... picture.jpg folder/")


@dataclasses.dataclass(frozen=True)
class ExportConfig(RunDataConfig):
    """Settings of writing a trained net for use elsewhere."""

    exit_codes: ClassVar[str] = f"{DeviceConfig.exit_codes}, a failed check, or nothing could be written"
    format: str = setting("saved_model", "Export", "what to write", choices=EXPORTS)
    out: str = setting(
        "", "Export", "where to; by default saved_model, model.keras, model.tflite or model.onnx in train_dir's export/"
    )
    check: int = setting(
        1000, "Export", "test images on which it must agree with the checkpoint; 0: none", low=0, high=10_000
    )


@dataclasses.dataclass(frozen=True)
class CompareConfig:
    """Which runs to compare."""

    exit_codes: ClassVar[str] = describe_exit_codes(
        UsageError, DataError, success="everything in both runs is equal", failure="something differs, or a bug"
    )

    runs: tuple[str, ...] = setting((), REST, "two runs' directories")

    def __post_init__(self):
        if len(self.runs) != 2:
            raise UsageError("which two runs? write: compare_runs.py runs/one runs/other")


@dataclasses.dataclass(frozen=True)
class ReportConfig:
    """Which runs to write a page about, and where to."""

    exit_codes: ClassVar[str] = describe_exit_codes(UsageError, failure="a bug or the page cannot be written")

    out: str = setting(
        "", "Report", "where to; by default report.html in the directory of one run, and here for several"
    )
    runs: tuple[str, ...] = setting((), REST, "runs' directories")

    def __post_init__(self):
        if not self.runs:
            raise UsageError("which runs? write: report.py runs/one [runs/other ...] [--out=FILE]")


@dataclasses.dataclass(frozen=True)
class LaunchConfig:
    """What to start, and how often to start it again."""

    exit_codes: ClassVar[str] = TrainConfig.exit_codes

    num_workers: int = setting(
        0,
        "Launch",
        "workers to start on this machine; 0: one process, which its flags, TF_CONFIG or Slurm may put in a cluster",
        low=0,
        high=1024,
    )
    max_restarts: int = setting(
        3, "Launch", "how often to start all again after a worker was lost or told to leave", low=0
    )
    command: tuple[str, ...] = setting((), REST, "flags of train.py")

    def __post_init__(self):
        check_limits(self)
        if self.num_workers == 1:
            raise UsageError("num_workers=1 is no cluster; give 2 or more, or 0 for one process that is started again")
        if not self.command:
            raise UsageError("launch what? write: launch.py --num_workers=2 -- --flagfile=configs/speed94.cfg")
        words = [argument for argument in self.command if not argument.startswith("-")]
        if words:
            raise UsageError(f"{words[0]!r} is not a flag of train.py; write --name=value")

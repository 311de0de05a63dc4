"""Settings of `evaluate.py`, `predict.py`, `export.py`, `compare_runs.py` and `runs.py`. Must not import TensorFlow."""

import dataclasses
from typing import ClassVar

from cifar_towers.config import DeviceConfig
from cifar_towers.config.settings import REST, check_limits, setting, settings_of
from cifar_towers.errors import DataError, UsageError, describe_exit_codes
from cifar_towers.registry import TTA_LEVELS, check_dataset, check_model, describe_tta_levels

RUN_FIELDS = ("run", "recipe", "seed", "towers", "state", "step", "accuracy", "tta_accuracy", "images_per_sec")
RUN_FIELDS += ("minutes", "revision", "megabytes")
EXPORT_FORMATS = ("saved_model", "keras", "litert", "onnx")
_run, _data, _evaluation = settings_of("Run"), settings_of("Data"), settings_of("Evaluation")
_export = settings_of("Export")


@dataclasses.dataclass(frozen=True)
class TrainedRunConfig(DeviceConfig):
    """A run, one of its checkpoints, and which of its weights."""

    train_dir: str = _run("", "directory of the run")
    step: int = _run(0, "step of the checkpoint; 0: the newest", low=0)
    weights: str = _run(
        "auto",
        "raw: as trained; ema: their moving average; auto: the average if the run has one",
        choices=("auto", "raw", "ema"),
    )
    model: str = _run(
        "",
        "for a run with a model of your own: the function that makes it, as package.module:function or "
        "path/to/file.py:function; allows to execute it",
        check=check_model,
    )

    def __post_init__(self):
        super().__post_init__()
        if not self.train_dir:
            raise UsageError("which run? give --train_dir=runs/...")


@dataclasses.dataclass(frozen=True)
class ComputeConfig(TrainedRunConfig):
    """How a trained model computes."""

    exit_codes: ClassVar[str] = f"{DeviceConfig.exit_codes} or the output cannot be written"

    tta: int = _run(0, f"test-time augmentation: {describe_tta_levels()}", low=0, high=max(TTA_LEVELS))
    precision: str = _run("auto", "compute dtype", choices=("auto", "float32", "bfloat16", "float16"))


@dataclasses.dataclass(frozen=True)
class RunDataConfig(TrainedRunConfig):
    """Where a run's data are now."""

    dataset: str = _data(
        "",
        "where the run's data are now, as folder:<path>; by default where they were when it was trained",
        check=check_dataset,
    )
    data_dir: str = _data("", "directory of the prepared data sets")


@dataclasses.dataclass(frozen=True)
class EvaluateConfig(ComputeConfig, RunDataConfig):
    """Settings of `evaluate.py`."""

    split: str = _evaluation("test", "which examples", choices=("test", "validation", "train"))
    allow_changed_data: bool = _evaluation(False, "evaluate on images other than those of the run")
    json: bool = _evaluation(False, "print one JSON object and nothing else")


@dataclasses.dataclass(frozen=True)
class PredictConfig(ComputeConfig):
    """Settings of `predict.py`."""

    json: bool = setting(False, "Prediction", "print one JSON object per image")
    pictures: tuple[str, ...] = setting((), REST, "image files and folders")

    def __post_init__(self):
        super().__post_init__()
        if not self.pictures:
            raise UsageError("which images? write: predict.py --train_dir=runs/... image.jpg folder/")


@dataclasses.dataclass(frozen=True)
class ExportConfig(RunDataConfig):
    """Settings of `export.py`."""

    exit_codes: ClassVar[str] = f"{DeviceConfig.exit_codes}, a failed check, or nothing could be written"
    format: str = _export("saved_model", "format of the export", choices=EXPORT_FORMATS)
    out: str = _export(
        "", "path of the export; by default saved_model, model.keras, model.tflite or model.onnx in train_dir's export/"
    )
    check: int = _export(1000, "test images on which it must agree with the checkpoint; 0: none", low=0, high=10_000)


@dataclasses.dataclass(frozen=True)
class CompareConfig:
    """Settings of `compare_runs.py`."""

    exit_codes: ClassVar[str] = describe_exit_codes(
        UsageError, DataError, success="everything in both runs is equal", failure="something differs, or a bug"
    )

    runs: tuple[str, ...] = setting((), REST, "two runs' directories")

    def __post_init__(self):
        if len(self.runs) != 2:
            raise UsageError("which two runs? write: compare_runs.py runs/one runs/other")


@dataclasses.dataclass(frozen=True)
class RunsConfig:
    """Settings of `runs.py`."""

    exit_codes: ClassVar[str] = describe_exit_codes(UsageError, failure="a bug or the output cannot be written")

    runs_dir: str = _run("runs", "directory below which runs are looked for")
    sort: str = setting("", "Table", "sort by this", choices=("", *RUN_FIELDS))
    json: bool = setting(False, "Table", "print one JSON object for each run and nothing else")
    best: str = setting(
        "", "Table", "print the directory of this recipe's most accurate finished run, and nothing else"
    )
    delete: bool = setting(False, "Table", "delete the runs whose directories are given, after a question")
    arguments: tuple[str, ...] = setting((), REST, "a pattern of names, as 'speed94*'; or the directories to delete")

    def __post_init__(self):
        check_limits(self)
        if self.delete and not self.arguments:
            raise UsageError("delete which runs? write: runs.py --delete runs/one [runs/other ...]")
        if len(self.arguments) > 1 and not self.delete:
            raise UsageError(f"{' '.join(self.arguments)}: give one pattern, in quotes, as 'speed94*'")
        if self.best and (self.delete or self.json or self.arguments):
            raise UsageError("best prints one directory; leave the other flags")

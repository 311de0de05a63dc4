"""Every setting of a training run, from which its flags are made, and the recipes that set them.

This module, and all that runs before training starts, must not import TensorFlow, so that a usage
error is immediate. What cannot be used raises a UsageError here and in the modules beside this one;
the message names the setting.
"""

import dataclasses
import functools
import hashlib
import math
import os
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from cifar_towers import registry
from cifar_towers.config import schedules
from cifar_towers.errors import UsageError, count
from cifar_towers.registry import (
    MODELS,
    OPTIMIZERS,
    check_function_name,
    find_source,
    split_function,
    split_path,
)

REST = "the rest"  # group of the setting that holds a program's positional arguments
MIN_IMAGE_SIZE = 18  # pixels
PRECISIONS = ("float32", "bfloat16")
PRECISION_HELP = (
    "number format the net computes in; auto: bfloat16 if the hardware computes it faster, "
    "else float32"
)
DEFAULT_RECIPE = "speed94"
PACKAGE = Path(__file__).resolve().parents[1]
# An installed copy has the recipes inside the package, a checkout beside it.
RECIPES = next(
    (place for place in (PACKAGE / "configs", PACKAGE.parent / "configs") if place.is_dir()),
    PACKAGE,
)
PATHS = (
    "train_dir",
    "init_from",
    "out",
    "runs_dir",
)  # after `--train_dir=` the shell leaves a ~ as it is
Config = TypeVar("Config")


# A setting: a dataclass field that carries its flag's help, limits and choices --------------------


def setting(
    default: Any,
    group: str,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: Sequence[str] | None = None,
    check: Callable[[Any], object] | None = None,
    required: str = "",
    on_resume: Literal["refuse", "allow"] = "refuse",
    per_worker: bool = False,
    per_run: bool = False,
) -> Any:
    """Return a dataclass field with everything that its flag, its validation and its readers need.

    Args:
      check: validates values other than the default.
      required: error message if the value is empty; none if the setting may be empty.
      on_resume: what happens if a run is resumed with another value. `refuse`: the setting belongs
        to the recipe.
      per_worker: workers of one cluster may have different values.
      per_run: runs with different values are still repetitions of one experiment, to be averaged.
    """
    return dataclasses.field(default=default, metadata=locals())


def settings_of(group: str, **common: Any) -> Callable[..., Any]:
    """Return `setting` for one section of the help text, whose settings have these options in
    common.
    """
    return lambda default, help, **options: setting(default, group, help, **common | options)


class Section:
    """One section of a training's help text. Each of its settings says whether it belongs to the
    recipe.
    """

    def __init__(self, group: str, **common: bool):
        self.recipe = settings_of(group, on_resume="refuse", **common)
        self.free = settings_of(
            group, on_resume="allow", **common
        )  # a resumed run may have another value


def names_with(config_class: type, **properties: Any) -> tuple[str, ...]:
    """Return the names of the settings with these properties, e.g. `names_with(TrainConfig,
    on_resume="allow")`.
    """
    return tuple(
        field.name
        for field in dataclasses.fields(config_class)
        if all(field.metadata[key] == value for key, value in properties.items())
    )


def check_limits(config: Any) -> None:
    """Check every field of a config against its type, `low`, `high`, `choices` and `check`."""
    field: Any
    for field in dataclasses.fields(config):
        value, limits, kind = (
            getattr(config, field.name),
            field.metadata,
            typing.get_origin(field.type) or field.type,
        )
        if not isinstance(value, (int, float) if kind is float else kind) or isinstance(
            value, bool
        ) != (kind is bool):
            raise UsageError(f"{field.name}={value!r} is not of the type {kind.__name__}")
        if limits["required"] and not value:
            raise UsageError(limits["required"])
        if limits["check"] and value != field.default:
            limits["check"](value)
        if limits["choices"] and value not in (*limits["choices"], field.default):
            raise UsageError(f"{field.name}={value} is not one of {', '.join(limits['choices'])}")
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"{field.name}={value} is not a finite number")
        if limits["low"] is not None and value < limits["low"]:
            raise UsageError(f"{field.name}={value} is too small; the minimum is {limits['low']}")
        if limits["high"] is not None and value > limits["high"]:
            raise UsageError(f"{field.name}={value} is too large; the maximum is {limits['high']}")


# The settings of a training -----------------------------------------------------------------------


def parse_numbers(setting: str, text: str) -> tuple[int, ...]:
    """Return the different whole numbers in a text: `"0,1,2"` -> (0, 1, 2)."""
    parts = text.split(",") if text else []
    if not all(part.isdecimal() for part in parts) or len(set(map(int, parts))) < len(parts):
        raise UsageError(f"{setting}={text} is not a list of different whole numbers, e.g. 0,1,2")
    return tuple(map(int, parts))


def parse_profile_steps(text: str) -> tuple[int, int] | None:
    """Return a profile's first step and the step after its last, counted from 0: `"100:110"` ->
    (100, 110).
    """
    first, _, last = text.partition(":")
    if text and not (first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise UsageError(
            f"profile_steps={text!r} is not a first and a later last step; write "
            "--profile_steps=100:110"
        )
    return (int(first), int(last)) if text else None


_towers, _run, _data, _model, _optimizer = map(
    Section, ("Towers", "Run", "Data", "Model", "Optimizer")
)
_reporting = Section("Reporting", per_run=True)


@dataclasses.dataclass(frozen=True)
class DeviceConfig:
    """Settings of the devices that the towers use."""

    num_gpus: int = _towers.free(
        0,
        "number of towers, in a cluster per worker; 0: one per GPU, or two without GPUs (in a "
        "cluster one), and fewer if these cannot divide the batch evenly",
        low=0,
    )
    soft_placement: bool = _towers.free(
        True, "logical devices in place of missing GPUs", per_run=True
    )
    deterministic: bool = _towers.free(
        False, "bit-identical results, or TensorFlow's error where it has none"
    )

    def __post_init__(self):
        check_limits(self)


@dataclasses.dataclass(frozen=True)
class TrainConfig(DeviceConfig):
    """Every setting of a training run. Batch sizes and steps are those of all towers together."""

    strategy: str = _towers.free(
        "towers",
        "use of the devices: towers share the batch and the variables; mirrored and multi_worker "
        "are replicas of tf.distribute, in one process or one per worker",
        choices=("towers", "mirrored", "multi_worker"),
    )
    variable_placement: str = _towers.free(
        "",
        "device of the towers' shared variables; default: cpu, or round_robin for speednets on "
        "GPUs; with jit_compile they are on the first tower's device",
        choices=("cpu", "round_robin", "least_loaded"),
    )
    batch_statistics: str = _towers.recipe(
        "mean",
        "statistics of batch normalization: of each tower's shard, with the mean over the towers "
        "as moving statistics; or synchronized over the batch",
        choices=("mean", "synchronized"),
    )
    micro_batches: int = _towers.recipe(
        1,
        "gradient accumulation: number of parts in which each tower computes its share of the "
        "batch",
        low=1,
    )
    jit_compile: bool = _towers.free(
        False, "compile each tower's forward and backward pass and the update by XLA, for GPUs"
    )
    log_device_placement: bool = _towers.free(
        False, "logged device of each variable and tower", per_worker=True, per_run=True
    )

    recipe: str = _run.free(
        "", "recipe to train, a file in configs/; default: speed94, unless --model is given"
    )
    train_dir: str = _run.free(
        "",
        "directory of everything the run writes; default: runs/<recipe>-seed<seed>, with "
        "-<dataset> for other data than CIFAR-10, and -from-<run> for "
        "init_from",
        per_worker=True,
        per_run=True,
    )
    overwrite: bool = _run.free(
        False, "fresh start that deletes the run in train_dir", per_worker=True, per_run=True
    )
    seed: int = _run.recipe(
        0, "seed of data order, augmentation and weights", low=0, high=2**31 - 1, per_run=True
    )
    seeds: str = _run.free(
        "",
        "seeds of several runs, e.g. 0,1,2, which are summarized; each in a folder of train_dir",
        per_run=True,
    )
    init_from: str = _run.recipe(
        "",
        "directory of a trained run, whose newest weights this run starts with where name and "
        "shape are equal",
    )
    epochs: float = _run.recipe(8.0, "number of passes over the training set", low=1e-6, high=1e6)
    max_steps: int = _run.free(
        0, "number of steps after which the run stops and is evaluated; 0: no limit", low=0
    )
    target_accuracy: float = _run.free(
        0.0,
        "accuracy without TTA, as a fraction, that stops the run at an evaluation; 0: none",
        low=0,
        high=1,
    )
    dataset: str = _data.free(
        "cifar10",
        "data set: cifar10, synthetic, auto (CIFAR-10 if available, otherwise synthetic), "
        "folder:<path> with a subfolder of images for each class, csv:<table> of files and "
        "classes, npz:<file> of NumPy arrays, or any TensorFlow Datasets builder with images and "
        "labels",
        check=registry.check_dataset,
        per_run=True,
    )
    data_dir: str = _data.free(
        "",
        "directory of prepared data sets, or of CIFAR-10's own files; default: that of TensorFlow "
        "Datasets",
        per_worker=True,
        per_run=True,
    )
    validation_examples: int = _data.recipe(
        0, "number of training examples held out for validation", low=0
    )
    image_size: int = _data.recipe(
        32,
        "height and width in pixels; the central square of other images is resized",
        low=MIN_IMAGE_SIZE,
        high=256,
    )
    batch_size: int = _data.recipe(1536, "number of examples per step, over all towers", low=1)
    hard_example_pool: int = _data.recipe(
        0,
        "number of examples drawn per step, of which the batch_size with the highest loss under a "
        "small proxy net are trained on; 0: off",
        low=0,
    )
    flip: str = _data.recipe(
        "alternating",
        "mirroring of training images: at random, or alternating: each image in every other epoch",
        choices=("none", "random", "alternating"),
    )
    shift: int = _data.recipe(
        2, "largest random shift in each direction, in pixels", low=0, high=16
    )
    shift_fill: str = _data.recipe(
        "reflect", "padding of shifted images", choices=("reflect", "zeros")
    )
    crop: int = _data.recipe(
        0,
        "height and width of the crop in pixels, random in training and central in evaluation; 0: "
        "no crop",
        low=0,
    )
    image_size_schedule: str = _data.recipe(
        "",
        "size of training images in pixels from an epoch or percentage on, e.g. 0=24,45%=32; "
        "empty: image_size",
    )
    cutout: int = _data.recipe(
        0, "size in pixels of a random square that is blanked in each training image", low=0
    )
    brightness: float = _data.recipe(
        0.0, "largest random change of brightness, in levels of 255", low=0
    )
    augment: str = _data.recipe(
        "",
        "your own function (images, draws) or (images, labels, draws) of normalized training "
        "images, as path/to/file.py:function",
        check=functools.partial(check_function_name, "augment"),
    )
    contrast: float = _data.recipe(
        0.0, "largest random change of contrast, as a fraction", low=0, high=1
    )
    standardize: str = _data.recipe(
        "dataset",
        "mean and standard deviation for normalization: the data set's, or each image's own",
        choices=("dataset", "image"),
    )

    model: str = _model.recipe(
        "speednet94",
        f"net to train: {', '.join(MODELS)}; or your own function that returns a Keras model, as "
        "package.module:function or path/to/file.py:function",
        check=registry.check_model,
    )
    precision: str = _model.recipe("auto", PRECISION_HELP, choices=("auto", *PRECISIONS))
    whitening_images: int = _model.recipe(
        5000, "number of images from which whitening filters are computed", low=12
    )

    optimizer: str = _optimizer.recipe(
        "momentum",
        "update rule: momentum, SGD; muon, Muon for convolutions and momentum SGD for the rest; "
        "adamw, AdamW",
        choices=OPTIMIZERS,
    )
    learning_rate: float = _optimizer.recipe(0.1, "peak learning rate", low=0)
    bias_learning_rate: float = _optimizer.recipe(
        0.0, "peak rate of biases and norms; 0: learning_rate", low=0
    )
    head_learning_rate: float = _optimizer.recipe(
        0.0, "peak rate of the last layer's kernel; 0: learning_rate", low=0
    )
    whitening_learning_rate: float = _optimizer.recipe(
        0.0, "peak rate of whitening layers' biases; 0: bias_learning_rate", low=0
    )
    learning_rate_schedule: str = _optimizer.recipe(
        "linear:0=1,100%=0",
        "factor of the peak rates at epochs or percentages of the run, interpolated (linear:) or "
        "constant (step:)",
    )
    whitening_epochs: float = _optimizer.recipe(
        3.0, "epochs in which the whitening bias is trained", low=0, high=1e6
    )
    momentum: float = _optimizer.recipe(0.9, "momentum coefficient of SGD", low=0, high=0.9999)
    nesterov: bool = _optimizer.recipe(False, "Nesterov momentum in SGD")
    muon_momentum: float = _optimizer.recipe(
        0.655, "momentum coefficient of Muon", low=0, high=0.9999
    )
    weight_decay: float = _optimizer.recipe(
        0.0, "weight decay at learning_rate, for all weights alike", low=0
    )
    label_smoothing: float = _optimizer.recipe(
        0.0, "probability spread over all classes in labels", low=0, high=0.9999
    )
    loss: str = _optimizer.recipe(
        "",
        "your own function (labels, logits) that returns the loss of each example, as "
        "path/to/file.py:function",
        check=functools.partial(check_function_name, "loss"),
    )
    ema_decay: float = _optimizer.recipe(
        0.0, "decay of the weights' moving average; 0: none", low=0, high=0.999999
    )
    lookahead: bool = _optimizer.recipe(
        False, "Lookahead: a slow average replaces the weights every five steps"
    )

    eval_every_epochs: float = _reporting.free(
        1.0, "epochs between evaluations; 0: only after the last step", low=0
    )
    tta: bool = _reporting.free(
        False,
        "second evaluation at the end, with test-time augmentation: mirror images and shifts",
        per_run=False,
    )
    summary_every_steps: int = _reporting.free(
        100,
        "steps between summaries, which have scalars ten times as often; 0: only at the last step",
        low=0,
    )
    profile_steps: str = _reporting.free(
        "", "steps to profile, e.g. 100:110 for the ten after step 100; empty: none"
    )
    checkpoint_every_steps: int = _reporting.free(
        0,
        "steps between checkpoints; 0: every half minute and after evaluations, in at most 1 % of "
        "the time",
        low=0,
    )
    keep_checkpoints: int = _reporting.free(3, "number of newest checkpoints to keep", low=1)

    def __post_init__(self):
        super().__post_init__()
        parse_numbers("seeds", self.seeds)
        parse_profile_steps(self.profile_steps)
        schedules.parse_rate_schedule(self.learning_rate_schedule)
        for is_conflict, message in CONFLICTS:
            if is_conflict(self):
                raise UsageError(message.format(**vars(self)))
        if self.num_gpus:
            self.check_shares(self.num_gpus)

    @property
    def examples_drawn(self) -> int:
        """Number of examples that a step draws; it trains on `batch_size` of them."""
        return self.hard_example_pool or self.batch_size

    def run_length(self, steps_per_epoch: int) -> schedules.RunLength:
        """Return the run's length, which `max_steps` may cut short."""
        total = math.ceil(schedules.to_steps(self.epochs, steps_per_epoch))
        last = min(total, self.max_steps) if self.max_steps else total
        return schedules.RunLength(steps_per_epoch, total, last)

    def evaluate_every_steps(self, length: schedules.RunLength) -> int:
        """Return the number of steps between evaluations before the end of a run; 0: none."""
        return (
            max(1, round(self.eval_every_epochs * length.steps_per_epoch))
            if self.eval_every_epochs
            else 0
        )

    @property
    def user_model(self) -> tuple[str, str] | None:
        """The module or file and the function of `model` if it is the user's own; None for a
        built-in model.
        """
        return split_function(self.model)

    @property
    def name(self) -> str:
        """The recipe's name, or the model's without a recipe."""
        return self.recipe or (self.user_model[1] if self.user_model else self.model)

    @property
    def directory(self) -> Path:
        """`train_dir`, or its default."""
        if self.train_dir:
            return Path(self.train_dir)
        name = self.name
        if self.dataset not in ("cifar10", "auto"):
            data = os.path.basename(os.path.abspath(split_path(self.dataset)[1]))
            name += "-" + re.sub(r"\W+", "-", data).strip("-")
        if self.init_from:
            name += f"-from-{os.path.basename(os.path.abspath(self.init_from))}"
        return Path(f"runs/{name}-seed{self.seed}")

    def of_seed(self, seed: int) -> "TrainConfig":
        """Return the config of one of the runs that `seeds` stands for."""
        train_dir = f"{self.train_dir}/seed{seed}" if self.train_dir else ""
        return dataclasses.replace(self, seed=seed, seeds="", train_dir=train_dir)

    def check_shares(self, num_towers: int) -> None:
        """Check that this many towers, and their micro-batches, can share a batch."""
        if uneven := self.describe_uneven_shares(num_towers):
            raise UsageError(uneven)

    def default_num_towers(self, num_devices: int) -> int:
        """Return the largest number of towers on so many devices that can share a batch."""
        for num_towers in range(num_devices, 0, -1):
            if not self.describe_uneven_shares(num_towers):
                return num_towers
        return 1

    def describe_uneven_shares(self, num_towers: int) -> str:
        """Return an error message with the nearest sizes if the batch cannot be divided evenly;
        otherwise empty.
        """
        shares = num_towers * self.micro_batches
        parts = f" in {self.micro_batches} micro-batches each" if self.micro_batches > 1 else ""
        for name in ("batch_size", "hard_example_pool"):
            if (size := getattr(self, name)) % shares:
                nearest = " and ".join(
                    str(near) for near in (size - size % shares, size + -size % shares) if near
                )
                sharers = count(num_towers, "tower") + parts
                return f"{name}={size} cannot be shared by {sharers}; {nearest} can"
        return ""


# Combinations of settings that would silently train something else --------------------------------


def _has_wrong_sizes(config: TrainConfig) -> bool:
    sizes = schedules.ImageSizeSchedule(config.image_size_schedule, config.image_size).points.values
    is_possible = all(
        size == int(size) and MIN_IMAGE_SIZE <= size <= config.image_size for size in sizes
    )
    return not is_possible or sizes[-1] != config.image_size  # the size of evaluation


CONFLICTS: tuple[
    tuple[Callable[[TrainConfig], Any], str], ...
] = (  # (condition, message that may name settings)
    (
        _has_wrong_sizes,
        "image_size_schedule={image_size_schedule}: sizes are whole numbers from "
        f"{MIN_IMAGE_SIZE} to image_size={{image_size}}, which is the last",
    ),
    (lambda c: c.crop > c.image_size, "crop={crop} is larger than image_size={image_size}"),
    (
        lambda c: c.crop and c.image_size_schedule,
        "crop and image_size_schedule both set the image size; give one",
    ),
    (
        lambda c: c.loss and c.label_smoothing,
        "loss={loss} replaces the loss that smooths labels; give --label_smoothing=0",
    ),
    (
        lambda c: c.target_accuracy and not c.eval_every_epochs,
        "target_accuracy is checked at evaluations; give eval_every_epochs too",
    ),
    (lambda c: c.seeds and c.seed, "seed={seed} and seeds={seeds} are both given; give one"),
    (
        lambda c: c.seeds and c.overwrite,
        "overwrite is for one run; delete the directories of seeds={seeds} yourself",
    ),
    (
        lambda c: c.seeds and c.strategy == "multi_worker",
        "strategy=multi_worker trains one run; give one seed at a time",
    ),
    (
        lambda c: c.batch_statistics == "synchronized" and c.micro_batches != 1,
        "batch_statistics=synchronized needs the whole batch at once; leave micro_batches",
    ),
    (
        lambda c: c.jit_compile and c.batch_statistics == "synchronized",
        "jit_compile cannot compile batch_statistics=synchronized; leave it",
    ),
    (
        lambda c: c.jit_compile and c.variable_placement,
        "with jit_compile all variables are on the first tower's device; leave variable_placement",
    ),
    (
        lambda c: c.strategy != "towers" and c.variable_placement not in ("", "cpu"),
        "variable_placement={variable_placement} is for strategy=towers",
    ),
    (
        lambda c: c.strategy != "towers" and c.hard_example_pool,
        "hard_example_pool={hard_example_pool} is for strategy=towers",
    ),
)


# Recipes: the flagfiles in `configs/`, and the settings that decide what is trained ---------------


def recipe_names() -> list[str]:
    """Return the names that `--recipe` takes."""
    return sorted(path.stem for path in RECIPES.glob("*.cfg"))


def recipe_flagfile(name: str) -> Path:
    if name not in recipe_names():
        raise UsageError(f"recipe={name} is not one of {', '.join(recipe_names())}")
    return RECIPES / f"{name}.cfg"


def read_recipe(name: str) -> dict[str, Any]:
    """Return the settings in the file of a recipe, which holds a flag a line; no settings if the
    name is empty.
    """
    types: dict[str, Any] = {field.name: field.type for field in dataclasses.fields(TrainConfig)}
    lines = recipe_flagfile(name).read_text().splitlines() if name else []
    pairs = [line.removeprefix("--").split("=", 1) for line in lines if line.startswith("--")]
    return {key: types[key](*value) if value else True for key, *value in pairs}


def make_config(config_class: type[Config], settings: Mapping[str, Any]) -> Config:
    """Make the config of a program from settings by name, as a command line or a call from Python
    gives them.

    The settings of a training override those of its recipe, which is speed94 unless they name
    another or a model. None stands for the default.

    Raises:
      UsageError: a value is of a wrong type, out of range or in conflict, or a file of the user's
        does not exist.
      TypeError: there is no such setting.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    given |= {name: os.path.expanduser(given[name]) for name in PATHS if name in given}
    for name in ("model", "augment", "loss"):
        find_source(name, given.get(name, ""))
    if issubclass(config_class, TrainConfig):
        recipe = given.setdefault("recipe", "" if "model" in given else DEFAULT_RECIPE)
        given = read_recipe(recipe) | given
    config = config_class(**given)
    check_limits(config)
    return config


def recipe_fields(config: TrainConfig) -> dict[str, Any]:
    """Return the settings that decide what is trained: a resumed run and all workers of a cluster
    have them in common.
    """
    return {name: getattr(config, name) for name in names_with(TrainConfig, on_resume="refuse")}


def shared_settings(config: TrainConfig) -> dict[str, Any]:
    """Return the settings that must be the same on all workers of a cluster."""
    return {name: getattr(config, name) for name in names_with(TrainConfig, per_worker=False)}


def code_digests(
    config: TrainConfig, settings: Sequence[str] = ("model", "augment", "loss")
) -> dict[str, str]:
    """Return the SHA-256 of the files of the user's functions that decide what is trained, by
    setting.
    """
    paths = {setting: find_source(setting, getattr(config, setting)) for setting in settings}
    return {
        setting: hashlib.sha256(path.read_bytes()).hexdigest()
        for setting, path in paths.items()
        if path
    }

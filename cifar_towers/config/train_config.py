"""Every setting of a training run, from which its flags are made.

This module, and all that runs before training starts, must not import TensorFlow, so that a usage
error is immediate. What cannot be used raises a UsageError here and in the modules beside this one;
the message names the setting.
"""

import dataclasses
import functools
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cifar_towers import registry
from cifar_towers.config import schedules
from cifar_towers.config.settings import EXPERIMENT, PROCESS, RECIPE, RUN, SEED, Settings, setting
from cifar_towers.errors import UsageError, count
from cifar_towers.registry import (
    FUNCTIONS,
    MODELS,
    OPTIMIZERS,
    check_function_name,
    split_function,
    split_path,
)

MIN_IMAGE_SIZE = 18  # pixels
PRECISIONS = ("float32", "bfloat16")
PRECISION_HELP = (
    "number format the net computes in; auto: bfloat16 if the hardware computes it faster, "
    "else float32"
)

# The settings of a training -----------------------------------------------------------------------


def parse_numbers(setting: str, text: str) -> tuple[int, ...]:
    """Return the different whole numbers in a text: `"0,1,2"` -> (0, 1, 2)."""
    parts = text.split(",") if text else []
    if not all(part.isdecimal() for part in parts) or len(set(map(int, parts))) < len(parts):
        raise UsageError(f"{setting}={text} must be different whole numbers, e.g. 0,1,2")
    return tuple(map(int, parts))


def parse_profile_steps(text: str) -> tuple[int, int] | None:
    """Return a profile's first step and the step after its last, counted from 0: `"100:110"` ->
    (100, 110).
    """
    first, _, last = text.partition(":")
    if text and not (first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise UsageError(
            f"profile_steps={text!r} must be two steps, the first smaller, e.g. 100:110"
        )
    return (int(first), int(last)) if text else None


@dataclasses.dataclass(frozen=True)
class DeviceSettings(Settings):
    """Settings of the devices that the towers use."""

    title = "Towers"

    num_gpus: int = setting(
        0, "number of towers; 0: one per GPU, or two without GPUs", low=0, scope=EXPERIMENT
    )
    soft_placement: bool = setting(
        True,
        "if there are fewer GPUs than --num_gpus, let several towers share a GPU, or the CPU; "
        "--nosoft_placement makes that an error",
        scope=RUN,
    )
    deterministic: bool = setting(
        False,
        "make GPU runs bit-identical, as CPU runs are without this flag; an operation that has no "
        "deterministic form is then an error",
        scope=EXPERIMENT,
    )


@dataclasses.dataclass(frozen=True)
class TowerSettings(DeviceSettings):
    """Settings of the towers: how they share the work of a training."""

    num_gpus: int = setting(
        0,
        "number of towers (in a cluster, per worker); 0: one per GPU, or two on a CPU (in a "
        "cluster, one); fewer if that number does not divide the batch evenly",
        low=0,
        scope=EXPERIMENT,
    )
    strategy: str = setting(
        "towers",
        "towers: all towers read one set of variables; mirrored: each has a copy of them "
        "(tf.distribute.MirroredStrategy); multi_worker: a copy on each, across several processes",
        choices=("towers", "mirrored", "multi_worker"),
        scope=EXPERIMENT,
    )
    variable_placement: str = setting(
        "",
        "where to put the towers' shared variables: cpu (in host memory), round_robin (on the "
        "towers' devices in turn), or least_loaded (on the device that holds the fewest bytes so "
        "far); default: cpu, or least_loaded for speednets on GPUs; not with --jit_compile",
        choices=("cpu", "round_robin", "least_loaded"),
        scope=EXPERIMENT,
    )
    batch_statistics: str = setting(
        "mean",
        "what batch norm normalizes by: mean (each tower's own part of the batch; moving "
        "statistics are averaged over the towers) or synchronized (the whole batch)",
        choices=("mean", "synchronized"),
    )
    micro_batches: int = setting(
        1,
        "split each tower's share of the batch into this many parts, computed one after another, "
        "to save memory (gradient accumulation)",
        low=1,
    )
    jit_compile: bool = setting(
        False,
        "let XLA compile the augmentation, each tower's forward and backward pass, and the update; "
        "for GPUs",
        scope=EXPERIMENT,
    )
    log_device_placement: bool = setting(
        False, "log the device of each variable and tower", scope=PROCESS
    )


@dataclasses.dataclass(frozen=True)
class RunSettings(Settings):
    """Settings of a run: its recipe, its length and its directory."""

    title = "Run"

    recipe: str = setting(
        "",
        "recipe to train: the name of a file of flags in configs/; default: speed94, unless "
        "--model is given",
        scope=EXPERIMENT,
    )
    train_dir: str = setting(
        "",
        "directory that the run writes to; default: runs/<recipe>-seed<seed>, where data other "
        "than CIFAR-10 adds -<dataset> to the recipe, and --init_from adds -from-<run>",
        scope=PROCESS,
    )
    overwrite: bool = setting(
        False, "delete the run in train_dir, except its exports, and start again", scope=PROCESS
    )
    seed: int = setting(
        0, "seed of data order, augmentation and weights", low=0, high=2**31 - 1, scope=SEED
    )
    seeds: str = setting(
        "",
        "train one run for each seed, e.g. 0,1,2, and print mean and standard deviation; with "
        "--train_dir they go to its folders seed0, seed1, ...",
        scope=RUN,
    )
    init_from: str = setting(
        "",
        "start from the newest weights of the run in this directory, or from their moving averages "
        "if it keeps any; variables of the same name and shape are copied",
    )
    epochs: float = setting(8.0, "number of passes over the training set", low=1e-6, high=1e6)
    max_steps: int = setting(
        0,
        "end the run after N steps and evaluate it; schedules still follow --epochs; 0: no limit",
        low=0,
        scope=EXPERIMENT,
    )
    target_accuracy: float = setting(
        0.0,
        "end the run at the first evaluation without TTA that reaches this accuracy, e.g. 0.93; 0: "
        "never",
        low=0,
        high=1,
        scope=EXPERIMENT,
    )


@dataclasses.dataclass(frozen=True)
class DataSettings(Settings):
    """Settings of the images, and the number of them that a step takes."""

    title = "Data"

    dataset: str = setting(
        "cifar10",
        "data set: cifar10, synthetic, auto (CIFAR-10 if available, otherwise synthetic), "
        "folder:<path> with a subfolder of images for each class, csv:<table> of files and "
        "classes, npz:<file> of NumPy arrays, or any TensorFlow Datasets builder with images and "
        "labels",
        check=registry.check_dataset,
        scope=RUN,
    )
    data_dir: str = setting(
        "",
        "directory of prepared data sets, or of CIFAR-10's own files; default: that of TensorFlow "
        "Datasets, and for CIFAR-10 also Keras's cache and ./data",
        scope=PROCESS,
    )
    validation_examples: int = setting(
        0, "number of training examples held out for validation", low=0
    )
    image_size: int = setting(
        32,
        "height and width in pixels; other images are cropped to the central square and resized",
        low=MIN_IMAGE_SIZE,
        high=256,
    )
    batch_size: int = setting(1536, "number of examples per step, over all towers", low=1)
    flip: str = setting(
        "alternating",
        "mirror training images: none, random, or alternating (each in every other epoch)",
        choices=("none", "random", "alternating"),
    )


@dataclasses.dataclass(frozen=True)
class AugmentationSettings(Settings):
    """Settings of the augmentation of training images, and of every image's normalization."""

    title = "Data"

    shift: int = setting(2, "largest random shift in each direction, in pixels", low=0, high=16)
    shift_fill: str = setting(
        "reflect", "what fills the border of shifted images", choices=("reflect", "zeros")
    )
    crop: int = setting(
        0,
        "height and width of the crop in pixels, random in training and central in evaluation; 0: "
        "no crop",
        low=0,
    )
    image_size_schedule: str = setting(
        "",
        "train on smaller images first: sizes in pixels by epoch or percentage of the run, e.g. "
        "0=24,45%=32 is 24 until 45 % of the run, then 32; empty: always --image_size",
    )
    cutout: int = setting(
        0, "size in pixels of a random square that is blanked in each training image", low=0
    )
    brightness: float = setting(
        0.0,
        "largest random change of brightness, in levels from 0 to 255; without effect with "
        "--standardize=image",
        low=0,
    )
    augment: str = setting(
        "",
        "call your own function (images, draws) or (images, labels, draws) on the normalized "
        "training images, after the built-in augmentation: package.module:function or "
        "path/to/file.py:function",
        check=functools.partial(check_function_name, "augment"),
    )
    contrast: float = setting(
        0.0, "largest random change of contrast, as a fraction", low=0, high=1
    )
    standardize: str = setting(
        "dataset",
        "mean and standard deviation for normalization: the data set's, or each image's own",
        choices=("dataset", "image"),
    )


@dataclasses.dataclass(frozen=True)
class ModelSettings(Settings):
    """Settings of the net."""

    title = "Model"

    model: str = setting(
        "speednet94",
        f"net to train: {', '.join(MODELS)}; or your own function that returns a Keras model, as "
        "package.module:function or path/to/file.py:function",
        check=registry.check_model,
    )
    precision: str = setting("auto", PRECISION_HELP, choices=("auto", *PRECISIONS))


@dataclasses.dataclass(frozen=True)
class OptimizerSettings(Settings):
    """Settings of the loss, and of the update of the weights and their averages."""

    title = "Optimizer"

    optimizer: str = setting(
        "momentum",
        "update rule: momentum (SGD); muon (Muon for all kernels except the last, SGD for the "
        "rest); adamw",
        choices=OPTIMIZERS,
    )
    learning_rate: float = setting(0.1, "peak learning rate", low=0)
    bias_learning_rate: float = setting(
        0.0, "peak rate of biases and norms; 0: the same as --learning_rate", low=0
    )
    head_learning_rate: float = setting(
        0.0, "peak rate of the last layer's kernel; 0: the same as --learning_rate", low=0
    )
    learning_rate_schedule: str = setting(
        "linear:0=1,100%=0",
        "factor of the peak rates by epoch or percentage of the run: linear:0=1,100%=0 falls "
        "evenly to 0; step:0=1,91=0.1 drops to a tenth after epoch 91",
    )
    momentum: float = setting(0.9, "momentum coefficient of SGD", low=0, high=0.9999)
    nesterov: bool = setting(False, "use Nesterov momentum in SGD")
    muon_momentum: float = setting(0.655, "momentum coefficient of Muon", low=0, high=0.9999)
    weight_decay: float = setting(
        0.0,
        "weight decay; for biases and the last layer it is rescaled so that rate times decay is "
        "the same",
        low=0,
    )
    label_smoothing: float = setting(
        0.0,
        "share of each label's probability to spread evenly over all classes",
        low=0,
        high=0.9999,
    )
    loss: str = setting(
        "",
        "train with your own function (labels, logits) that returns the loss of each example: "
        "package.module:function or path/to/file.py:function",
        check=functools.partial(check_function_name, "loss"),
    )
    ema_decay: float = setting(
        0.0,
        "keep a moving average of the weights with this decay per step, and evaluate it; 0: none",
        low=0,
        high=0.999999,
    )
    lookahead: bool = setting(
        False, "every five steps, set the weights to their slow average (Lookahead)"
    )


@dataclasses.dataclass(frozen=True)
class ReportSettings(Settings):
    """Settings of a run's reports: how often it is evaluated, recorded and saved."""

    title = "Reporting"

    eval_every_epochs: float = setting(
        1.0, "epochs between evaluations; 0: only after the last step", low=0, scope=RUN
    )
    tta: bool = setting(
        False,
        "at the end also evaluate with test-time augmentation: mirrored and shifted images",
        scope=EXPERIMENT,
    )
    summary_every_steps: int = setting(
        100,
        "write histograms and images every N steps, and most scalars ten times as often; 0: only "
        "at the last step",
        low=0,
        scope=RUN,
    )
    profile_steps: str = setting(
        "",
        "profile these steps for TensorBoard, e.g. 100:110 for the ten after step 100",
        scope=RUN,
    )
    checkpoint_every_steps: int = setting(
        0,
        "save every N steps; 0: every half minute and after evaluations, unless that takes more "
        "than 1 % of the time",
        low=0,
        scope=RUN,
    )
    keep_checkpoints: int = setting(3, "number of newest checkpoints to keep", low=1, scope=RUN)


@dataclasses.dataclass(frozen=True)
class TrainConfig(  # dataclasses puts the fields of the last base first
    ReportSettings,
    OptimizerSettings,
    ModelSettings,
    AugmentationSettings,
    DataSettings,
    RunSettings,
    TowerSettings,
):
    """Every setting of a training run. Batch sizes and steps are those of all towers together."""

    def __post_init__(self):
        super().__post_init__()
        parse_numbers("seeds", self.seeds)
        parse_profile_steps(self.profile_steps)
        schedules.parse_rate_schedule(self.learning_rate_schedule)
        for is_conflict, message in CONFLICTS:
            if is_conflict(self):
                raise UsageError(message.format(**vars(self)))
        self.check_shares(max(self.num_gpus, 1))

    @property
    def net_image_size(self) -> int:
        """Height and width in pixels of the images that the net is evaluated on."""
        return self.crop or self.image_size

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
        uneven = self.describe_uneven_shares(num_towers)
        if uneven:
            raise UsageError(uneven)

    def default_num_towers(self, num_devices: int) -> int:
        """Return the largest number of towers on so many devices that can share a batch."""
        for num_towers in range(num_devices, 1, -1):
            if not self.describe_uneven_shares(num_towers):
                return num_towers
        return 1

    def describe_uneven_shares(self, num_towers: int) -> str:
        """Return an error message with the nearest sizes if the batch cannot be divided evenly;
        otherwise empty.
        """
        shares = num_towers * self.micro_batches
        parts = f" in {self.micro_batches} micro-batches each" if self.micro_batches > 1 else ""
        if self.batch_size % shares == 0:
            return ""
        smaller = self.batch_size // shares * shares
        larger = smaller + shares
        nearest = f"{smaller} and {larger}" if smaller else f"{larger}"
        sharers = count(num_towers, "tower") + parts
        return f"batch_size={self.batch_size} cannot be divided evenly by {sharers}; {nearest} can"


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
        "image_size_schedule={image_size_schedule}: sizes must be whole numbers from "
        f"{MIN_IMAGE_SIZE} to image_size={{image_size}}, and end with it; --image_size_schedule= "
        "trains at one size",
    ),
    (lambda c: c.crop > c.image_size, "crop={crop} is larger than image_size={image_size}"),
    (lambda c: c.cutout >= c.net_image_size, "cutout={cutout} blanks whole images; give less"),
    (
        lambda c: c.crop and c.image_size_schedule,
        "crop and image_size_schedule both set the image size; add --crop=0 or "
        "--image_size_schedule=",
    ),
    (
        lambda c: c.loss and c.label_smoothing,
        "loss={loss} does not smooth labels; add --label_smoothing=0",
    ),
    (
        lambda c: c.target_accuracy and not c.eval_every_epochs,
        "target_accuracy is checked at evaluations; add --eval_every_epochs=1",
    ),
    (lambda c: c.seeds and c.seed, "seed={seed} and seeds={seeds} are both given; give one"),
    (
        lambda c: c.seeds and c.overwrite,
        "overwrite does not work with seeds={seeds}; delete their directories yourself",
    ),
    (
        lambda c: c.seeds and c.strategy == "multi_worker",
        "strategy=multi_worker trains one run; give one seed at a time",
    ),
    (
        lambda c: c.batch_statistics == "synchronized" and c.micro_batches != 1,
        "batch_statistics=synchronized needs the whole batch at once; leave out micro_batches",
    ),
    (
        lambda c: c.jit_compile and c.batch_statistics == "synchronized",
        "jit_compile cannot compile batch_statistics=synchronized; leave out one of them",
    ),
    (
        lambda c: c.jit_compile and c.variable_placement,
        "with jit_compile all variables are on the first tower's device; leave out "
        "variable_placement",
    ),
    (
        lambda c: c.strategy != "towers" and c.variable_placement,
        "variable_placement={variable_placement} works only with strategy=towers; leave it out",
    ),
)


# What settings decide -----------------------------------------------------------------------------


def names_of(*scopes: str) -> tuple[str, ...]:
    """Return the names of a training's settings that have one of these scopes."""
    fields = dataclasses.fields(TrainConfig)
    return tuple(field.name for field in fields if field.metadata["scope"] in scopes)


PER_RUN = names_of(SEED, RUN, PROCESS)  # settings in which repetitions of one experiment may differ


def recipe_fields(config: TrainConfig) -> dict[str, Any]:
    """Return the settings that decide what is trained: a resumed run and all workers of a cluster
    have them in common.
    """
    return {name: getattr(config, name) for name in names_of(RECIPE, SEED)}


def shared_settings(config: TrainConfig) -> dict[str, Any]:
    """Return the settings that must be the same on all workers of a cluster."""
    return {name: getattr(config, name) for name in names_of(RECIPE, SEED, EXPERIMENT, RUN)}


def code_digests(config: TrainConfig) -> dict[str, str]:
    """Return the SHA-256 of the code of the user's functions that decide what is trained, as
    `<setting>` for the function's file and `<setting>/<file>` for what it imported from its folder;
    see `registry.code_digests`. Load the functions first.
    """
    digests = {}
    for name in FUNCTIONS:
        for file, digest in registry.code_digests(name, getattr(config, name)).items():
            digests[f"{name}/{file}" if file else name] = digest
    return digests


def is_model_unchanged(config: TrainConfig, digests: Mapping[str, str]) -> bool:
    """Return whether the code of the user's model is that of earlier digests."""
    of_model = {}
    for key, digest in digests.items():
        setting_name, _, file = key.partition("/")
        if setting_name == "model":
            of_model[file] = digest
    return registry.is_unchanged("model", config.model, of_model)

"""Every setting of a training run, from which the flags of `train.py` are made, and the recipes that set them.

This module, and all that runs before training starts, must not import TensorFlow, so that a usage error is immediate.
What cannot be used raises a UsageError here and in the modules beside this one; the message names the setting.
"""

import dataclasses
import functools
import math
import os
import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from cifar_towers import registry
from cifar_towers.config import schedules
from cifar_towers.errors import TRAINING_ERRORS, DataError, UsageError, count, describe_exit_codes, did_you_mean
from cifar_towers.registry import BUILT_IN, MODELS, OPTIMIZERS, TTA_LEVELS, model_spec, split_path
from cifar_towers.user_code import check_function_name, split_function

REST = "the rest"  # group of the setting that holds a program's positional arguments
RECIPE = "the recipe"  # group of the setting that holds a TrainConfig; each setting of that config is a flag
MAX_MICRO_BATCHES = 1024  # of a tower's shard
MIN_IMAGE_SIZE = 18  # pixels
MAX_PROFILE_STEPS = 100
RATES = ("bias_learning_rate", "head_learning_rate", "whitening_learning_rate")  # besides learning_rate
MAX_HEAD_RATE_OF_PROXY = 50.0  # speed94 has 554, for the scaled head of its net; speed96, which has a proxy, 0.587
PRECISIONS = ("float32", "bfloat16", "float16")
PRECISION_HELP = "number format the net computes in; auto: bfloat16 if the hardware computes it faster, else float32"
ALL_REDUCE_OF_STRATEGY = {"mirrored": ("nccl", "hierarchical", "one_device"), "multi_worker": ("nccl", "ring")}
ERRORS = (UsageError, DataError)  # of every program that reads data
DEFAULT_RECIPE = "speed94"
PACKAGE = Path(__file__).resolve().parents[1]
# An installed copy has the recipes inside the package, a checkout beside it.
RECIPES = next((place for place in (PACKAGE / "configs", PACKAGE.parent / "configs") if place.is_dir()), PACKAGE)


# A setting: a dataclass field that carries its flag's help, limits and choices ----------------------------------------


def setting(
    default: Any,
    group: str,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: Sequence[str] | None = None,
    check: Callable[[Any], object] | None = None,
    words: Mapping[str, float] | None = None,
    on_resume: Literal["refuse", "allow", "allow_without_batch_norm"] = "refuse",
    per_worker: bool = False,
    per_run: bool = False,
) -> Any:
    """Return a dataclass field with everything that its flag, its validation and its readers need.

    Args:
      check: validates values other than the default.
      words: words that stand for numbers, as {"auto": 0}.
      on_resume: what happens if a run is resumed with another value. `refuse`: the setting belongs to the recipe.
        `allow_without_batch_norm`: it changes the function that is trained if the model has batch normalization.
      per_worker: workers of one cluster may have different values.
      per_run: runs with different values are still repetitions of one experiment, to be averaged.
    """
    return dataclasses.field(default=default, metadata=locals())


def settings_of(group: str, **common: Any) -> Callable[..., Any]:
    """Return `setting` for one section of the help text, whose settings have these options in common."""
    return lambda default, help, **options: setting(default, group, help, **common | options)


class Section:
    """One section of a training's help text. Each of its settings says whether it belongs to the recipe."""

    def __init__(self, group: str, **common: bool):
        self.recipe = settings_of(group, on_resume="refuse", **common)
        self.free = settings_of(group, on_resume="allow", **common)  # a resumed run may have another value


def names_with(config_class: type, **properties: Any) -> tuple[str, ...]:
    """Return the names of the settings with these properties, as `names_with(TrainConfig, on_resume="allow")`."""
    return tuple(
        field.name
        for field in dataclasses.fields(config_class)
        if all(field.metadata[key] == value for key, value in properties.items())
    )


def check_limits(config: Any) -> None:
    """Check every field of a config against its `low`, `high`, `choices` and `check`."""
    for field in dataclasses.fields(config):
        value, limits = getattr(config, field.name), field.metadata
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


def split_names(text: str) -> list[str]:
    """Return the names in a text, each once: `"one,other,one"` -> ["one", "other"]."""
    return list(dict.fromkeys(filter(None, text.split(","))))


def parse_names(setting: str, text: str, known: Sequence[str]) -> list[str]:
    """Return the names in a text, each once."""
    names = split_names(text)
    for name in names:
        if name not in known:
            raise UsageError(f"{setting}={text}: {name!r} is not one of {', '.join(known)}")
    return names


# The settings of a training -------------------------------------------------------------------------------------------


def parse_shares(text: str) -> list[float]:
    """Return the towers' shares of a batch: `"3,1"` -> [3.0, 1.0]; empty for an empty text and for `auto`."""
    if text in ("", "auto"):
        return []
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        shares = [0.0]
    if not all(0 < share < math.inf for share in shares):
        raise UsageError(f"tower_shares={text} must be positive numbers, one a tower, as 3,1; or auto")
    return shares


def parse_seeds(text: str) -> tuple[int, ...]:
    """Return the seeds in a text: `"0,1,2"` -> (0, 1, 2)."""
    try:
        seeds = tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise UsageError(f"seeds={text} is not a list of whole numbers; write --seeds=0,1,2") from None
    if any(not 0 <= seed < 2**31 for seed in seeds) or len(set(seeds)) < len(seeds):
        raise UsageError(f"seeds={text} must be different numbers from 0 to {2**31 - 1}")
    return seeds


def parse_profile_steps(text: str) -> tuple[int, int] | None:
    """Return a profile's first step and the step after its last, counted from 0: `"100:110"` -> (100, 110)."""
    if not text:
        return None
    first, colon, last = text.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise UsageError(f"profile_steps={text!r} is not a first and a later last step; write --profile_steps=100:110")
    if int(last) - int(first) > MAX_PROFILE_STEPS:
        raise UsageError(
            f"profile_steps={text}: a profile takes up to 50 MB of memory a step; give at most {MAX_PROFILE_STEPS}"
        )
    return int(first), int(last)


def _check_sha256(text: str) -> None:
    if text and not re.fullmatch("[0-9a-f]{8,64}", text):
        raise UsageError(f"expect_sha256={text} must be 8 to 64 hexadecimal digits, as a run's last lines have them")


_towers, _run, _data, _model, _optimizer = map(Section, ("Towers", "Run", "Data", "Model", "Optimizer"))
_cluster = Section("Cluster", per_worker=True, per_run=True)
_reporting = Section("Reporting", per_run=True)


@dataclasses.dataclass(frozen=True)
class DeviceConfig:
    """Settings of the devices that the towers use."""

    exit_codes: ClassVar[str] = describe_exit_codes(*ERRORS)

    num_gpus: int = _towers.free(
        0,
        "number of towers (in a cluster: per worker); 0: one per GPU, without GPUs two (in a cluster: one), and fewer "
        "if these cannot divide the batch evenly",
        low=0,
        high=1024,
    )
    soft_placement: bool = _towers.free(True, "logical devices in place of missing GPUs", per_run=True)
    gpu_memory_growth: bool = _towers.free(
        True, "allocation of GPU memory as it is needed, instead of all at the start", per_worker=True, per_run=True
    )
    gpu_memory_limit_mb: int = _towers.free(
        0, "maximum memory on each GPU in MB; 0: no limit", low=0, per_worker=True, per_run=True
    )
    intra_op_threads: int = _towers.free(
        0,
        "threads inside one operation; 0: the cores divided among the CPU towers",
        low=0,
        high=1024,
        per_worker=True,
        per_run=True,
    )
    deterministic: bool = _towers.free(
        False, "bit-identical results guaranteed by TensorFlow, which fails where an operation cannot give them"
    )

    def __post_init__(self):
        check_limits(self)


@dataclasses.dataclass(frozen=True)
class TrainConfig(DeviceConfig):
    """Every setting of a training run. Batch sizes and steps are those of all towers together."""

    exit_codes: ClassVar[str] = describe_exit_codes(
        *ERRORS,
        *TRAINING_ERRORS,
        failure="a bug, an error in your code, no room to save the last checkpoint, or weights that were not expected",
    )

    strategy: str = _towers.free(
        "towers",
        "way to combine gradients: towers share variables; mirrored and multi_worker are replicas of tf.distribute, "
        "each with its own copy of the variables, in one process or in one process per worker",
        choices=("towers", "mirrored", "multi_worker"),  # every strategy trains the same function on as many towers
    )
    variable_placement: str = _towers.free(
        "",
        "device of the towers' shared variables; auto: with GPUs, the fastest one, measured for some seconds; empty: "
        "cpu, except auto for the speednets on GPUs, as their updates are too much work for a host",
        choices=("cpu", "round_robin", "least_loaded", "auto"),
    )
    gradient_device: str = _towers.free(
        "variable",
        "device where the towers' gradients are averaged: each variable's own, or the CPU for all",
        choices=("variable", "cpu"),
    )
    all_reduce: str = _towers.free(
        "auto",
        "all-reduce algorithm of mirrored and multi_worker; auto: NCCL if every tower has a GPU",
        choices=("auto", "nccl", "hierarchical", "one_device", "ring"),
    )
    data_on: str = _towers.free(
        "host",
        "memory of the training images: the host's, or each tower's device (CIFAR-10 takes 154 MB)",
        choices=("host", "device"),
        per_run=True,
    )
    batch_statistics: str = _towers.recipe(
        "mean",
        "statistics of batch normalization: mean over the towers, the final tower's, or synchronized over the batch",
        choices=("mean", "final", "synchronized"),
        on_resume="allow_without_batch_norm",
    )
    tower_shares: str = _towers.free(
        "",
        "each tower's share of the batch, as 3,1, for devices of unequal speed; auto: measured once, for some "
        "seconds; empty: equal shares",
        check=parse_shares,
    )
    micro_batches: int = _towers.recipe(
        1,
        "number of parts in which each tower computes its share of the batch; auto: one, and at least twice as many "
        "after a step that does not fit into memory",
        low=0,
        high=MAX_MICRO_BATCHES,
        words={"auto": 0},
        on_resume="allow_without_batch_norm",
    )
    parallelism: str = _towers.free(
        "data",
        "work split over the devices: data, the batch; model, pipeline stages of the net",
        choices=("data", "model"),
    )
    log_device_placement: bool = _towers.free(
        False, "logged device of each variable and tower", per_worker=True, per_run=True
    )

    workers: str = _cluster.free(
        "", "host:port of every worker of strategy=multi_worker, as a:5000,b:5000; empty: from TF_CONFIG or Slurm"
    )
    worker_index: int = _cluster.free(
        -1, "index of this process; worker 0 writes train_dir; -1: from TF_CONFIG or Slurm's variables", low=-1
    )
    worker_wait_seconds: float = _cluster.free(25.0, "longest wait for all workers at the start, in seconds", low=1)
    allow_public_cluster: bool = _cluster.free(
        False, "permission for worker addresses that the internet reaches; TensorFlow's port has no authentication"
    )

    recipe: str = _run.free(
        "", "recipe to train, a file in configs/; default: speed94, unless --model or --flagfile is given"
    )
    train_dir: str = _run.free(
        "",
        "directory of everything the run writes; default: runs/<recipe>-seed<seed>, with -<dataset> for data other "
        "than CIFAR-10 and dataset=synthetic, and -from-<run> for init_from",
        per_worker=True,
        per_run=True,
    )
    overwrite: bool = _run.free(
        False, "fresh start that deletes the run in train_dir, or those of all seeds", per_worker=True, per_run=True
    )
    seed: int = _run.recipe(0, "seed of data order, augmentation and weights", low=0, high=2**31 - 1, per_run=True)
    seeds: str = _run.free(
        "",
        "seeds of several runs, one after another, as 0,1,2, with mean and standard deviation; with train_dir, each "
        "in a folder of it",
        per_run=True,
    )
    init_from: str = _run.recipe(
        "",
        "directory of a trained run whose newest weights this run starts with; the last layer is new if the classes "
        "are not the same in the same order",
    )
    epochs: float = _run.recipe(8.0, "number of passes over the training set", low=0, high=1e6)
    max_steps: int = _run.free(0, "number of steps after which the run stops and is evaluated; 0: no limit", low=0)
    target_accuracy: float = _run.free(
        0.0, "accuracy without TTA, as a fraction, that stops the run at an evaluation; 0: none", low=0, high=1
    )
    expect_sha256: str = _run.free(
        "",
        "expected SHA-256 of the final raw weights, or its first 8 or more digits; other weights end with an error",
        check=_check_sha256,
        per_run=True,
    )
    max_nonfinite_steps: int = _run.free(
        3, "number of skipped steps (NaN or infinity) in a row that ends a run", low=1, per_run=True
    )
    rollback_on_divergence: bool = _run.free(
        False, "return to the last good checkpoint at half the rates, instead of the end after max_nonfinite_steps"
    )
    verify_every_steps: int = _run.free(
        0, "steps between checks of one tower's bits by another tower; 0: never", low=0, per_run=True
    )

    dataset: str = _data.free(
        "cifar10",
        "data set: cifar10, synthetic, auto (CIFAR-10 if available, otherwise synthetic), folder:<path> with a "
        "subfolder of images for each class, csv:<table> of files and classes, npy:<path> of NumPy arrays, or any "
        "TensorFlow Datasets builder with images and labels",
        check=registry.check_dataset,
        per_run=True,
    )
    data_dir: str = _data.free(
        "",
        "directory of prepared data sets or CIFAR-10's own files, created for a download; default: TFDS_DATA_DIR, or "
        "TensorFlow Datasets' own",
        per_worker=True,
        per_run=True,
    )
    validation_examples: int = _data.recipe(0, "training examples held out for validation", low=0, high=45_000)
    image_size: int = _data.recipe(
        32,
        "height and width of images in pixels; others are cropped to their central square and resized",
        low=MIN_IMAGE_SIZE,
        high=256,
    )
    batch_size: int = _data.recipe(1536, "number of examples per step, over all towers", low=1)
    hard_example_pool: int = _data.recipe(
        0,
        "number of examples drawn per step; the step trains on the batch_size examples with the highest loss under a "
        "small proxy net; 0: off",
        low=0,
    )
    flip: str = _data.recipe(
        "alternating",
        "mirroring of training images: at random, or alternating: each image in every other epoch",
        choices=("none", "random", "alternating"),
    )
    shift: int = _data.recipe(2, "largest random shift in each direction, in pixels", low=0, high=16)
    shift_fill: str = _data.recipe("reflect", "padding of shifted images", choices=("reflect", "zeros"))
    crop: int = _data.recipe(
        0, "height and width of the crop in pixels, random in training and central in evaluation; 0: no crop", low=0
    )
    image_size_schedule: str = _data.recipe(
        "", "size of training images in pixels from an epoch or percentage on, as 0=24,45%=32; empty: image_size"
    )
    cutout: int = _data.recipe(
        0, "height and width in pixels of a random square that is blanked in each training image; 0: none", low=0
    )
    brightness: float = _data.recipe(0.0, "largest random change of brightness, in levels of 255", low=0, high=255)
    augment: str = _data.recipe(
        "",
        "your own function (images, draws) that augments normalized training images further, or (images, labels, "
        "draws), as path/to/file.py:function",
        check=functools.partial(check_function_name, "augment"),
    )
    contrast: float = _data.recipe(0.0, "largest random change of contrast, as a fraction", low=0, high=1)
    standardize: str = _data.recipe(
        "dataset",
        "mean and standard deviation that images are normalized with: the data set's, or each image's own",
        choices=("dataset", "image"),
    )

    model: str = _model.recipe(
        "speednet94",
        f"net to train: {', '.join(MODELS)}; or your own function that returns a Keras model, as "
        "package.module:function or path/to/file.py:function",
        check=registry.check_model,
    )
    precision: str = _model.recipe("auto", PRECISION_HELP, choices=("auto", *PRECISIONS))
    whitening_images: int = _model.recipe(5000, "number of images from which whitening filters are computed", low=12)

    optimizer: str = _optimizer.recipe(
        "momentum",
        "update rule: momentum, SGD; muon, Muon for convolutions and momentum SGD for the rest; adamw, AdamW",
        choices=tuple(OPTIMIZERS),
    )
    learning_rate: float = _optimizer.recipe(0.1, "peak learning rate", low=0)
    bias_learning_rate: float = _optimizer.recipe(
        0.0, "peak learning rate of biases and norms; 0: learning_rate", low=0
    )
    head_learning_rate: float = _optimizer.recipe(
        0.0, "peak learning rate of the kernel to the classes; 0: learning_rate", low=0
    )
    whitening_learning_rate: float = _optimizer.recipe(
        0.0, "peak learning rate of whitening layers' biases; 0: bias_learning_rate", low=0
    )
    learning_rate_schedule: str = _optimizer.recipe(
        "linear:0=1,100%=0",
        "factor of the peak rates at epochs or percentages of the run, interpolated (linear:) or constant (step:)",
    )
    whitening_epochs: float = _optimizer.recipe(3.0, "epochs in which the whitening bias is trained", low=0, high=1e6)
    freeze_first_group: float = _optimizer.recipe(
        0.0,
        "fraction of the run after which the first group of convolutions is frozen; the learning rate schedule of the "
        "group is compressed into that fraction; 0: never",
        low=0,
        high=1,
    )
    momentum: float = _optimizer.recipe(0.9, "momentum coefficient of SGD", low=0, high=0.9999)
    nesterov: bool = _optimizer.recipe(False, "Nesterov momentum in SGD")
    muon_momentum: float = _optimizer.recipe(0.655, "momentum coefficient of Muon", low=0, high=0.9999)
    weight_decay: float = _optimizer.recipe(
        0.0, "weight decay at learning_rate; all weights of one update rule decay by the same fraction per step", low=0
    )
    label_smoothing: float = _optimizer.recipe(
        0.0, "probability that is spread over all classes in training labels", low=0, high=0.9999
    )
    loss: str = _optimizer.recipe(
        "",
        "your own function (labels, logits) that returns the loss of each example, in place of the cross entropy, as "
        "path/to/file.py:function",
        check=functools.partial(check_function_name, "loss"),
    )
    ema_decay: float = _optimizer.recipe(
        0.0, "decay factor of the weights' exponential moving average; 0: no average", low=0, high=0.999999
    )
    lookahead: bool = _optimizer.recipe(
        False, "Lookahead: every five steps the weights are replaced by a slow average of themselves"
    )

    eval_every_epochs: float = _reporting.free(1.0, "epochs between evaluations; 0: only after the last step", low=0)
    tta: int = _reporting.free(
        0,
        f"level of test-time augmentation in the final evaluation: {registry.TTA_HELP}",
        low=0,
        high=max(TTA_LEVELS),
        per_run=False,
    )
    summary_every_steps: int = _reporting.free(
        100, "steps between full summaries; scalars are written ten times as often; 0: only at the last step", low=0
    )
    profile_steps: str = _reporting.free("", "steps to profile, as 100:110 for the ten after step 100; empty: none")
    checkpoint_every_steps: int = _reporting.free(
        0, "steps between checkpoints; 0: every half minute and after evaluations, in at most 1 % of the time", low=0
    )
    keep_checkpoints: int = _reporting.free(3, "number of newest checkpoints to keep", low=1)

    def __post_init__(self):
        super().__post_init__()
        parse_seeds(self.seeds)
        parse_profile_steps(self.profile_steps)
        schedules.parse_rate_schedule(self.learning_rate_schedule)
        _check_model(self)
        _check_images(self)
        _check_run(self)
        _check_parallelism(self)
        if self.num_gpus:
            self.check_shares(self.num_gpus)

    @property
    def examples_drawn(self) -> int:
        """Number of examples that a step draws; it trains on `batch_size` of them."""
        return self.hard_example_pool or self.batch_size

    def run_length(self, steps_per_epoch: int) -> schedules.RunLength:
        """Return the run's length, which `max_steps` may cut short."""
        total = max(math.ceil(schedules.to_steps(self.epochs, steps_per_epoch)), self.epochs > 0) or self.max_steps
        return schedules.RunLength(steps_per_epoch, total, min(total, self.max_steps or total))

    def evaluate_every_steps(self, length: schedules.RunLength) -> int:
        """Return the number of steps between evaluations before the end of a run; 0: none."""
        return max(1, round(self.eval_every_epochs * length.steps_per_epoch)) if self.eval_every_epochs else 0

    @property
    def user_model(self) -> tuple[str, str] | None:
        """The module or file and the function of `model` if it is the user's own; None for a built-in model."""
        return split_function(self.model)

    @property
    def name(self) -> str:
        """The recipe's name, or the model's without a recipe."""
        return self.recipe or (self.user_model[1] if self.user_model else self.model)

    @property
    def directory(self) -> Path:
        """`train_dir`, or its default."""
        data = os.path.basename(os.path.abspath(split_path(self.dataset)[1]))
        suffix = "" if self.dataset in BUILT_IN else "-" + re.sub(r"\W+", "-", data).strip("-")
        suffix += f"-from-{os.path.basename(os.path.abspath(self.init_from))}" * bool(self.init_from)
        return Path(self.train_dir or f"runs/{self.name}{suffix}-seed{self.seed}")

    def of_seed(self, seed: int) -> "TrainConfig":
        """Return the config of one of the runs that `seeds` stands for."""
        train_dir = f"{self.train_dir}/seed{seed}" if self.train_dir else ""
        return dataclasses.replace(self, seed=seed, seeds="", train_dir=train_dir)

    def num_towers(self, num_devices: int) -> int:
        """Return the number of towers on so many devices: one if the devices hold stages of the model."""
        return num_devices if self.parallelism == "data" else 1

    def check_shares(self, num_devices: int) -> None:
        """Check that the towers on this many devices, and their micro-batches, can share a batch."""
        num_towers = self.num_towers(num_devices)
        if not self.tower_shares:
            if uneven := self._describe_uneven_shares(num_towers):
                raise UsageError(uneven)
            return
        num_shares = len(parse_shares(self.tower_shares)) or num_towers  # of auto
        if num_shares != num_towers:
            raise UsageError(f"tower_shares={self.tower_shares} are of {num_shares} towers, and there are {num_towers}")
        parts = self.micro_batches or 1
        for examples in filter(None, (self.batch_size, self.hard_example_pool)):
            if examples % parts or examples // parts < num_shares:
                multiples = f" in multiples of {parts}" if parts > 1 else ""
                raise UsageError(f"tower_shares={self.tower_shares}: {examples} examples cannot be shared{multiples}")

    def default_num_towers(self, num_devices: int) -> tuple[int, str]:
        """Return (the largest number of towers that can share a batch, the reason if it is below `num_devices`)."""
        if self.tower_shares:
            return len(parse_shares(self.tower_shares)) or num_devices, ""
        reason = self._describe_uneven_shares(num_devices)
        even = [towers for towers in range(1, num_devices) if not self._describe_uneven_shares(towers)]
        return (even[-1], reason) if reason and even and self.parallelism == "data" else (num_devices, "")

    def _describe_uneven_shares(self, num_towers: int) -> str:
        """Return an error message with the nearest sizes if the batch cannot be divided evenly; otherwise empty."""
        shares = num_towers * (self.micro_batches or 1)
        for name, minimum in (("batch_size", 0), ("hard_example_pool", self.batch_size)):
            size = getattr(self, name)
            if size % shares:
                low = size // shares * shares
                nearest = " and ".join(str(size) for size in (low, low + shares) if size > minimum)
                towers = count(num_towers, "tower")
                towers += f" in {self.micro_batches} micro-batches each" if self.micro_batches > 1 else ""
                return f"{name}={size} cannot be shared by {towers}; {nearest} can"
        return ""


# Combinations of settings that cannot be used together ----------------------------------------------------------------


def _check_images(config: TrainConfig) -> None:
    size, schedule = config.image_size, config.image_size_schedule
    sizes = schedules.ImageSizeSchedule(schedule, size).points.values
    for image_size in sizes:
        if image_size != int(image_size) or not MIN_IMAGE_SIZE <= image_size <= size:
            raise UsageError(
                f"image_size_schedule={schedule}: sizes must be whole numbers from {MIN_IMAGE_SIZE} to {size}; let it "
                f"end with {size}, or leave it empty: --image_size_schedule="
            )
    if config.crop and not MIN_IMAGE_SIZE <= config.crop <= size:
        raise UsageError(f"crop={config.crop} is not a size from {MIN_IMAGE_SIZE} to {size} pixels, or 0 for no crop")
    if config.crop and schedule:
        raise UsageError(f"crop={config.crop} and image_size_schedule={schedule} both set the image size; give one")
    if sizes[-1] != size:
        raise UsageError(
            f"image_size_schedule={schedule} ends with {sizes[-1]:g} pixels, and the net is evaluated on "
            f"image_size={size}; let it end with {size}, or leave it empty: --image_size_schedule="
        )
    image_size = config.crop or size
    if config.cutout > image_size:
        raise UsageError(f"cutout={config.cutout} is larger than the {image_size} pixels of the image it would blank")
    if 0 < config.hard_example_pool <= config.batch_size:
        raise UsageError(
            f"hard_example_pool={config.hard_example_pool} must be larger than batch_size={config.batch_size}, the "
            "number of examples that a step trains on; or 0 for none"
        )


def _check_model(config: TrainConfig) -> None:
    spec = model_spec(config.model)
    if config.image_size_schedule and not spec.any_image_size:
        raise UsageError(f"model={config.model} takes images of one size; leave image_size_schedule empty")
    if config.freeze_first_group and not spec.is_speednet:
        raise UsageError(f"model={config.model} has no groups of convolutions; leave freeze_first_group at 0")
    if config.optimizer == "muon" and not spec.muon:
        tried = ", ".join(name for name, other in MODELS.items() if other.muon)
        raise UsageError(f"optimizer=muon is for {tried}; choose momentum or adamw for {config.model}")
    if config.loss and config.label_smoothing:
        raise UsageError(f"loss={config.loss} replaces the loss that smooths labels; give --label_smoothing=0")


def _check_run(config: TrainConfig) -> None:
    if config.target_accuracy and not config.eval_every_epochs:
        raise UsageError("target_accuracy is checked at evaluations; give eval_every_epochs too")
    if config.seeds and config.seed:
        raise UsageError(f"seed={config.seed} and seeds={config.seeds} are both given; give one")
    if config.seeds and config.strategy == "multi_worker":
        raise UsageError("strategy=multi_worker trains one run; give one seed at a time")
    if config.expect_sha256 and config.seeds:
        raise UsageError("expect_sha256 is of one run, and seeds are several; give one seed at a time")
    if config.verify_every_steps and (config.hard_example_pool or config.batch_statistics == "synchronized"):
        raise UsageError("verify_every_steps repeats one tower alone; leave hard_example_pool, synchronized statistics")
    if config.epochs == 0 and config.max_steps == 0:
        raise UsageError("epochs=0 and max_steps=0 leave nothing to do; give one of them")
    cluster = names_with(TrainConfig, group="Cluster")
    given = [name for name in cluster if getattr(config, name) != getattr(TrainConfig, name)]
    if given and config.strategy != "multi_worker":
        raise UsageError(f"{' and '.join(given)}: only with --strategy=multi_worker; give it too, or leave them out")


def _check_parallelism(config: TrainConfig) -> None:
    strategy, has_stages = config.strategy, config.parallelism == "model"
    for name, advice in (("variable_placement", "choose a placement"), ("tower_shares", "give shares, as 3,1")):
        if config.deterministic and getattr(config, name) == "auto":
            raise UsageError(f"{name}=auto depends on timing, which deterministic rules out; {advice}")
    if config.micro_batches == 0 and strategy == "multi_worker":
        raise UsageError("micro_batches=auto is for one process; give a number, as --micro_batches=2")
    if config.batch_statistics == "synchronized" and (config.micro_batches != 1 or has_stages):
        other = "micro_batches" if config.micro_batches != 1 else "parallelism=model"
        raise UsageError(f"batch_statistics=synchronized needs the whole batch at once; leave {other}")
    if has_stages and strategy != "towers":
        raise UsageError(f"parallelism=model has one copy of the model; leave strategy={strategy}")
    if config.all_reduce not in ("auto", *ALL_REDUCE_OF_STRATEGY.get(strategy, ())):
        fitting = [name for name, algorithms in ALL_REDUCE_OF_STRATEGY.items() if config.all_reduce in algorithms]
        raise UsageError(f"all_reduce={config.all_reduce} is for strategy={' and '.join(fitting)}")
    if strategy == "towers" and not has_stages:
        return
    other = "parallelism=model" if has_stages else f"strategy={strategy}"
    if config.variable_placement not in ("", "cpu") or config.gradient_device != "variable":
        keeps = f"{other} keeps every variable on every device"
        if has_stages:
            keeps = f"{other} keeps each variable and its gradient on the device of its stage"
        raise UsageError(f"{keeps}; leave variable_placement and gradient_device")
    for name, off in (("tower_shares", ""), ("hard_example_pool", 0), ("data_on", "host"), ("verify_every_steps", 0)):
        if (value := getattr(config, name)) != off:
            raise UsageError(f"{name}={value} is for towers that share the batch; leave it, or {other}")


def check_training(config: TrainConfig) -> None:
    """Refuse settings that are valid together but train or evaluate badly."""
    limit = OPTIMIZERS[config.optimizer].rate_limit
    if rates := [name for name in ("learning_rate", *RATES) if getattr(config, name) >= limit]:
        raise UsageError(
            f"optimizer={config.optimizer} changes each weight by about its rate in a step, and {rates[0]}="
            f"{getattr(config, rates[0])} is too large for that; give one as --{rates[0]}=0.001"
        )
    if config.flip == "none" and config.tta:
        raise UsageError(f"tta={config.tta} averages over mirrored images, and flip=none leaves them out; give --tta=0")
    if config.hard_example_pool and config.head_learning_rate > MAX_HEAD_RATE_OF_PROXY:
        raise UsageError(
            f"hard_example_pool: the proxy net trains at the rates of model={config.model}, and head_learning_rate="
            f"{config.head_learning_rate:g} is far too high for it; take another recipe, as --recipe=speed95"
        )


# Recipes: the flagfiles in `configs/`, and the settings that decide what is trained -----------------------------------


def recipe_names() -> list[str]:
    """Return the names that `--recipe` takes."""
    return sorted(path.stem for path in RECIPES.glob("*.cfg"))


def recipe_flagfile(name: str) -> Path:
    known = recipe_names()
    if name in known:
        return RECIPES / f"{name}.cfg"
    if Path(name).is_file():
        raise UsageError(f"recipe={name} is a file, and no name of a recipe; write {shlex.quote(f'--flagfile={name}')}")
    raise UsageError(f"there is no recipe {name}; {did_you_mean(name, known)}the recipes are {', '.join(known)}")


def check_overrides(
    recipe: str, of_recipe: Mapping[str, Any], values: Mapping[str, Any], given: Collection[str]
) -> None:
    """Refuse a flag that changes, say, the model of a recipe while settings tuned for the old model stay.

    Those must be given too.

    Args:
      of_recipe, values: settings by name, without and with the flags. given: names of the flags.
    """
    for cause, dependent, hint in (
        ("model", RATES, " (0: as learning_rate)"),
        ("optimizer", RATES if OPTIMIZERS[values["optimizer"]].rate_limit < math.inf else (), " (0: as learning_rate)"),
        ("optimizer", ("learning_rate",), ""),
        ("batch_size", ("hard_example_pool",), " (0: all examples)"),
        ("image_size", ("crop",), " (0: whole images)"),
    ):
        left = [name for name in dependent if of_recipe[name] and name not in given]
        if left and values[cause] != of_recipe[cause]:
            has = " and ".join(f"{name}={of_recipe[name]}" for name in left)
            raise UsageError(
                f"recipe={recipe} has {has} for {cause}={of_recipe[cause]}; with {cause}={values[cause]} give "
                f"{' '.join(f'--{name}=...' for name in left)} too{hint}"
            )


def recipes_of_model(model: str) -> list[str]:
    """Return the names of the recipes that train a model."""
    return [name for name in recipe_names() if f"--model={model}\n" in recipe_flagfile(name).read_text()]


def claimed_accuracy(name: str) -> str:
    """Return the accuracy that the header of a recipe's file states; empty if it was not measured."""
    measured = re.search(r"^# Measured: (.*)$", recipe_flagfile(name).read_text(), re.M)
    return measured[1] if measured else ""


def recipe_fields(config: TrainConfig) -> dict[str, Any]:
    """Return the settings that decide what is trained: a resumed run and all workers of a cluster have them in common.

    `max_steps` belongs to the recipe if a schedule depends on the length of the run.
    """
    by_length = "%" in config.learning_rate_schedule + config.image_size_schedule or config.lookahead
    by_length |= OPTIMIZERS[config.optimizer].by_length or config.freeze_first_group > 0
    left_out = set(names_with(TrainConfig, on_resume="allow"))
    if config.epochs == 0 and by_length:
        left_out -= {"max_steps"}
    return {name: value for name, value in dataclasses.asdict(config).items() if name not in left_out}


def differing_settings(config: TrainConfig, saved: Mapping[str, Any], has_batch_norm: bool) -> list[str]:
    """Return the settings because of which a run may not be resumed, each as `name saved value -> value now`.

    Args:
      saved: `recipe_fields` of the run so far. A setting that is missing there had its default value.
      has_batch_norm: whether the net has batch normalization; some settings change what is trained only there.
    """
    conditional = names_with(TrainConfig, on_resume="allow_without_batch_norm")
    defaults = {name: value for name, value in recipe_fields(TrainConfig()).items() if name not in conditional}
    unknown = [f"{name} {value} -> no longer a setting" for name, value in saved.items() if not hasattr(config, name)]
    saved, current = {**defaults, **saved}, recipe_fields(config)
    compared = [name for name in current if name in saved and (has_batch_norm or name not in conditional)]
    return unknown + [f"{name} {saved[name]} -> {current[name]}" for name in compared if saved[name] != current[name]]


def shared_settings(config: TrainConfig) -> dict[str, Any]:
    """Return the settings that must be the same on all workers of a cluster."""
    return {name: getattr(config, name) for name in names_with(TrainConfig, per_worker=False)}

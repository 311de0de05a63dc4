"""Every setting of a training run: its name, default, help and limits; the flags of `train.py` are made from here.

This module, and all that runs before training starts, must not import TensorFlow: a usage error answers at once.
"""

import dataclasses
import math
import os
import re
from pathlib import Path
from typing import Any, ClassVar

from cifar_towers.config import schedules
from cifar_towers.config.settings import check_limits, names_with, setting
from cifar_towers.errors import UsageError
from cifar_towers.registry import (
    BUILT_IN,
    FOLDER,
    MODELS,
    TTA_LEVELS,
    check_dataset,
    check_model,
    describe_tta_levels,
    split_own_model,
)

MOST_TRACED = 100  # steps of a profile
MOST_PARTS = 1024  # of a tower's share of the batch


@dataclasses.dataclass(frozen=True)
class DeviceConfig:
    """Which devices the towers use."""

    exit_codes: ClassVar[str] = "0 done, 2 usage, 3 data, 130 and 143 interrupted, 1 a bug"
    num_gpus: int = setting(
        0,
        "Towers",
        "how many towers; 0: one for each GPU, or two on the CPU where there is none, or as many of these as can share "
        "the batch evenly (a worker of a cluster: one)",
        low=0,
        high=1024,
        on_resume="allow",
    )
    soft_placement: bool = setting(True, "Towers", "let logical devices stand in for missing GPUs", on_resume="allow")
    log_device_placement: bool = setting(
        False, "Towers", "print each variable's and each tower's device", on_resume="allow", per_worker=True
    )
    gpu_memory_growth: bool = setting(
        True, "Towers", "take GPU memory as it is needed", on_resume="allow", per_worker=True
    )
    gpu_memory_limit_mb: int = setting(
        0, "Towers", "most memory to use on each GPU, in MB; 0: no limit", low=0, on_resume="allow", per_worker=True
    )
    intra_op_threads: int = setting(
        0,
        "Towers",
        "threads inside one operation; 0: the cores, shared among the CPU towers",
        low=0,
        high=1024,
        on_resume="allow",
        per_worker=True,
    )

    deterministic: bool = setting(
        False,
        "Towers",
        "let TensorFlow guarantee the same bits each time, or fail where an operation cannot",
        on_resume="allow",
    )

    def __post_init__(self):
        check_limits(self)

    def default_num_towers(self, devices: int) -> tuple[int, str]:
        """How many towers to have where there are so many devices and no number was asked for; why no more."""
        return devices, ""


@dataclasses.dataclass(frozen=True)
class TrainConfig(DeviceConfig):
    """Every setting of a training run. Sizes are global; times are in steps or epochs, never per tower."""

    exit_codes: ClassVar[str] = (
        "0 done, 2 usage, 3 data, 4 diverged, 5 a worker was lost, 130 and 143 interrupted, 1 a bug or no room to save"
    )

    strategy: str = setting(
        "towers",
        "Towers",
        "who combines: towers that share variables, or tf.distribute's replicas with a copy each, in one process or in "
        "those of several workers",
        choices=("towers", "mirrored", "multi_worker"),
        on_resume="allow_without_batch_norm",
    )
    variable_placement: str = setting(
        "cpu",
        "Towers",
        "where the towers' shared variables live; auto: measures for some seconds and takes the fastest",
        choices=("cpu", "round_robin", "least_loaded", "auto"),
        on_resume="allow",
    )
    gradient_device: str = setting(
        "variable",
        "Towers",
        "where the towers' gradients are averaged: beside each variable, or all on the CPU",
        choices=("variable", "cpu"),
        on_resume="allow",
    )
    all_reduce: str = setting(
        "auto",
        "Towers",
        "how the gradients of mirrored and multi_worker meet; auto: NCCL where every tower has a GPU",
        choices=("auto", "nccl", "hierarchical", "one_device", "ring"),
        on_resume="allow",
    )
    batch_statistics: str = setting(
        "mean",
        "Towers",
        "batch norm's: the mean of the towers', the final tower's, or synchronized, of the whole batch",
        choices=("mean", "final", "synchronized"),
        on_resume="allow_without_batch_norm",
    )
    micro_batches: int = setting(
        1,
        "Towers",
        "parts that each tower takes its share of the batch in",
        low=1,
        high=MOST_PARTS,
        on_resume="allow_without_batch_norm",
    )
    parallelism: str = setting(
        "data",
        "Towers",
        "what is split over the devices: the batch, or the model in stages that every batch passes through",
        choices=("data", "model"),
        on_resume="allow",
    )

    workers: str = setting(
        "",
        "Cluster",
        "host:port of every worker of strategy=multi_worker; by default what TF_CONFIG or Slurm's variables say",
        on_resume="allow",
        per_worker=True,
        per_run=True,
    )
    worker_index: int = setting(
        -1,
        "Cluster",
        "which of them this is; 0 writes the run's directory",
        low=-1,
        on_resume="allow",
        per_worker=True,
        per_run=True,
    )
    worker_wait_seconds: float = setting(
        25.0,
        "Cluster",
        "how long to wait for all of them at the start",
        low=1,
        on_resume="allow",
        per_worker=True,
        per_run=True,
    )
    allow_public_cluster: bool = setting(
        False,
        "Cluster",
        "open ports at addresses that the internet may reach, which TensorFlow does not guard",
        on_resume="allow",
        per_worker=True,
        per_run=True,
    )

    recipe: str = setting("", "Run", "name of the run's recipe; by default the flagfile's", on_resume="allow")
    train_dir: str = setting(
        "",
        "Run",
        "where the run writes everything; by default runs/<recipe>-seed<seed>, on data that are neither CIFAR-10 nor "
        "--dataset=synthetic runs/<recipe>-<dataset>-seed<seed>",
        on_resume="allow",
        per_worker=True,
        per_run=True,
    )
    overwrite: bool = setting(
        False,
        "Run",
        "delete what train_dir holds of an earlier run and start again",
        on_resume="allow",
        per_worker=True,
        per_run=True,
    )
    seed: int = setting(
        0, "Run", "what order, augmentation and first weights follow from", low=0, high=2**31 - 1, per_run=True
    )
    seeds: str = setting(
        "",
        "Run",
        "several seeds, as 0,1,2: one run each, then mean and standard deviation",
        on_resume="allow",
        per_run=True,
    )
    epochs: float = setting(8.0, "Run", "passes over the training set", low=0, high=1e6)
    max_steps: int = setting(
        0, "Run", "stop after this many steps, whatever the epochs say; 0: no limit", low=0, on_resume="allow"
    )
    target_accuracy: float = setting(
        0.0,
        "Run",
        "stop at the first evaluation, without TTA, that reaches this fraction; 0: never",
        low=0,
        high=1,
        on_resume="allow",
    )

    max_nonfinite_steps: int = setting(
        3,
        "Run",
        "this many steps in a row without an update, as a number is not finite, end the run",
        low=1,
        on_resume="allow",
    )
    rollback_on_divergence: bool = setting(
        False,
        "Run",
        "after these, go back to the last good checkpoint and on with half the rates",
        on_resume="allow",
    )

    dataset: str = setting(
        "cifar10",
        "Data",
        "cifar10, synthetic, auto (CIFAR-10 if it can be had, else synthetic), folder:<path> with a subfolder of "
        "pictures for each class, or any of TensorFlow Datasets with images and labels",
        check=check_dataset,
        on_resume="allow",
        per_run=True,
    )
    data_dir: str = setting(
        "",
        "Data",
        "where the prepared data sets are; by default TFDS_DATA_DIR, or TFDS's own",
        on_resume="allow",
        per_worker=True,
        per_run=True,
    )
    validation_examples: int = setting(
        0, "Data", "training examples held out to choose by; 0: none", low=0, high=45_000
    )
    image_size: int = setting(
        32,
        "Data",
        "side in pixels; pictures of other sizes are resized to it, from their central square",
        low=18,
        high=256,
    )
    batch_size: int = setting(1536, "Data", "examples a step, all towers together", low=1)
    hard_example_pool: int = setting(
        0,
        "Data",
        "draw so many examples a step, and train on the batch_size of them that a small net beside has the highest "
        "losses on; 0: train on all that are drawn",
        low=0,
    )
    flip: str = setting(
        "alternating",
        "Data",
        "mirror images: at random, or every image in every other epoch",
        choices=("none", "random", "alternating"),
    )
    shift: int = setting(2, "Data", "largest random shift in pixels, each way", low=0, high=16)
    shift_fill: str = setting("reflect", "Data", "what a shift brings in from outside", choices=("reflect", "zeros"))
    crop: int = setting(0, "Data", "side of the crop a net sees, random in training, central after; 0: all", low=0)
    image_size_schedule: str = setting(
        "", "Data", "train on images shrunk to these sides, as 0=24,45%=32: from which part of the run; empty: never"
    )
    cutout: int = setting(0, "Data", "side of the square that is blanked in each image", low=0)
    brightness: float = setting(0.0, "Data", "largest random change of brightness, in levels of 255", low=0, high=255)
    contrast: float = setting(0.0, "Data", "largest random change of contrast, as a fraction", low=0, high=1)
    standardize: str = setting(
        "dataset",
        "Data",
        "mean and deviation to normalise by: the data set's, or each image's own",
        choices=("dataset", "image"),
    )

    model: str = setting(
        "speednet94",
        "Model",
        f"{', '.join(MODELS)}; or your own function that returns a Keras model, as package.module:function or "
        "path/to/file.py:function",
        check=check_model,
    )
    precision: str = setting(
        "auto",
        "Model",
        "what the towers compute in; auto: bfloat16 where it is native, else float32",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    whitening_images: int = setting(5000, "Model", "training images the whitening filters come from", low=12)

    optimizer: str = setting(
        "momentum",
        "Optimizer",
        "muon: for convolutions, with momentum SGD for the rest",
        choices=("momentum", "muon", "adamw"),
    )
    learning_rate: float = setting(0.1, "Optimizer", "peak rate for the mean loss", low=0)
    bias_learning_rate: float = setting(0.0, "Optimizer", "for biases and norm shifts; 0: as learning_rate", low=0)
    head_learning_rate: float = setting(0.0, "Optimizer", "for the last layer; 0: as learning_rate", low=0)
    whitening_learning_rate: float = setting(
        0.0, "Optimizer", "for the bias of a whitening layer; 0: as bias_learning_rate", low=0
    )
    learning_rate_schedule: str = setting(
        "linear:0=1,100%=0",
        "Optimizer",
        "factor of the peak rates at epochs or percents of the run, `linear` between them or in a `step` at each",
    )
    whitening_epochs: float = setting(
        3.0, "Optimizer", "epochs in which the whitening bias is trained", low=0, high=1e6
    )
    momentum: float = setting(0.9, "Optimizer", "of SGD", low=0, high=0.9999)
    nesterov: bool = setting(False, "Optimizer", "Nesterov's form of momentum")
    muon_momentum: float = setting(0.655, "Optimizer", "of Muon", low=0, high=0.9999)
    weight_decay: float = setting(
        0.0, "Optimizer", "decay at learning_rate; groups with another rate lose the same fraction a step", low=0
    )
    label_smoothing: float = setting(0.0, "Optimizer", "spread over all classes", low=0, high=0.9999)
    ema_decay: float = setting(0.0, "Optimizer", "of the weights' moving average; 0: none", low=0, high=0.999999)
    lookahead: bool = setting(False, "Optimizer", "pull the weights to their moving average every five steps")

    eval_every_epochs: float = setting(
        1.0, "Reporting", "epochs between evaluations; 0: only the last", low=0, on_resume="allow", per_run=True
    )
    tta: int = setting(
        0,
        "Reporting",
        f"test-time augmentation at the end: {describe_tta_levels()}",
        low=0,
        high=max(TTA_LEVELS),
        on_resume="allow",
    )
    summary_every_steps: int = setting(
        100,
        "Reporting",
        "steps between whole summaries; scalars and records come ten times as often; 0: only of the last step",
        low=0,
        on_resume="allow",
        per_run=True,
    )
    profile_steps: str = setting(
        "",
        "Reporting",
        "trace these steps, as 100:110 for ten from the 101st on, and say where their time goes",
        on_resume="allow",
        per_run=True,
    )
    checkpoint_every_steps: int = setting(
        0,
        "Reporting",
        "steps between checkpoints; 0: every half minute and after evaluations, for at most 1 % of the time",
        low=0,
        on_resume="allow",
        per_run=True,
    )
    keep_checkpoints: int = setting(
        3, "Reporting", "how many of the newest to keep", low=1, on_resume="allow", per_run=True
    )

    def __post_init__(self):
        super().__post_init__()
        parse_seeds(self.seeds)
        parse_window(self.profile_steps)
        schedules.parse_rate(self.learning_rate_schedule)
        for side in schedules.ImageSizeSchedule(self.image_size_schedule, self.image_size).points.values:
            if side != int(side) or not 18 <= side <= self.image_size:
                raise UsageError(
                    f"image_size_schedule={self.image_size_schedule}: "
                    f"sides are whole numbers from 18 to {self.image_size}"
                )
        if self.num_gpus:
            self.tower_batch_size(self.num_gpus)
        self._check_towers()
        if 0 < self.hard_example_pool <= self.batch_size:
            raise UsageError(
                f"hard_example_pool={self.hard_example_pool} is no more than batch_size={self.batch_size}, "
                "the number of them a step trains on; give more, or 0"
            )
        if self.crop and not (18 <= self.crop <= self.image_size):
            raise UsageError(
                f"crop={self.crop} is not a side from 18 to {self.image_size} pixels, or 0 for the whole image"
            )
        if self.crop and self.image_size_schedule:
            raise UsageError(
                f"crop={self.crop} and "
                f"image_size_schedule={self.image_size_schedule} both set the image's side; give one"
            )
        if self.cutout > (self.crop or self.image_size):
            side = self.crop or self.image_size
            raise UsageError(f"cutout={self.cutout} is larger than the {side} pixels of the image it would blank")
        if self.target_accuracy and not self.eval_every_epochs:
            raise UsageError("target_accuracy is looked for at evaluations; give eval_every_epochs too")
        if self.seeds and self.seed:
            raise UsageError(f"seed={self.seed} and seeds={self.seeds} are both given; give one")
        if self.model == "cifarnet" and self.image_size_schedule:
            raise UsageError("model=cifarnet has dense layers for one size of image; leave image_size_schedule empty")
        if self.own_model and self.image_size_schedule:
            raise UsageError(f"model={self.model} is made for images of one size; leave image_size_schedule empty")
        if self.optimizer == "muon" and not self.model.startswith("speednet"):
            raise UsageError(f"optimizer=muon is made for the speednets; take momentum or adamw for {self.model}")
        if self.epochs == 0 and self.max_steps == 0:
            raise UsageError("epochs=0 and max_steps=0 leave nothing to do; give one of them")

    def _check_towers(self) -> None:
        if self.deterministic and self.variable_placement == "auto":
            raise UsageError("variable_placement=auto goes by the clock, which deterministic cannot; give one by name")
        if self.batch_statistics == "synchronized" and (self.micro_batches > 1 or self.parallelism == "model"):
            what = "micro_batches" if self.micro_batches > 1 else "parallelism=model"
            raise UsageError(f"batch_statistics=synchronized needs the whole batch at once on the towers; leave {what}")
        if self.parallelism == "model" and self.strategy != "towers":
            raise UsageError(f"parallelism=model has one copy of the model; leave strategy={self.strategy}")
        placed = (self.variable_placement, self.gradient_device) != ("cpu", "variable")
        if self.parallelism == "model" and placed:
            raise UsageError(
                "parallelism=model keeps each variable and its gradient with its stage; "
                "leave variable_placement and gradient_device"
            )
        if self.strategy != "towers" and placed:
            raise UsageError(
                f"strategy={self.strategy} keeps all on every device; leave variable_placement and gradient_device"
            )
        ways = {"mirrored": ("nccl", "hierarchical", "one_device"), "multi_worker": ("nccl", "ring")}
        if self.all_reduce not in ("auto", *ways.get(self.strategy, ())):
            fitting = [strategy for strategy, names in ways.items() if self.all_reduce in names]
            raise UsageError(f"all_reduce={self.all_reduce} is for strategy={' and '.join(fitting)}")
        of_cluster = [field for field in dataclasses.fields(TrainConfig) if field.metadata["group"] == "Cluster"]
        given = [field.name for field in of_cluster if getattr(self, field.name) != field.default]
        if self.strategy != "multi_worker" and given:
            raise UsageError(
                f"{' and '.join(given)}: for a cluster alone; give --strategy=multi_worker too, or leave it"
            )
        if self.hard_example_pool and (self.strategy != "towers" or self.parallelism == "model"):
            what = "parallelism" if self.strategy == "towers" else "strategy"
            raise UsageError(
                f"hard_example_pool={self.hard_example_pool} is for towers that share the batch; "
                f"leave {what}={getattr(self, what)}, or give --hard_example_pool=0"
            )
        if self.strategy == "multi_worker" and self.seeds:
            raise UsageError("a cluster trains one run and ends; give one seed at a time")

    def default_num_towers(self, devices: int) -> tuple[int, str]:
        """The most that can share the batch evenly, if any can; why no more."""
        why = self._uneven(devices)
        even = [towers for towers in range(1, devices) if not self._uneven(towers)]
        return (even[-1], why) if why and even and self.parallelism == "data" else (devices, "")

    def tower_batch_size(self, num_devices: int) -> int:
        """Examples of each step on each tower.

        Raises:
          UsageError: the towers and their micro-batches cannot have equal shares.
        """
        towers = num_devices if self.parallelism == "data" else 1
        if uneven := self._uneven(towers):
            raise UsageError(uneven)
        return self.batch_size // towers

    def suggest_smaller_micro_batches(self, num_devices: int) -> str:
        """The flags that take a tower's share of the batch in parts half as large or less; empty if it has none."""
        share = self.tower_batch_size(num_devices)
        both = math.gcd(share, self.hard_example_pool * share // self.batch_size)
        parts = [parts for parts in range(2 * self.micro_batches, min(both, MOST_PARTS) + 1) if not both % parts]
        apart = " --batch_statistics=mean" if self.batch_statistics == "synchronized" else ""
        return f"--micro_batches={parts[0]}{apart}" if parts else ""

    def _uneven(self, towers: int) -> str:
        """Which size these towers cannot share evenly, and which near it they can; empty if they can."""
        shares = towers * self.micro_batches
        for name, least in (("batch_size", 0), ("hard_example_pool", self.batch_size)):
            size = getattr(self, name)
            if size % shares:
                low = size // shares * shares
                near = " and ".join(str(size) for size in (low, low + shares) if size > least)
                what = f"{towers} tower{'s' * (towers > 1)}"
                what += f" in {self.micro_batches} micro-batches each" if self.micro_batches > 1 else ""
                return f"{name}={size} cannot be shared by {what}; {near} can"
        return ""

    @property
    def drawn(self) -> int:
        """Examples that a step draws; it trains on `batch_size` of them."""
        return self.hard_example_pool or self.batch_size

    def length(self, steps_per_epoch: int) -> schedules.RunLength:
        """The run's, which max_steps may end early."""
        total = math.ceil(schedules.to_steps(self.epochs, steps_per_epoch)) or self.max_steps
        return schedules.RunLength(steps_per_epoch, total, min(total, self.max_steps or total))

    def replace_recipe(self, **changes) -> "TrainConfig":
        """The recipe alone, with other values for some settings."""
        recipe = {field.name: getattr(self, field.name) for field in dataclasses.fields(TrainConfig)}
        return TrainConfig(**recipe | changes)

    @property
    def own_model(self) -> tuple[str, str] | None:
        """`split_own_model` of `model`."""
        return split_own_model(self.model)

    @property
    def name(self) -> str:
        """The recipe's name, or the model's where no recipe was given."""
        return self.recipe or (self.own_model[1] if self.own_model else self.model)

    @property
    def directory(self) -> Path:
        """`train_dir`, or its default."""
        data = os.path.basename(os.path.abspath(self.dataset.removeprefix(FOLDER)))
        own_data = "" if self.dataset in BUILT_IN else "-" + re.sub(r"\W+", "-", data).strip("-")
        return Path(self.train_dir or f"runs/{self.name}{own_data}-seed{self.seed}")


def shared_settings(config: TrainConfig) -> dict[str, Any]:
    """The settings that must be the same on all workers of a cluster."""
    return {name: getattr(config, name) for name in names_with(type(config), per_worker=False)}


def parse_seeds(text: str) -> tuple[int, ...]:
    """`"0,1,2"` -> (0, 1, 2)."""
    try:
        seeds = tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise UsageError(f"seeds={text} is not a list of whole numbers; write --seeds=0,1,2") from None
    if any(not 0 <= seed < 2**31 for seed in seeds) or len(set(seeds)) < len(seeds):
        raise UsageError(f"seeds={text} must be different numbers from 0 to {2**31 - 1}")
    return seeds


def parse_window(text: str) -> tuple[int, int] | None:
    """`"100:110"` -> (100, 110): the steps that are begun when 100, .., 109 updates have been made; `""` -> None."""
    if not text:
        return None
    first, colon, last = text.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise UsageError(f"profile_steps={text!r} is not a first and a later last step; write --profile_steps=100:110")
    if int(last) - int(first) > MOST_TRACED:
        raise UsageError(
            f"profile_steps={text}: a trace holds up to 50 MB a step in memory; {MOST_TRACED} are the most"
        )
    return int(first), int(last)

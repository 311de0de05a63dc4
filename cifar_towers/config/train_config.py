"""Every setting of a training run: its name, default, help and limits; the flags of `train.py` are made from here.

This module, and all that runs before training starts, must not import TensorFlow, so that a usage error is immediate.
"""

import dataclasses
import math
import os
import re
from pathlib import Path
from typing import ClassVar

from cifar_towers import registry
from cifar_towers.config import schedules, validation
from cifar_towers.config.batch_shares import MAX_MICRO_BATCHES, BatchShares, parse_shares
from cifar_towers.config.device_config import ERRORS, DeviceConfig
from cifar_towers.config.settings import settings_of
from cifar_towers.errors import DivergedError, WorkerLostError, describe_exit_codes
from cifar_towers.registry import DEFAULT_DATASETS, FOLDER, MODELS, OPTIMIZERS, TTA_LEVELS

_towers, _run = settings_of("Towers"), settings_of("Run")
_cluster = settings_of("Cluster", on_resume="allow", per_worker=True, per_run=True)
_data, _model, _optimizer = settings_of("Data"), settings_of("Model"), settings_of("Optimizer")
_reporting = settings_of("Reporting", on_resume="allow", per_run=True)


@dataclasses.dataclass(frozen=True)
class TrainConfig(BatchShares, DeviceConfig):
    """Every setting of a training run. Sizes are global; times are in steps or epochs, never per tower."""

    exit_codes: ClassVar[str] = describe_exit_codes(
        *ERRORS,
        DivergedError,
        WorkerLostError,
        failure="a bug, no room to save the last checkpoint, or weights that were not expected",
    )

    strategy: str = _towers(
        "towers",
        "how gradients are combined: towers share variables; mirrored and multi_worker are tf.distribute's replicas, "
        "each with a copy, in one process or in one process for each worker",
        choices=("towers", "mirrored", "multi_worker"),
        on_resume="allow",  # every strategy trains the same function on as many towers
    )
    variable_placement: str = _towers(
        "",
        "device of the towers' shared variables; auto: where there are GPUs, measure for some seconds and use the "
        "fastest; by default cpu, for the speednets auto, as Muon's update is too much work for a host",
        choices=("cpu", "round_robin", "least_loaded", "auto"),
        on_resume="allow",
    )
    gradient_device: str = _towers(
        "variable",
        "where the towers' gradients are averaged: on each variable's device, or all on the CPU",
        choices=("variable", "cpu"),
        on_resume="allow",
    )
    all_reduce: str = _towers(
        "auto",
        "all-reduce algorithm of mirrored and multi_worker; auto: NCCL where every tower has a GPU",
        choices=("auto", "nccl", "hierarchical", "one_device", "ring"),
        on_resume="allow",
    )
    data_on: str = _towers(
        "host",
        "memory of the training images: the host's, or each tower's device, where CIFAR-10 takes 154 MB",
        choices=("host", "device"),
        on_resume="allow",
    )
    batch_statistics: str = _towers(
        "mean",
        "statistics of batch normalization: the mean over towers, the final tower's, or synchronized over the batch",
        choices=("mean", "final", "synchronized"),
        on_resume="allow_without_batch_norm",
    )
    tower_shares: str = _towers(
        "",
        "the towers' shares of each batch, as 3,1, for devices of unequal speed; auto: measure for some seconds, once; "
        "by default equal",
        check=parse_shares,
        on_resume="allow",
    )
    micro_batches: int = _towers(
        1,
        "micro-batches into which each tower splits its shard; auto: one, and twice as many whenever a step does not "
        "fit into the memory",
        low=0,
        high=MAX_MICRO_BATCHES,
        words={"auto": 0},
        on_resume="allow_without_batch_norm",
    )
    parallelism: str = _towers(
        "data",
        "what is split over the devices: the batch, or the model into pipeline stages",
        choices=("data", "model"),
        on_resume="allow",
    )

    workers: str = _cluster(
        "", "host:port of every worker of strategy=multi_worker; by default from TF_CONFIG or Slurm's variables"
    )
    worker_index: int = _cluster(-1, "index of this process among the workers; worker 0 writes train_dir", low=-1)
    worker_wait_seconds: float = _cluster(25.0, "seconds to wait for all workers at the start", low=1)
    allow_public_cluster: bool = _cluster(
        False, "allow worker addresses that are reachable from the internet; TensorFlow's port has no authentication"
    )

    recipe: str = _run(
        "", "what to train, a name in configs/; by default speed94, unless --model is given", on_resume="allow"
    )
    train_dir: str = _run(
        "",
        "directory of everything the run writes; by default runs/<recipe>-seed<seed>, with data other than CIFAR-10 "
        "and synthetic runs/<recipe>-<dataset>-seed<seed>",
        on_resume="allow",
        per_worker=True,
        per_run=True,
    )
    overwrite: bool = _run(
        False, "delete an earlier run in train_dir and start again", on_resume="allow", per_worker=True, per_run=True
    )
    seed: int = _run(
        0, "random seed of data order, augmentation and initial weights", low=0, high=2**31 - 1, per_run=True
    )
    seeds: str = _run(
        "", "train one run for each of these seeds, as 0,1,2; print mean and std", on_resume="allow", per_run=True
    )
    epochs: float = _run(8.0, "passes over the training set", low=0, high=1e6)
    max_steps: int = _run(0, "stop after this many steps, and evaluate; 0: no limit", low=0, on_resume="allow")
    target_accuracy: float = _run(
        0.0, "stop at the first evaluation (without TTA) that reaches it; 0: never", low=0, high=1, on_resume="allow"
    )
    expect_sha256: str = _run(
        "",
        "fail at the end unless the weights' SHA-256, which a run prints, is or begins with this",
        check=validation.check_sha256,
        on_resume="allow",
        per_run=True,
    )
    max_nonfinite_steps: int = _run(
        3, "end the run after this many consecutive steps with non-finite numbers", low=1, on_resume="allow"
    )
    rollback_on_divergence: bool = _run(
        False, "instead, return to the last good checkpoint and halve the learning rates", on_resume="allow"
    )

    dataset: str = _data(
        "cifar10",
        "cifar10, synthetic, auto (CIFAR-10 if available, else synthetic), folder:<path> with a subfolder of images "
        "for each class, or any TensorFlow Datasets builder with images and labels",
        check=registry.check_dataset,
        on_resume="allow",
        per_run=True,
    )
    data_dir: str = _data(
        "",
        "directory of prepared data sets, made for a download; by default TFDS_DATA_DIR, or TensorFlow Datasets' own",
        on_resume="allow",
        per_worker=True,
        per_run=True,
    )
    validation_examples: int = _data(0, "training examples held out for validation", low=0, high=45_000)
    image_size: int = _data(32, "side in pixels; the central square of other images is resized to it", low=18, high=256)
    batch_size: int = _data(1536, "examples of each step, over all towers", low=1)
    hard_example_pool: int = _data(
        0,
        "examples to draw for each step, of which the batch_size with the highest loss under a small proxy net are "
        "trained on; 0: off",
        low=0,
    )
    flip: str = _data(
        "alternating",
        "mirror images: at random, or each image in every other epoch",
        choices=("none", "random", "alternating"),
    )
    shift: int = _data(2, "largest random shift in pixels in each direction", low=0, high=16)
    shift_fill: str = _data("reflect", "padding of shifted images", choices=("reflect", "zeros"))
    crop: int = _data(0, "side of the crop, random in training and central in evaluation; 0: no crop", low=0)
    image_size_schedule: str = _data("", "sides of training images over the run, as 0=24,45%=32; empty: image_size")
    cutout: int = _data(0, "side of a random square that is blanked in each image; 0: none", low=0)
    brightness: float = _data(0.0, "largest random change of brightness, in levels of 255", low=0, high=255)
    contrast: float = _data(0.0, "largest random change of contrast, as a fraction", low=0, high=1)
    standardize: str = _data(
        "dataset", "mean and std to normalize with: the data set's, or each image's", choices=("dataset", "image")
    )

    model: str = _model(
        "speednet94",
        f"{', '.join(MODELS)}; or your own function that returns a Keras model, as package.module:function or "
        "path/to/file.py:function",
        check=registry.check_model,
    )
    precision: str = _model(
        "auto",
        "compute dtype; auto: bfloat16 where the hardware computes it faster, else float32",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    whitening_images: int = _model(5000, "training images from which whitening filters are computed", low=12)

    optimizer: str = _optimizer(
        "momentum", "muon: Muon for convolutions, momentum SGD for the rest", choices=tuple(OPTIMIZERS)
    )
    learning_rate: float = _optimizer(0.1, "peak learning rate", low=0)
    bias_learning_rate: float = _optimizer(0.0, "for biases and norm shifts; 0: learning_rate", low=0)
    head_learning_rate: float = _optimizer(0.0, "for the last layer; 0: learning_rate", low=0)
    whitening_learning_rate: float = _optimizer(0.0, "for whitening layers' biases; 0: bias_learning_rate", low=0)
    learning_rate_schedule: str = _optimizer(
        "linear:0=1,100%=0",
        "factor of the peak rates at epochs or percentages of the run, interpolated (linear:) or constant (step:)",
    )
    whitening_epochs: float = _optimizer(3.0, "epochs in which the whitening bias is trained", low=0, high=1e6)
    freeze_first_group: float = _optimizer(
        0.0,
        "fraction of the run after which the first group of convolutions is frozen, its rates at 0 by then; 0: never",
        low=0,
        high=1,
    )
    momentum: float = _optimizer(0.9, "of SGD", low=0, high=0.9999)
    nesterov: bool = _optimizer(False, "Nesterov momentum")
    muon_momentum: float = _optimizer(0.655, "of Muon", low=0, high=0.9999)
    weight_decay: float = _optimizer(
        0.0, "at learning_rate; parameter groups with other rates decay by the same fraction a step", low=0
    )
    label_smoothing: float = _optimizer(0.0, "probability spread over all classes", low=0, high=0.9999)
    ema_decay: float = _optimizer(0.0, "of the weights' exponential moving average; 0: none", low=0, high=0.999999)
    lookahead: bool = _optimizer(False, "pull the weights toward their moving average every five steps")

    eval_every_epochs: float = _reporting(1.0, "epochs between evaluations; 0: only after the last step", low=0)
    tta: int = _reporting(
        0,
        f"test-time augmentation at the end: {registry.describe_tta_levels()}",
        low=0,
        high=max(TTA_LEVELS),
        per_run=False,
    )
    summary_every_steps: int = _reporting(
        100, "steps between full summaries; scalars are written ten times as often; 0: only at the last step", low=0
    )
    profile_steps: str = _reporting("", "profile these steps, as 100:110 for the ten after step 100")
    checkpoint_every_steps: int = _reporting(
        0, "steps between checkpoints; 0: every half minute and after evaluations, in at most 1 % of the time", low=0
    )
    keep_checkpoints: int = _reporting(3, "newest checkpoints to keep", low=1)

    def __post_init__(self):
        super().__post_init__()
        validation.check_combinations(self)
        if self.num_gpus:
            self.check_shares(self.num_gpus)

    @property
    def examples_drawn(self) -> int:
        """Examples that a step draws; it trains on `batch_size` of them."""
        return self.hard_example_pool or self.batch_size

    def run_length(self, steps_per_epoch: int) -> schedules.RunLength:
        """The run's length, which `max_steps` may cut short."""
        total = math.ceil(schedules.to_steps(self.epochs, steps_per_epoch)) or self.max_steps
        return schedules.RunLength(steps_per_epoch, total, min(total, self.max_steps or total))

    def evaluate_every_steps(self, length: schedules.RunLength) -> int:
        """Steps between evaluations before the end of a run; 0: none."""
        return max(1, round(self.eval_every_epochs * length.steps_per_epoch)) if self.eval_every_epochs else 0

    @property
    def user_model(self) -> tuple[str, str] | None:
        """`split_user_model` of `model`."""
        return registry.split_user_model(self.model)

    @property
    def name(self) -> str:
        """The recipe's name, or the model's without a recipe."""
        return self.recipe or (self.user_model[1] if self.user_model else self.model)

    @property
    def directory(self) -> Path:
        """`train_dir`, or its default."""
        data = os.path.basename(os.path.abspath(self.dataset.removeprefix(FOLDER)))
        suffix = "" if self.dataset in DEFAULT_DATASETS else "-" + re.sub(r"\W+", "-", data).strip("-")
        return Path(self.train_dir or f"runs/{self.name}{suffix}-seed{self.seed}")

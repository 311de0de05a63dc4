"""Combinations of settings that cannot be used together; each raises a UsageError."""

import dataclasses
import re

from cifar_towers.config import schedules
from cifar_towers.errors import UsageError
from cifar_towers.registry import MODELS, model_spec

MIN_IMAGE_SIZE = 18  # pixels
MAX_PROFILE_STEPS = 100
ALL_REDUCE_OF_STRATEGY = {"mirrored": ("nccl", "hierarchical", "one_device"), "multi_worker": ("nccl", "ring")}


def check_combinations(config) -> None:
    """Checks a `TrainConfig`."""
    parse_seeds(config.seeds)
    parse_profile_steps(config.profile_steps)
    schedules.parse_rate(config.learning_rate_schedule)
    _check_images(config)
    _check_model(config)
    _check_run(config)
    _check_parallelism(config)


def _check_images(config) -> None:
    size, schedule = config.image_size, config.image_size_schedule
    for side in schedules.ImageSizeSchedule(schedule, size).points.values:
        if side != int(side) or not MIN_IMAGE_SIZE <= side <= size:
            raise UsageError(
                f"image_size_schedule={schedule}: sides must be whole numbers from {MIN_IMAGE_SIZE} to {size}"
            )
    if config.crop and not MIN_IMAGE_SIZE <= config.crop <= size:
        raise UsageError(f"crop={config.crop} is not a side from {MIN_IMAGE_SIZE} to {size} pixels, or 0 for no crop")
    if config.crop and schedule:
        raise UsageError(f"crop={config.crop} and image_size_schedule={schedule} both set the image size; give one")
    side = config.crop or size
    if config.cutout > side:
        raise UsageError(f"cutout={config.cutout} is larger than the {side} pixels of the image it would blank")
    if 0 < config.hard_example_pool <= config.batch_size:
        raise UsageError(
            f"hard_example_pool={config.hard_example_pool} must be larger than batch_size={config.batch_size}, the "
            "number of examples that a step trains on; or 0 for none"
        )


def _check_model(config) -> None:
    spec = model_spec(config.model)
    if config.image_size_schedule and not spec.any_image_size:
        raise UsageError(f"model={config.model} takes images of one size; leave image_size_schedule empty")
    if config.freeze_first_group and not spec.whitening:
        raise UsageError(f"model={config.model} has no groups of convolutions; leave freeze_first_group at 0")
    if config.optimizer == "muon" and not spec.muon:
        tried = ", ".join(name for name, other in MODELS.items() if other.muon)
        raise UsageError(f"optimizer=muon is for {tried}; choose momentum or adamw for {config.model}")


def _check_run(config) -> None:
    if config.target_accuracy and not config.eval_every_epochs:
        raise UsageError("target_accuracy is checked at evaluations; give eval_every_epochs too")
    if config.seeds and config.seed:
        raise UsageError(f"seed={config.seed} and seeds={config.seeds} are both given; give one")
    if config.seeds and config.strategy == "multi_worker":
        raise UsageError("strategy=multi_worker trains one run; give one seed at a time")
    if config.expect_sha256 and config.seeds:
        raise UsageError("expect_sha256 is of one run, and seeds are several; give one seed at a time")
    if config.epochs == 0 and config.max_steps == 0:
        raise UsageError("epochs=0 and max_steps=0 leave nothing to do; give one of them")
    cluster = [field for field in dataclasses.fields(config) if field.metadata["group"] == "Cluster"]
    given = [field.name for field in cluster if getattr(config, field.name) != field.default]
    if given and config.strategy != "multi_worker":
        raise UsageError(f"{' and '.join(given)}: only with --strategy=multi_worker; give it too, or leave them out")


def _check_parallelism(config) -> None:
    strategy, has_stages = config.strategy, config.parallelism == "model"
    if config.deterministic and config.variable_placement == "auto":
        raise UsageError("variable_placement=auto depends on timing, which deterministic rules out; choose a placement")
    if config.micro_batches == 0 and strategy == "multi_worker":
        raise UsageError("micro_batches=auto is for one process; give a number, as --micro_batches=2")
    if config.batch_statistics == "synchronized" and (config.micro_batches != 1 or has_stages):
        other = "micro_batches" if config.micro_batches != 1 else "parallelism=model"
        raise UsageError(f"batch_statistics=synchronized needs the whole batch at once; leave {other}")
    if has_stages and strategy != "towers":
        raise UsageError(f"parallelism=model has one copy of the model; leave strategy={strategy}")
    is_placed = config.variable_placement not in ("", "cpu") or config.gradient_device != "variable"
    if is_placed and (has_stages or strategy != "towers"):
        reason = f"strategy={strategy} keeps every variable on every device"
        if has_stages:
            reason = "parallelism=model keeps each variable and its gradient on the device of its stage"
        raise UsageError(f"{reason}; leave variable_placement and gradient_device")
    if config.tower_shares and (has_stages or strategy != "towers"):
        other = "parallelism=model" if has_stages else f"strategy={strategy}"
        raise UsageError(f"tower_shares={config.tower_shares} is for towers that share the batch; leave it, or {other}")
    if config.tower_shares == "auto" and config.deterministic:
        raise UsageError("tower_shares=auto depends on timing, which deterministic rules out; give shares, as 3,1")
    if config.data_on == "device" and (has_stages or strategy != "towers"):
        other = "parallelism=model" if has_stages else f"strategy={strategy}"
        raise UsageError(f"data_on=device is for towers that share the batch; leave it, or {other}")
    if config.all_reduce not in ("auto", *ALL_REDUCE_OF_STRATEGY.get(strategy, ())):
        fitting = [name for name, algorithms in ALL_REDUCE_OF_STRATEGY.items() if config.all_reduce in algorithms]
        raise UsageError(f"all_reduce={config.all_reduce} is for strategy={' and '.join(fitting)}")
    if config.hard_example_pool and (strategy != "towers" or has_stages):
        other = f"strategy={strategy}" if strategy != "towers" else "parallelism=model"
        raise UsageError(
            f"hard_example_pool={config.hard_example_pool} needs towers that share the batch; "
            f"leave {other}, or give --hard_example_pool=0"
        )


def check_sha256(text: str) -> None:
    """Checks that a text is, or begins, a SHA-256.

    Raises:
      UsageError: it does not.
    """
    if text and not re.fullmatch("[0-9a-f]{8,64}", text):
        raise UsageError(f"expect_sha256={text} must be 8 to 64 hexadecimal digits, as a run's last lines have them")


def parse_seeds(text: str) -> tuple[int, ...]:
    """`"0,1,2"` -> (0, 1, 2).

    Raises:
      UsageError: naming what is wrong with the text.
    """
    try:
        seeds = tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise UsageError(f"seeds={text} is not a list of whole numbers; write --seeds=0,1,2") from None
    if any(not 0 <= seed < 2**31 for seed in seeds) or len(set(seeds)) < len(seeds):
        raise UsageError(f"seeds={text} must be different numbers from 0 to {2**31 - 1}")
    return seeds


def parse_profile_steps(text: str) -> tuple[int, int] | None:
    """`"100:110"` -> (100, 110): the steps that begin after 100, .., 109 updates; `""` -> None.

    Raises:
      UsageError: naming what is wrong with the text.
    """
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

"""From settings to parts: towers, data, model, optimizer, state. Below here, functions take plain values."""

import functools
import logging
import math
from collections.abc import Callable
from typing import NamedTuple

import keras
import tensorflow as tf
from keras.src.utils import naming  # clear_session, which does it too, ends the graph that is being made

from cifar_towers.config import DeviceConfig, TrainConfig
from cifar_towers.data import sources
from cifar_towers.data.augment import Augmentation
from cifar_towers.data.batches import Batches
from cifar_towers.data.dataset import Dataset, Split, Traits, in_parts
from cifar_towers.errors import UsageError
from cifar_towers.models import MODELS, own
from cifar_towers.models.cifarnet import WEIGHT_DECAYS
from cifar_towers.models.layers import BatchNorm
from cifar_towers.models.speednet import whitening_kernel
from cifar_towers.towers import Tower, make_towers, variable_placement
from cifar_towers.towers.devices import CPU_TOWERS_BY_DEFAULT
from cifar_towers.towers.placement import HOST
from cifar_towers.towers.stages import cut_in_stages, stage_placement
from cifar_towers.training import hardest, precision, schedules
from cifar_towers.training.losses import OWN, cross_entropy, make_loss
from cifar_towers.training.mirrored import make_mirrored_step, make_multi_worker_strategy, make_strategy
from cifar_towers.training.observing import watched_layers
from cifar_towers.training.optimizers import AdamW, Group, Momentum, Muon, Optimizer
from cifar_towers.training.state import TrainState
from cifar_towers.training.step import make_train_step, make_update

log = logging.getLogger(__name__)

WHITENED_AT_ONCE = 5000 * 32 * 32  # pixels, whose patches take a hundred bytes each


def open_towers(config: DeviceConfig) -> list[Tower]:
    """The towers a config asks for; where it names no number, as many as can share its batch, and says if these are
    fewer than there might be.

    Raises:
      UsageError: this machine cannot have them.
    """
    count = config.num_gpus
    if not count:
        devices = len(tf.config.get_visible_devices("GPU")) or CPU_TOWERS_BY_DEFAULT
        fitting, why = config.towers_on(devices)
        if why:
            count = fitting
            log.info(f"{fitting} of {devices} towers: {why}")
    return _open(config, lambda **options: make_towers(count, **options))


def open_cluster(config: TrainConfig) -> tuple[tf.distribute.Strategy, list[Tower]]:
    """The strategy that joins a cluster's workers, and the towers of all of them; waits until all have come here.

    Raises:
      UsageError: this machine has no devices for its part.
    """
    members = config.members
    return _open(
        config,
        lambda **options: make_multi_worker_strategy(
            members.addresses, members.index, config.num_gpus, config.all_reduce, **options
        ),
    )


def _open(config: DeviceConfig, make: Callable):
    """What `make` makes of this machine's devices, set up as the flags say."""
    if config.deterministic:
        tf.config.experimental.enable_op_determinism()
    names = ("soft_placement", "gpu_memory_growth", "gpu_memory_limit_mb", "threads_per_op")
    try:
        return make(**{name: getattr(config, name) for name in names})
    except ValueError as error:
        raise UsageError(str(error)) from error


def choose_precision(setting: str, towers: list[Tower]) -> str:
    """`float32`, `bfloat16` or `float16`; says what it took and why."""
    chosen, reason = precision.choose(setting, towers[0].device)
    log.info("precision %s: %s", chosen, reason)
    return chosen


def load_data(config: TrainConfig, source: sources.Source) -> tuple[sources.Source, Dataset]:
    """The data of a run as its settings say, and the source they really came from.

    Raises:
      DataError, UsageError: as `sources.load` does. UsageError: the run would write among the data.
    """
    if source.folder and source.folder.takes(config.directory):
        raise UsageError(f"train_dir={config.directory} is among the pictures of {source.name}; give one outside of it")
    return sources.load(source, config.validation_examples, config.image_size, fall_back=config.dataset == "auto")


def make_batches(config: TrainConfig, train: Split, rows: tuple[int, int] | None = None) -> Batches:
    """The batches of a run over `train`; of each, the `rows` (first, count) that are made here, or all.

    Raises:
      UsageError: a batch is more than there are examples.
    """
    if config.hardest_of > len(train.labels):
        raise UsageError(f"hardest_of={config.hardest_of} is more than the {len(train.labels)} training examples")
    try:
        return Batches(train, config.drawn, config.seed, config.flip, rows)
    except ValueError as error:
        raise UsageError(str(error)) from error


def make_augmentation(config: TrainConfig, traits: Traits) -> Augmentation:
    """What the data flags say is done to an image of these traits."""
    return Augmentation(
        crop=config.crop,
        shift=config.shift,
        shift_fill=config.shift_fill,
        cutout=config.cutout,
        brightness=config.brightness,
        contrast=config.contrast,
        standardize=config.standardize,
        mean=traits.mean,
        deviation=traits.deviation,
    )


def make_model(config: TrainConfig, computed_in: str, traits: Traits, train: Split | None = None) -> keras.Model:
    """The net, with first weights that follow from the seed; whitened by `train` where it whitens.

    Raises:
      UsageError: a net of the user's own cannot be made, or towers cannot train it.
    """
    if config.own_model:
        return _own_model(config, computed_in, traits)
    keras.utils.set_random_seed(config.seed)
    options = {"dtype": precision.POLICIES[computed_in], "num_classes": len(traits.class_names)}
    if config.model.startswith("speednet"):
        if train is not None:
            parts = in_parts(train.images[: config.whitening_images], WHITENED_AT_ONCE)
            normalise = make_augmentation(config, traits).evaluate
            options["whitening"] = whitening_kernel(normalise(images).numpy() for images in parts)
    else:
        options["side"] = config.crop or traits.side
    model = MODELS[config.model](**options)
    for layer in model.layers:
        if isinstance(layer, BatchNorm):
            layer.synchronized = config.batch_statistics == "synchronized"
    return model


def _own_model(config: TrainConfig, computed_in: str, traits: Traits) -> keras.Model:
    naming.reset_uids()  # layers without a name are called the same in every process, whatever was made before
    keras.utils.set_random_seed(config.seed)
    try:
        function = own.find(*config.own_model)
        model = own.make(function, config.crop or traits.side, len(traits.class_names), precision.POLICIES[computed_in])
    except own.ModelError as error:
        raise UsageError(f"model={config.model}: {error}") from error
    if config.batch_statistics == "synchronized":
        own.synchronize(model)
    return model


def make_loss_fn(config: TrainConfig, model: keras.Model) -> tuple[Callable, list[str]]:
    """The tower's loss, with the weight losses that belong to the net; and the names of its terms."""
    decays = WEIGHT_DECAYS if config.model == "cifarnet" else {}
    paths = [variable.path for variable in model.trainable_variables]
    weight_losses = {layer: (paths.index(f"{layer}/kernel"), factor) for layer, factor in decays.items()}
    terms = ["cross_entropy", *(f"{layer}/weight_loss" for layer in weight_losses)]
    if config.own_model and own.adds_losses(model, config.crop or config.image_size):
        terms.append(OWN)
    return make_loss(config.label_smoothing, weight_losses), [*terms, "total_loss"]


def make_optimizer(config: TrainConfig, model: keras.Model, length: schedules.Length) -> Optimizer:
    """The groups of a recipe: kernels, biases (with norm shifts), head, and the bias of a whitening layer.

    Weight decay takes the same fraction of every weight a step: a group with another rate gets the coefficient that
    makes rate x coefficient the same.
    """
    kind, points = schedules.parse_rate(config.learning_rate_schedule)
    places = points.steps(length)
    shape = {"linear": schedules.linear, "step": schedules.staircase}[kind]
    whitening_steps = math.ceil(config.whitening_epochs * length.steps_per_epoch)

    def group(name, variables, peak, factor, rule, until=math.inf):
        decay = config.weight_decay * config.learning_rate / peak if peak else 0.0
        return Group(name, rule(variables, weight_decay=decay), lambda step: peak * factor(step), until)

    def momentum(variables, weight_decay):
        return Momentum(variables, config.momentum, config.nesterov, weight_decay)

    def muon(variables, weight_decay):
        return Muon(variables, config.muon_momentum, length.total, weight_decay)

    def adamw(variables, weight_decay):
        return AdamW(variables, weight_decay=weight_decay)

    def recipe_factor(step):
        return shape(step, places, points.values)

    def whitening_factor(step):
        return 1 - step / whitening_steps

    kernel_rule = {"momentum": momentum, "muon": muon, "adamw": adamw}[config.optimizer]
    rest_rule = adamw if config.optimizer == "adamw" else momentum
    bias_rate = config.bias_learning_rate or config.learning_rate
    whitening_rate = config.whitening_learning_rate or bias_rate
    head_rate = config.head_learning_rate or config.learning_rate
    roles = _roles(model)
    return Optimizer(
        [
            group("kernels", roles["kernels"], config.learning_rate, recipe_factor, kernel_rule),
            group("biases", roles["biases"], bias_rate, recipe_factor, rest_rule),
            group("head", roles["head"], head_rate, recipe_factor, rest_rule),
            group("whitening", roles["whitening"], whitening_rate, whitening_factor, rest_rule, whitening_steps),
        ]
    )


class Training(NamedTuple):
    """What a run works with: its state; the function (batch, rates, side, look) -> metrics that moves it, which on a
    cluster also takes `asked`, as `make_mirrored_step` says; and its towers, which are one where the devices hold
    stages."""

    state: TrainState
    train_step: Callable
    towers: list[Tower]


def make_training(
    config: TrainConfig,
    towers: list[Tower],
    computed_in: str,
    train: Split,
    length: schedules.Length,
    strategy: tf.distribute.Strategy | None = None,
) -> Training:
    """State and step as the flags say: shared variables or mirrored ones, on towers or in stages.

    Args:
      strategy: that of a cluster, with the towers of all its workers.

    Raises:
      UsageError: this machine or this model cannot have it so.
    """

    def state_in(scope):
        with scope:
            return make_state(config, computed_in, train, length)

    split_over, devices = towers, [tower.device for tower in towers]
    options = {"micro_batches": config.micro_batches, "batch_statistics": config.batch_statistics}
    augmentation = make_augmentation(config, train.traits)
    try:
        if config.strategy == "mirrored":
            strategy = make_strategy(towers, config.all_reduce)
        if strategy:
            state, loss_fn = state_in(strategy.scope())
            step = make_mirrored_step(strategy, state, towers, loss_fn, augmentation, **options)
        elif config.parallelism == "model":
            split_over, side = towers[:1], config.crop or train.traits.side
            placement = stage_placement(lambda: make_model(config, computed_in, train.traits), devices, open_size=side)
            state, loss_fn = state_in(placement)
            if OWN in state.loss_averages.sums:
                raise ValueError("parallelism=model cannot train a net that adds losses of its own, as regularizers do")
            watched = [layer.name for layer in watched_layers(state.model)]
            stages = cut_in_stages(state.model, devices, open_size=side, watched=watched)
            step = make_train_step(make_update(state, split_over, loss_fn, augmentation, stages=stages, **options))
        else:
            options["gradient_device"] = HOST if config.gradient_device == "cpu" else ""
            with variable_placement(config.variable_placement, towers):
                state, loss_fn = make_state(config, computed_in, train, length)
                update = make_update(state, towers, loss_fn, augmentation, **options)
                if config.hardest_of:
                    with tf.name_scope(hardest.PROXY):
                        state.proxy, proxy_loss = make_state(proxy_config(config), computed_in, train, length)
                    each = functools.partial(cross_entropy, smoothing=config.label_smoothing)
                    proxy_update = make_update(
                        state.proxy, towers, proxy_loss, augmentation, example_loss=each, **options
                    )
                    update = hardest.on_hardest(update, proxy_update, config.batch_size)
            step = make_train_step(update)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return Training(state, step, split_over)


def proxy_config(config: TrainConfig) -> TrainConfig:
    """The recipe of the net that picks the hardest examples for `config`'s: the same, on all, without averages."""
    return config.varied(
        model="speednet_proxy", batch_size=config.hardest_of, hardest_of=0, ema_decay=0.0, lookahead=False
    )


def make_state(
    config: TrainConfig, computed_in: str, train: Split, length: schedules.Length
) -> tuple[TrainState, Callable]:
    """(state, loss function): everything with variables, placed as the scope around says."""
    model = make_model(config, computed_in, train.traits, train)
    loss_fn, terms = make_loss_fn(config, model)
    optimizer = make_optimizer(config, model, length)
    state = TrainState(model, optimizer, terms, length.total, config.ema_decay, config.lookahead, precision=computed_in)
    return state, loss_fn


def _roles(model: keras.Model) -> dict[str, list]:
    """Role -> the `tf.Variable`s that have it. The head is the last kernel; vectors count as biases."""
    head = [v for v in model.trainable_variables if len(v.shape) > 1][-1]
    roles = {"kernels": [], "biases": [], "head": [], "whitening": []}
    for variable in model.trainable_variables:
        if variable.path.startswith("whitening/"):
            role = "whitening"
        elif variable is head:
            role = "head"
        else:
            role = "kernels" if len(variable.shape) > 1 else "biases"
        roles[role].append(variable.value)
    return roles

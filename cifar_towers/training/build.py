"""From settings to the parts of a run: devices, batches, model, state, step."""

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.utils import naming  # clear_session also ends the graph that is being built

from cifar_towers.config import TrainConfig, schedules
from cifar_towers.config.train_config import AugmentationSettings, DeviceSettings, OptimizerSettings
from cifar_towers.data.augment import Augmentation
from cifar_towers.data.batches import NUM_USER_DRAWS, Batches
from cifar_towers.data.dataset import DatasetInfo, Split, chunks
from cifar_towers.errors import UsageError, count
from cifar_towers.models import MODELS, WEIGHT_DECAYS, user_model
from cifar_towers.models.layers import synchronize
from cifar_towers.models.speednet import WHITENING_IMAGES, whitening_kernel
from cifar_towers.multi_worker.cluster_spec import Workers
from cifar_towers.registry import SPEEDNETS, load_function
from cifar_towers.towers import Tower, make_towers, variable_placement
from cifar_towers.towers.devices import CPU_TOWERS_BY_DEFAULT, on_gpus
from cifar_towers.towers.placement import HOST
from cifar_towers.training.distributed_step import (
    MirroredStep,
    make_multi_worker_strategy,
    make_strategy,
)
from cifar_towers.training.losses import cross_entropy, make_loss, widened
from cifar_towers.training.optimizers import make_optimizer
from cifar_towers.training.setup import RunSetup
from cifar_towers.training.state import TrainState
from cifar_towers.training.step import as_tf_function, make_update

log = logging.getLogger(__name__)

POLICIES = {"float32": "float32", "bfloat16": "mixed_bfloat16", "float64": "float64"}
NUM_EXAMPLES = 4  # in the batch that a user's function is checked with
MAX_WHITENING_PIXELS = 5000 * 32 * 32  # at once; their patches take a hundred bytes each


def make_run_devices(
    config: TrainConfig, cluster: Workers | None = None
) -> tuple[tf.distribute.Strategy | None, list[Tower]]:
    """Set up the towers that a config asks for, on this machine or on those of a cluster.

    With a cluster the call waits for all workers. It returns a strategy that joins them, and the
    towers of all.

    Raises:
      UsageError: the machine cannot have the towers, or they cannot share the batch evenly.
    """
    if cluster:
        _make_deterministic(config)
        strategy, towers = make_multi_worker_strategy(
            cluster.addresses, cluster.index, config.num_gpus, config.soft_placement
        )
    else:
        strategy = None
        towers = make_local_towers(config, config.num_gpus or _fewer_towers(config))
    config.check_shares(len(towers))
    return strategy, towers


def _fewer_towers(config: TrainConfig) -> int:
    """Return 0 if as many towers as there are by default can share a batch, otherwise fewer, and
    log why.
    """
    num_devices = len(tf.config.get_visible_devices("GPU")) or CPU_TOWERS_BY_DEFAULT
    num_towers = config.default_num_towers(num_devices)
    if num_towers == num_devices:
        return 0
    why = config.describe_uneven_shares(num_devices)
    log.info(f"using {count(num_towers, 'tower')} instead of {num_devices}: {why}")
    return num_towers


def make_local_towers(settings: DeviceSettings, num_towers: int = 0) -> list[Tower]:
    """Set up `num_towers` towers, by default as many as the settings ask for, on this machine.

    Raises:
      UsageError: this machine cannot have them.
    """
    _make_deterministic(settings)
    try:
        return make_towers(num_towers or settings.num_gpus, soft_placement=settings.soft_placement)
    except (ValueError, RuntimeError) as error:
        raise UsageError(str(error)) from error


def _make_deterministic(settings: DeviceSettings) -> None:
    if settings.deterministic:
        tf.config.experimental.enable_op_determinism()


def make_batches(
    config: TrainConfig,
    train: Split,
    rows: tuple[int, int] | None = None,
    towers: Sequence[Tower] = (),
) -> Batches:
    """Return the batches of a run over `train`; see `Batches`. They are copied to a single GPU
    ahead of their step.
    """
    device = towers[0].device if len(towers) == 1 and on_gpus(towers) else ""
    return Batches(
        train, config.batch_size, config.seed, config.flip, rows, bool(config.augment), device
    )


def make_augmentation(settings: AugmentationSettings, info: DatasetInfo) -> Augmentation:
    """Return the augmentation of a run, without a function of the user's."""
    return Augmentation(settings, info.mean, info.std)


def make_training_augmentation(config: TrainConfig, info: DatasetInfo) -> Augmentation:
    """Return the augmentation of a run's training images, with a function of the user's if there is
    one.
    """
    augmentation = make_augmentation(config, info)
    if not config.augment:
        return augmentation
    user_function = load_augmentation(config.augment, config.net_image_size, len(info.class_names))
    return augmentation._replace(user_function=user_function)


def make_example_loss(
    settings: OptimizerSettings, num_classes: int
) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
    """Return the loss (labels, logits) -> [B] of each example: the user's, or the cross entropy."""
    if settings.loss:
        return load_loss(settings.loss, num_classes)
    return functools.partial(cross_entropy, smoothing=settings.label_smoothing)


def make_model(
    config: TrainConfig, precision: str, info: DatasetInfo, train: Split | None = None
) -> keras.Model:
    """Return the model with initial weights from the seed. Whitening filters are computed from
    `train`.

    With `train`, the random number generators of Python, NumPy and TensorFlow are seeded. Leave it
    out to restore weights: nothing is seeded, whitening filters are zeros, a user's model is not
    checked, and no batch norm is synchronized, which only training needs.

    Raises:
      UsageError: a user's model cannot be built, or towers cannot train it.
    """
    if train is not None:
        keras.utils.set_random_seed(config.seed)
    make = _make_user_model if config.user_model else _make_built_in_model
    model = make(config, POLICIES[precision], info, train)
    if train is not None and config.batch_statistics == "synchronized":
        synchronize(model)
    return model


def _make_user_model(
    config: TrainConfig, policy: str, info: DatasetInfo, train: Split | None
) -> keras.Model:
    naming.reset_uids()  # layers without a name are called the same in every process
    image_size = config.net_image_size
    num_classes = len(info.class_names)
    function = load_function("model", config.model)
    model = user_model.build_model(function, image_size, num_classes, policy)
    if train is not None:
        is_synchronized = config.batch_statistics == "synchronized"
        user_model.check_model(model, image_size, num_classes, is_synchronized)
    return model


def _make_built_in_model(
    config: TrainConfig, policy: str, info: DatasetInfo, train: Split | None
) -> keras.Model:
    options: dict[str, Any] = {"dtype": policy, "num_classes": len(info.class_names)}
    if config.model not in SPEEDNETS:
        options["image_size"] = config.net_image_size
    elif train is not None:
        parts = chunks(train.images[:WHITENING_IMAGES], MAX_WHITENING_PIXELS)
        normalize = make_augmentation(config, info).evaluate
        options["whitening"] = whitening_kernel(normalize(images).numpy() for images in parts)
    return MODELS[config.model](**options)


def make_loss_fn(config: TrainConfig, model: keras.Model) -> Callable:
    """Return the tower's loss, with the weight losses that belong to the net; see `make_loss`."""
    paths = [variable.path for variable in model.trainable_variables]
    weight_losses = {}
    for layer, factor in WEIGHT_DECAYS.get(config.model, {}).items():
        weight_losses[layer] = paths.index(f"{layer}/kernel"), factor
    num_classes = model.output.shape[-1]
    return make_loss(make_example_loss(config, num_classes), weight_losses)


def make_training(setup: RunSetup, augmentation: Augmentation) -> tuple[TrainState, Any]:
    """Return state and step of a run.

    The step is a `tf.function` with the arguments that `step.make_update` describes. On a cluster,
    whose `strategy` joins the towers of all workers, the step also takes `stop_signal`.

    Raises:
      UsageError: the machine or the model does not allow this.
    """
    if setup.config.strategy == "towers":
        return _train_on_towers(setup, augmentation)
    strategy = setup.strategy or make_strategy(setup.towers)
    return _train_on_replicas(setup, augmentation, strategy)


def _train_on_replicas(
    setup: RunSetup, augmentation: Augmentation, strategy: tf.distribute.Strategy
) -> tuple[TrainState, Any]:
    """Return state and step with a copy of all variables on each tower."""
    with strategy.scope():
        state, loss_fn = make_state(setup.config, setup)
    step = MirroredStep(
        strategy, state, setup.towers, loss_fn, augmentation, setup.config.micro_batches
    )
    # a signal is exchanged on a cluster only, and a traced function needs each of its arguments
    update = step.update_with_signal if setup.workers.size > 1 else step.update
    return state, as_tf_function(update)


def _train_on_towers(setup: RunSetup, augmentation: Augmentation) -> tuple[TrainState, Any]:
    """Return state and step with variables that the towers share."""
    config = setup.config
    towers = setup.towers
    step_device = towers[0].device if config.jit_compile else HOST
    with place_variables(config, towers):
        state, loss_fn = make_state(config, setup, step_device)
    update = make_update(
        state,
        towers,
        loss_fn,
        augmentation,
        micro_batches=config.micro_batches,
        synchronized=config.batch_statistics == "synchronized",
    )
    compile_whole = config.jit_compile and len(towers) == 1 and not augmentation.user_function
    return state, as_tf_function(update, compile_whole)


def place_variables(
    config: TrainConfig, towers: Sequence[Tower]
) -> contextlib.AbstractContextManager[None]:
    """Return the scope of a run's variables: where the config places them. By default they are on
    the host, or, of a speednet on GPUs, spread over the towers.

    With `jit_compile` they are all on the first tower's device.
    """
    if config.jit_compile:
        return variable_placement("round_robin", towers[:1])
    if config.variable_placement:
        return variable_placement(config.variable_placement, towers)
    # the update of a speednet is too much for the host of GPUs
    is_too_much = config.model in SPEEDNETS and on_gpus(towers)
    return variable_placement("least_loaded" if is_too_much else "cpu", towers)


def make_state(
    config: TrainConfig, setup: RunSetup, step_device: str = HOST
) -> tuple[TrainState, Callable]:
    """Return (state, loss function): everything with variables, in the placement of the surrounding
    scope.
    """
    train = setup.dataset.train
    model = make_model(config, setup.precision, train.info, train)
    optimizer = make_optimizer(config, model, setup.length)
    state = TrainState(
        model,
        optimizer,
        setup.length.total,
        ema_decay=config.ema_decay,
        lookahead=config.lookahead,
        jit_compile=config.jit_compile,
        step_device=step_device,
    )
    return state, make_loss_fn(config, model)


def make_image_size_fn(config: TrainConfig, length: schedules.RunLength) -> Callable[[int], int]:
    """Return the function step -> height and width of its images in pixels.

    Raises:
      UsageError: the run is so short that its last images are smaller than those of the evaluation.
    """
    full_size = config.net_image_size
    image_size_at = schedules.ImageSizeSchedule(config.image_size_schedule, full_size).at(length)
    last_size = image_size_at(length.total - 1)
    if last_size != full_size:
        raise UsageError(
            f"image_size_schedule={config.image_size_schedule} is still at {last_size} pixels in "
            f"the last of {length.total} steps, and the net is evaluated on {full_size}; write it "
            "in percent, e.g. 0=20,60%=32"
        )
    return image_size_at


# An augmentation and a loss of the user's -----------------------------------------------------


def load_augmentation(name: str, image_size: int, num_classes: int) -> Callable:
    """Return the function (images, labels, draws) -> (images, labels) of a user's augmentation.

    The user's function takes normalized images [b, s, s, 3] float32 and draws [b, 8], uniform
    random numbers in [0, 1) of each example, and returns images. A function with an argument named
    `labels` also takes the labels as one-hot rows [b, C] float32, and returns (images, labels).

    Raises:
      UsageError: `_check_function` refuses the function.
    """
    function = load_function("augment", name)
    takes_labels = "labels" in inspect.signature(function).parameters

    def augment(
        images: tf.Tensor, labels: tf.Tensor, draws: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        if takes_labels:
            return function(images=images, labels=tf.one_hot(labels, num_classes), draws=draws)
        return function(images=images, draws=draws), labels

    random = np.random.default_rng(0)
    images = tf.constant(random.normal(size=[NUM_EXAMPLES, image_size, image_size, 3]), tf.float32)
    draws = tf.constant(random.random([NUM_EXAMPLES, NUM_USER_DRAWS]), tf.float32)
    labels = tf.range(NUM_EXAMPLES) % num_classes
    expected = [images, tf.one_hot(labels, num_classes) if takes_labels else labels]
    _check_function(f"augment={name}", lambda: augment(images, labels, draws), expected)
    return augment


def load_loss(name: str, num_classes: int) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
    """Return the function (labels, logits) -> [b] losses of a user's loss.

    The user's function takes labels [b, C] float32, rows of sum 1, and logits [b, C] float32, and
    returns a loss for each example. The labels of the function that is returned may also be [b]
    classes.

    Raises:
      UsageError: `_check_function` refuses the function.
    """
    function = load_function("loss", name)

    def loss(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
        logits = widened(logits)
        labels = labels if labels.shape.rank == 2 else tf.one_hot(labels, num_classes)
        return function(labels=tf.cast(labels, logits.dtype), logits=logits)

    logits = tf.constant(
        np.random.default_rng(0).normal(size=[NUM_EXAMPLES, num_classes]), tf.float32
    )
    labels = tf.range(NUM_EXAMPLES) % num_classes
    _check_function(f"loss={name}", lambda: [loss(labels, logits)], [logits[:, 0]])
    return loss


def _check_function(name: str, call: Callable[[], Sequence], expected: Sequence[tf.Tensor]) -> None:
    """Raise UsageError unless a function returns tensors like the expected ones."""
    returned = [tf.convert_to_tensor(result) for result in call()]
    shapes = [f"{tuple(tensor.shape)} {tensor.dtype.name}" for tensor in returned]
    wanted = [f"{tuple(tensor.shape)} {tensor.dtype.name}" for tensor in expected]
    if shapes != wanted:
        raise UsageError(f"{name} must return {', '.join(wanted)}, not {', '.join(shapes)}")

"""The models by name: functions that return a Keras model, [B, H, W, 3] images -> [B, num_classes]
logits.

A new model is an entry here and its name in `registry.MODELS`.
"""

from collections.abc import Callable
from functools import partial

import keras

from cifar_towers.models.cifarnet import cifarnet
from cifar_towers.models.resnet import resnet
from cifar_towers.models.speednet import speednet

MODELS: dict[str, Callable[..., keras.Model]] = {
    "cifarnet": cifarnet,
    **{f"resnet{depth}": partial(resnet, depth=depth) for depth in (20, 32, 44, 56, 110)},
    "speednet93": partial(speednet, widths=(64, 128, 128)),
    # the records divide by 256
    "speednet94": partial(
        speednet,
        widths=(64, 256, 256),
        later_activation="silu",
        momentum=0.5566,
        head_std=1.0,
        logit_divisor=170,
    ),
    "speednet95": partial(speednet, widths=(128, 384, 384)),
}
# model -> layer -> factor of its weight loss
WEIGHT_DECAYS = {"cifarnet": {"local3": 0.004, "local4": 0.004}}

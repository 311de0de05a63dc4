"""A training step of another framework: `python scripts/peers.py keras resnet20 32 128 float32 20`
prints images/s.

The nets are those of `cifar_towers/models/`, written as a user of Keras or PyTorch writes them, or
`file.py:function`, a Keras net of the user's. A step computes the cross entropy, its gradients and
an update by momentum SGD. It repeats one batch that is in memory, without input and augmentation.
The whitening of speednet94 is not trained, as in ours.
"""

import inspect
import itertools
import os
import runpy
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

WARM_UP_STEPS = 2
TRAINED_PARAMETERS = {"speednet94": 1_971_328, "resnet20": 269_722, "cifarnet": 1_068_298}
SGD = {"momentum": 0.9, "nesterov": True}


def main(
    framework: str, net: str, image_size: str, batch_size: str, precision: str, steps: str
) -> None:
    """Print the images per second of the timed steps."""
    random = np.random.default_rng(0)
    size = int(image_size)
    count = int(batch_size)
    timed = int(steps)
    images = random.normal(size=(count, size, size, 3)).astype(np.float32)
    labels = random.integers(10, size=count)
    if framework == "keras":
        trained, time_steps = keras_fit(net, images, labels, precision)
    else:
        trained, time_steps = pytorch(
            net, images, labels, precision, compiled=framework == "pytorch-compiled"
        )
    expected = TRAINED_PARAMETERS.get(net, trained)
    if trained != expected:
        sys.exit(f"{framework} trains {trained:,} parameters of {net} in place of {expected:,}")
    print(count * timed / time_steps(timed))


# Keras --------------------------------------------------------------------------------------------


def keras_fit(
    net: str, images: np.ndarray, labels: np.ndarray, precision: str
) -> tuple[int, Callable]:
    """Return the number of trained parameters, and a function (steps) -> seconds that so many steps
    of `fit` take after the warm-up.
    """
    import keras
    import tensorflow as tf

    keras.config.set_dtype_policy("float32" if precision == "float32" else f"mixed_{precision}")
    model = keras_net(net, images.shape[1])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01, **SGD), loss)
    data = tf.data.Dataset.from_tensors((images, labels)).cache().repeat().prefetch(2)

    class StepEnds(keras.callbacks.Callback):
        """The times at which steps ended: Keras has read a step's loss before it calls this."""

        async_safe = True  # Keras may read the loss while the next step runs, as it does by itself

        def __init__(self):
            super().__init__()
            self.times: list[float] = []

        def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
            self.times.append(time.perf_counter())

    def time_steps(steps: int) -> float:
        ends = StepEnds()
        model.fit(data, steps_per_epoch=WARM_UP_STEPS + steps, verbose=0, callbacks=[ends])
        times = sorted(ends.times)  # Keras has several threads for callbacks
        return times[-1] - times[WARM_UP_STEPS - 1]

    return sum(weight.shape.num_elements() for weight in model.trainable_weights), time_steps


def keras_net(net: str, image_size: int):
    """Make a net of Keras's own layers, or the user's."""
    if net not in TRAINED_PARAMETERS:
        return own_net(net, image_size)

    import keras
    import tensorflow as tf
    from keras import layers as L

    def conv_norm(x, channels, stride=1):
        x = L.Conv2D(channels, 3, stride, "same", use_bias=False)(x)
        return L.BatchNormalization(momentum=0.9)(x)

    def response_norm(x):
        return tf.nn.lrn(x, 4, 1.0, 0.001 / 9, 0.75)

    x = images = keras.Input((image_size, image_size, 3))
    if net == "speednet94":
        x = L.Activation("gelu")(L.Conv2D(24, 2, trainable=False)(x))
        for channels, part in itertools.product((64, 256, 256), (1, 2)):
            x = L.Conv2D(channels, 3, padding="same", use_bias=False)(x)
            x = L.MaxPooling2D(2)(x) if part == 1 else x
            x = L.Activation("silu")(L.BatchNormalization(scale=False)(x))
        return keras.Model(
            images, L.Dense(10, use_bias=False, dtype="float32")(L.GlobalMaxPooling2D()(x))
        )
    if net == "resnet20":
        x = L.ReLU()(conv_norm(x, 16))
        for channels, block in itertools.product((16, 32, 64), range(3)):
            shortcut = x
            stride = 2 if channels > 16 and block == 0 else 1
            if stride == 2:  # new channels of zeros on both sides
                shortcut = keras.ops.pad(
                    x[:, ::2, ::2], [[0, 0], [0, 0], [0, 0], [channels // 4, channels // 4]]
                )
            x = conv_norm(L.ReLU()(conv_norm(x, channels, stride)), channels)
            x = L.ReLU()(L.Add()([x, shortcut]))
        return keras.Model(images, L.Dense(10, dtype="float32")(L.GlobalAveragePooling2D()(x)))
    x = L.MaxPooling2D(3, 2, "same")(L.Conv2D(64, 5, padding="same", activation="relu")(x))
    x = L.Conv2D(64, 5, padding="same", activation="relu")(
        L.Lambda(response_norm, dtype="float32")(x)
    )
    x = L.Flatten()(L.MaxPooling2D(3, 2, "same")(L.Lambda(response_norm, dtype="float32")(x)))
    x = L.Dense(192, activation="relu")(L.Dense(384, activation="relu")(x))
    return keras.Model(images, L.Dense(10, dtype="float32")(x))


def own_net(net: str, image_size: int):
    """Make a net of the user's, with those of the three arguments that its function has."""
    import keras

    path, _, name = net.rpartition(":")
    function = runpy.run_path(path)[name]
    dtype = keras.config.dtype_policy().name
    known = {"image_size": image_size, "num_classes": 10, "dtype": dtype}
    taken = inspect.signature(function).parameters
    return function(**{argument: known[argument] for argument in known if argument in taken})


# PyTorch ------------------------------------------------------------------------------------------


def pytorch(
    net: str, images: np.ndarray, labels: np.ndarray, precision: str, compiled: bool
) -> tuple[int, Callable]:
    """Return the number of trained parameters, and a function (steps) -> seconds that so many steps
    take after the warm-up.
    """
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")  # TF32 on GPUs, as in TensorFlow
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = pytorch_net(net, images.shape[1]).to(device, memory_format=torch.channels_last)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, 0.01, **SGD, fused=True)
    # channels_last, as the bytes are
    batch = torch.from_numpy(images).permute(0, 3, 1, 2).to(device)
    targets = torch.from_numpy(labels).to(device)
    forward = torch.compile(model) if compiled else model

    def make_step() -> Any:
        with torch.autocast(device, torch.bfloat16, enabled=precision == "bfloat16"):
            logits = forward(batch)
        loss = torch.nn.functional.cross_entropy(logits.float(), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def time_steps(steps: int) -> float:
        for _ in range(WARM_UP_STEPS):
            loss = make_step()
        loss.item()  # waits for the step
        start = time.perf_counter()

        for _ in range(steps):
            loss = make_step()
        loss.item()
        return time.perf_counter() - start

    return sum(parameter.numel() for parameter in trained), time_steps


def pytorch_net(net: str, image_size: int):
    """Make a net of PyTorch's own modules."""
    if net not in TRAINED_PARAMETERS:
        sys.exit(f"{net} is a net for Keras")

    from torch import nn
    from torch.nn import functional as F

    def conv_norm(channels_in, channels, stride=1):
        return [
            nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False),
            nn.BatchNorm2d(channels),
        ]

    class Block(nn.Module):
        def __init__(self, channels_in, channels):
            super().__init__()
            stride = self.stride = 1 if channels_in == channels else 2
            self.pad = (channels - channels_in) // 2
            layers = [
                *conv_norm(channels_in, channels, stride),
                nn.ReLU(),
                *conv_norm(channels, channels),
            ]
            self.layers = nn.Sequential(*layers)

        def forward(self, x):
            shortcut = F.pad(
                x[:, :, :: self.stride, :: self.stride], [0, 0, 0, 0, self.pad, self.pad]
            )
            return F.relu(self.layers(x) + shortcut)

    if net == "speednet94":
        layers = [nn.Conv2d(3, 24, 2).requires_grad_(False), nn.GELU()]
        for channels_in, channels in ((24, 64), (64, 256), (256, 256)):
            for part, channels_before in enumerate((channels_in, channels)):
                norm = nn.BatchNorm2d(channels)
                norm.weight.requires_grad_(False)
                pool = [nn.MaxPool2d(2)] if part == 0 else []
                layers += [
                    nn.Conv2d(channels_before, channels, 3, padding=1, bias=False),
                    *pool,
                    norm,
                    nn.SiLU(),
                ]
        return nn.Sequential(
            *layers, nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(256, 10, bias=False)
        )
    if net == "resnet20":
        blocks = [Block(*pair) for pair in itertools.pairwise([16] * 4 + [32] * 3 + [64] * 3)]
        layers = [
            *conv_norm(3, 16),
            nn.ReLU(),
            *blocks,
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(64, 10),
        ]
        return nn.Sequential(*layers)
    norm = nn.LocalResponseNorm(9, 0.001, 0.75)
    pool = nn.MaxPool2d(3, 2, 1)
    layers = [nn.Conv2d(3, 64, 5, padding=2), nn.ReLU(), pool, norm]
    layers += [nn.Conv2d(64, 64, 5, padding=2), nn.ReLU(), norm, pool, nn.Flatten()]
    layers += [
        nn.Linear(64 * (image_size // 4) ** 2, 384),
        nn.ReLU(),
        nn.Linear(384, 192),
        nn.ReLU(),
    ]
    return nn.Sequential(*layers, nn.Linear(192, 10))


if __name__ == "__main__":
    main(*sys.argv[1:])

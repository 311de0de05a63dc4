"""The classic net of TensorFlow's CIFAR-10 tutorial, 1,068,298 parameters at 24x24 pixels.

Source: A. Krizhevsky's cuda-convnet, as published in TensorFlow's "Convolutional Neural Networks"
tutorial.
"""

from typing import Any

import keras

from cifar_towers.models.layers import Conv2D, LocalResponseNorm, logits_dtype


def cifarnet(image_size: int = 24, dtype: str = "float32", num_classes: int = 10) -> keras.Model:
    """Make the net: [B, image_size, image_size, 3] standardized images -> [B, num_classes] logits,
    float32 or wider.
    """
    options: dict[str, Any] = {"dtype": dtype}
    images = keras.Input((image_size, image_size, 3))
    x = Conv2D(
        64,
        5,
        padding="same",
        activation="relu",
        name="conv1",
        **_initializers(0.05, 0.0),
        **options,
    )(images)
    x = keras.layers.MaxPooling2D(3, 2, "same", name="pool1", **options)(x)
    x = LocalResponseNorm(name="norm1", **options)(x)
    x = Conv2D(
        64,
        5,
        padding="same",
        activation="relu",
        name="conv2",
        **_initializers(0.05, 0.1),
        **options,
    )(x)
    x = LocalResponseNorm(name="norm2", **options)(x)
    x = keras.layers.MaxPooling2D(3, 2, "same", name="pool2", **options)(x)
    x = keras.layers.Flatten(name="flatten", **options)(x)
    x = keras.layers.Dense(
        384, activation="relu", name="local3", **_initializers(0.04, 0.1), **options
    )(x)
    x = keras.layers.Dense(
        192, activation="relu", name="local4", **_initializers(0.04, 0.1), **options
    )(x)
    head_options = {"dtype": logits_dtype(dtype), **_initializers(1 / 192, 0.0)}
    logits = keras.layers.Dense(num_classes, name="softmax_linear", **head_options)(x)
    return keras.Model(images, logits, name="cifarnet")


def _initializers(std: float, bias: float) -> dict[str, Any]:
    return {
        "kernel_initializer": keras.initializers.TruncatedNormal(stddev=std),
        "bias_initializer": keras.initializers.Constant(bias),
    }

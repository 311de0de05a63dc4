"""The classic net of TensorFlow's CIFAR-10 tutorial, 1,068,298 parameters at 24x24 pixels.

Source: A. Krizhevsky's cuda-convnet, as published in TensorFlow's "Convolutional Neural Networks" tutorial.
"""

import keras

from cifar_towers.models.layers import Conv2D, LocalResponseNorm, logits_dtype


def cifarnet(image_size: int = 24, dtype: str = "float32", num_classes: int = 10) -> keras.Model:
    """Make the net: [B, image_size, image_size, 3] standardized images -> [B, num_classes] logits, float32 or wider."""
    options = {"dtype": dtype}
    images = keras.Input((image_size, image_size, 3))
    x = _conv("conv1", bias=0.0, options=options)(images)
    x = keras.layers.MaxPooling2D(3, 2, "same", name="pool1", **options)(x)
    x = LocalResponseNorm(name="norm1", **options)(x)
    x = _conv("conv2", bias=0.1, options=options)(x)
    x = LocalResponseNorm(name="norm2", **options)(x)
    x = keras.layers.MaxPooling2D(3, 2, "same", name="pool2", **options)(x)
    x = keras.layers.Flatten(name="flatten", **options)(x)
    x = _dense("local3", 384, std=0.04, bias=0.1, activation="relu", options=options)(x)
    x = _dense("local4", 192, std=0.04, bias=0.1, activation="relu", options=options)(x)
    logits_options = {"dtype": logits_dtype(dtype)}
    logits = _dense("softmax_linear", num_classes, std=1 / 192, bias=0.0, activation=None, options=logits_options)(x)
    return keras.Model(images, logits, name="cifarnet")


def _conv(name: str, bias: float, options: dict) -> keras.layers.Layer:
    return Conv2D(64, 5, padding="same", activation="relu", name=name, **_initializers(0.05, bias), **options)


def _dense(name: str, units: int, std: float, bias: float, activation: str | None, options: dict) -> keras.layers.Layer:
    return keras.layers.Dense(units, activation=activation, name=name, **_initializers(std, bias), **options)


def _initializers(std: float, bias: float) -> dict[str, keras.initializers.Initializer]:
    return {
        "kernel_initializer": keras.initializers.TruncatedNormal(stddev=std),
        "bias_initializer": keras.initializers.Constant(bias),
    }

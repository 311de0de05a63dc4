"""Residual nets for CIFAR-10: 6n+2 layers in three stages of n blocks.

Source: K. He et al., "Deep Residual Learning for Image Recognition", arXiv 1512.03385, section 4.2.
"""

import keras

from cifar_towers.models.layers import AddReLU, BatchNorm, Conv2D, PadChannels, logits_dtype


def resnet(
    image_size: int = 32, dtype: str = "float32", num_classes: int = 10, *, depth: int = 20
) -> keras.Model:
    """Make the net: [B, image_size, image_size, 3] normalized images -> [B, num_classes] logits,
    float32 or wider.

    Args:
      depth: 6n + 2, for n blocks in each stage.
    """
    blocks = (depth - 2) // 6
    options = {"dtype": dtype}
    images = keras.Input((image_size, image_size, 3))
    x = _conv_norm(images, 16, 1, "stem", options)
    x = keras.layers.ReLU(name="stem_relu", **options)(x)
    shortcut = x
    for stage in range(3):
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            name = f"stage{stage + 1}_block{block + 1}"
            x, shortcut = _block(x, shortcut, 16 * 2**stage, stride, name, options)
    x = keras.layers.GlobalAveragePooling2D(name="pool", **options)(x)
    logits = keras.layers.Dense(
        num_classes, kernel_initializer="he_normal", name="head", dtype=logits_dtype(dtype)
    )(x)
    return keras.Model(images, logits, name=f"resnet{depth}")


def _block(
    x: keras.KerasTensor,
    shortcut: keras.KerasTensor,
    channels: int,
    stride: int,
    name: str,
    options: dict,
) -> list[keras.KerasTensor]:
    """Return the output twice, for the next block's `x` and `shortcut`."""
    if shortcut.shape[-1] != channels:
        shortcut = PadChannels(channels, stride, name=f"{name}_shortcut", **options)(shortcut)
    x = _conv_norm(x, channels, stride, f"{name}_1", options)
    x = keras.layers.ReLU(name=f"{name}_relu1", **options)(x)
    x = _conv_norm(x, channels, 1, f"{name}_2", options)
    return AddReLU(name=f"{name}_relu2", **options)([x, shortcut])


def _conv_norm(
    x: keras.KerasTensor, channels: int, stride: int, name: str, options: dict
) -> keras.KerasTensor:
    conv_options = {"use_bias": False, "kernel_initializer": "he_normal", **options}
    x = Conv2D(channels, 3, stride, "same", name=f"{name}_conv", **conv_options)(x)
    return BatchNorm(momentum=0.9, name=f"{name}_norm", **options)(x)

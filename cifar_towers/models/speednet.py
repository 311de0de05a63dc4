"""The small, wide and shallow net of the CIFAR-10 speed records.

Source: K. Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU", arXiv 2404.00498, and its
public records.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np

from cifar_towers.models.layers import Activation, BatchNorm, Conv2D, logits_dtype

# 2x2 patches of 3 channels have 12 principal directions, each with both signs
WHITENING_FILTERS = 24
# It lets a GELU pass on most of what the filters find. The records train it from 0 at the start of
# a run; trained that way here, its mean was 0.7.
WHITENING_BIAS = 0.7
# the first images, from whose patches the filters are computed
WHITENING_IMAGES = 960


def speednet(
    image_size: int | None = None,
    dtype: str = "float32",
    num_classes: int = 10,
    *,
    widths: Sequence[int] = (64, 256, 256),
    later_activation: str = "gelu",
    momentum: float = 0.6,
    head_std: float | None = None,
    logit_divisor: float = 9.0,
    whitening: np.ndarray | None = None,
) -> keras.Model:
    """Make the net: [B, image_size, image_size, 3] normalized images -> [B, num_classes] logits,
    float32 or wider.

    Args:
      image_size: if None, the net takes images of any size from 18 pixels.
      widths: channels of the three groups, each of two convolutions.
      later_activation: `gelu` or `silu` in the groups; the activation after the whitening is GELU.
      momentum: fraction of the batch norms' moving statistics that each step keeps.
      head_std: initial standard deviation of the head's weights; uniform +-1/sqrt(fan_in) if None.
      logit_divisor: what the head's outputs are divided by.
      whitening: [2, 2, 3, 24] kernel from `whitening_kernel`; zeros if not given, to be restored
        from a checkpoint.
    """
    options: dict[str, Any] = {"dtype": dtype}
    images = keras.Input((image_size, image_size, 3))
    kernel = keras.initializers.Constant(0.0 if whitening is None else whitening)
    x = Whitening(kernel, name="whitening", **options)(images)
    x = Activation("gelu", name="whitening_gelu", **options)(x)

    conv_options = {
        "padding": "same",
        "use_bias": False,
        "kernel_initializer": IdentityFirst(),
        **options,
    }
    for number, width in enumerate(widths, 1):
        group = f"group{number}"
        activation = f"{group}_{later_activation}"

        # the first convolution is thinned by a pooling, which discards an odd row and column
        x = Conv2D(width, 3, even_output=True, name=f"{group}_conv1", **conv_options)(x)
        x = keras.layers.MaxPooling2D(2, name=f"{group}_pool", **options)(x)
        x = BatchNorm(momentum, scale=False, name=f"{group}_norm1", **options)(x)
        x = Activation(later_activation, name=f"{activation}1", **options)(x)

        x = Conv2D(width, 3, name=f"{group}_conv2", **conv_options)(x)
        x = BatchNorm(momentum, scale=False, name=f"{group}_norm2", **options)(x)
        x = Activation(later_activation, name=f"{activation}2", **options)(x)

    x = keras.layers.GlobalMaxPooling2D(name="pool", **options)(x)
    initializer = _uniform() if head_std is None else ScaledUniform(head_std)
    x = keras.layers.Dense(
        num_classes, use_bias=False, kernel_initializer=initializer, name="head", **options
    )(x)
    logits = keras.layers.Rescaling(1 / logit_divisor, dtype=logits_dtype(dtype), name="logits")(x)
    return keras.Model(images, logits, name="speednet")


@keras.saving.register_keras_serializable("cifar_towers")
class Whitening(keras.layers.Conv2D):
    """2x2 convolution that whitens image patches and adds a constant; it is not trained."""

    def __init__(
        self, kernel_initializer: keras.initializers.Initializer | str = "zeros", **kwargs: Any
    ):
        kwargs = {
            "filters": WHITENING_FILTERS,
            "kernel_size": 2,
            "bias_initializer": keras.initializers.Constant(WHITENING_BIAS),
            "trainable": False,
            **kwargs,
        }
        super().__init__(kernel_initializer=kernel_initializer, **kwargs)


@keras.saving.register_keras_serializable("cifar_towers")
class IdentityFirst(keras.initializers.Initializer):
    """Uniform +-1/sqrt(fan_in), except that the first C_in filters pass their channel's center
    pixel unchanged.
    """

    def __call__(self, shape: tuple[int, ...], dtype: Any = None) -> Any:
        height, width, channels_in, filters = shape
        kernel = np.array(_uniform()(shape, dtype="float32"))
        passed = min(channels_in, filters)
        kernel[..., :passed] = 0
        kernel[height // 2, width // 2, range(passed), range(passed)] = 1
        return keras.ops.convert_to_tensor(kernel, dtype)


@keras.saving.register_keras_serializable("cifar_towers")
class ScaledUniform(keras.initializers.Initializer):
    """Uniform, scaled so that the sample standard deviation of the weights is exactly `std`."""

    def __init__(self, std: float):
        self.std = std

    def __call__(self, shape: tuple[int, ...], dtype: Any = None) -> Any:
        kernel = np.array(_uniform()(shape, dtype="float32"))
        return keras.ops.convert_to_tensor(kernel * self.std / kernel.std(ddof=1), dtype)

    def get_config(self) -> dict[str, Any]:
        return {"std": self.std}


def whitening_kernel(parts: Iterable[np.ndarray], epsilon: float = 5e-4) -> np.ndarray:
    """Compute filters that decorrelate 2x2 patches of images and scale them to unit variance.

    Args:
      parts: images, [n, H, W, 3] normalized floats at a time.
      epsilon: added to each eigenvalue, so that directions of little variance are not amplified.

    Returns:
      [2, 2, 3, 24]: the 12 eigenvectors of the uncentered patch covariance, each divided by the
        root of its eigenvalue,
      then their negatives.
    """
    products = np.zeros((12, 12))
    count = 0
    for images in parts:
        patches = _patches(images)
        products = products + patches.T @ patches
        count = count + len(patches)
    values, vectors = np.linalg.eigh(products / count)
    filters = (vectors / np.sqrt(values + epsilon)).reshape(2, 2, 3, 12)
    return np.concatenate([filters, -filters], axis=-1).astype(np.float32)


def _patches(images: np.ndarray) -> np.ndarray:
    """Return the 2x2 patches of images as rows: [n, H, W, 3] -> [n (H - 1) (W - 1), 12] float64."""
    count, height, width, channels = images.shape
    patches = np.empty((count, height - 1, width - 1, 2, 2, channels))
    for y in (0, 1):
        for x in (0, 1):
            patches[:, :, :, y, x] = images[:, y : y + height - 1, x : x + width - 1]
    return patches.reshape(-1, 4 * channels)


def _uniform() -> keras.initializers.Initializer:
    """Return the initializer that is uniform on +-1/sqrt(fan_in)."""
    return keras.initializers.VarianceScaling(1 / 3, mode="fan_in", distribution="uniform")

import numpy as np
import pytest
import tensorflow as tf

from cifar_towers.data import synthetic
from cifar_towers.models import MODELS
from cifar_towers.models.speednet import IdentityFirst, whitening_kernel
from cifar_towers.registry import MODELS as NAMES

# by the published layer tables, with frozen whitening filters (288), without statistics
PARAMETERS = {
    "cifarnet": 1_068_298,
    "resnet20": 269_722,
    "resnet56": 853_018,
    "speednet93": 568_728 + 288,
    "speednet94": 1_971_352 + 288,
}


def test_registry_has_the_same_models():
    assert set(NAMES) == set(MODELS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_number_of_parameters(name):
    model = MODELS[name](image_size=24 if name == "cifarnet" else 32)
    moving = sum(v.shape.num_elements() for v in model.variables if "moving" in v.path)
    assert model.count_params() - moving == PARAMETERS[name]


@pytest.mark.parametrize(
    ("name", "size", "dtype"),
    [
        ("cifarnet", 24, "float32"),
        ("resnet20", 24, "mixed_bfloat16"),
        ("speednet93", None, "mixed_bfloat16"),
        pytest.param("speednet95", None, "float32", marks=pytest.mark.slow),
    ],
)
def test_logits_and_a_gradient_for_every_weight(name, size, dtype):
    """A speednet that is built for no size takes images of any."""
    model = MODELS[name](image_size=size, dtype=dtype)

    assert model.input_shape == (None, size, size, 3)

    images = tf.random.normal([4, size or 20, size or 20, 3])
    values = [tf.convert_to_tensor(variable) for variable in model.trainable_variables]
    frozen = [tf.convert_to_tensor(variable) for variable in model.non_trainable_variables]
    with tf.GradientTape() as tape:
        tape.watch(values)
        logits, _ = model.stateless_call(values, frozen, images, training=True)

    assert logits.shape == (4, 10)
    assert logits.dtype == tf.float32

    gradients = tape.gradient(logits, values)
    assert [gradient.shape for gradient in gradients] == [value.shape for value in values]


def test_identity_first_passes_channels_through():
    kernel = np.array(IdentityFirst()((3, 3, 2, 5)))
    x = np.random.default_rng(0).normal(size=(1, 6, 6, 2)).astype("f4")
    np.testing.assert_allclose(tf.nn.conv2d(x, kernel, 1, "SAME")[..., :2], x, rtol=1e-6)
    assert abs(kernel[..., 2:]).max() <= 1 / np.sqrt(18)


def test_whitened_patches_have_unit_covariance():
    random = np.random.default_rng(0)
    images = random.normal(size=(200, 9, 9, 3)).astype("f4").cumsum(1).cumsum(2)
    kernel = whitening_kernel([images[:150], images[150:]], epsilon=0.0)
    y = tf.nn.conv2d(images, kernel, 1, "VALID").numpy().reshape(-1, 24).astype("f8")
    np.testing.assert_allclose(y[:, :12].T @ y[:, :12] / len(y), np.eye(12), atol=1e-3)
    np.testing.assert_allclose(y[:, 12:], -y[:, :12], atol=1e-5)


def test_whitening_is_that_of_earlier_versions():
    """A run that resumes has filters from its checkpoint; a repeated one computes them again. The
    sign of an eigenvector is free.
    """
    images = synthetic.make(60, 0, 0).images[:10] / 255 - 0.5
    filters = whitening_kernel([images])[..., :12].reshape(12, 12).astype("f8")
    product = filters @ filters.T
    known = [126.79610658, -0.66111789, -3.84235131, -46.26732837]

    np.testing.assert_allclose(product[0, :4], known, rtol=1e-5)
    assert np.trace(product) == pytest.approx(1609.507974143399, rel=1e-6)

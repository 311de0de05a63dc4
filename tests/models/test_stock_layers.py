import keras
import numpy as np
import pytest

from cifar_towers.models import MODELS
from cifar_towers.models.stock_layers import to_stock_layers


@pytest.mark.parametrize("name", ["cifarnet", "resnet20", "speednet94", "speednet96"])
def test_stock_layers_compute_the_same(name):
    model = MODELS[name](image_size=24, num_classes=7)
    random = np.random.default_rng(0)
    for variable in model.variables:  # as after training: not ones and zeros
        low, high = (0.5, 1.5) if "variance" in variable.path or "gamma" in variable.path else (-0.1, 0.1)
        variable.assign(random.uniform(low, high, variable.shape))
    copy = to_stock_layers(model)
    assert "cifar_towers" not in copy.to_json()
    images = random.normal(size=(4, 24, 24, 3)).astype("f4")
    expected = np.asarray(model(images, training=False))
    assert np.ptp(expected) > 1e-3
    np.testing.assert_allclose(copy(images, training=False), expected, rtol=1e-4, atol=1e-5 * abs(expected).max())


def test_stock_layers_do_not_depend_on_the_policy_of_the_caller():
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        copy = to_stock_layers(MODELS["cifarnet"](image_size=24))
    finally:
        keras.config.set_dtype_policy("float32")
    inner = [layer for layer in copy._flatten_layers() if isinstance(layer, keras.layers.Conv2D)]
    assert len(inner) == 4 and {layer.compute_dtype for layer in inner} == {"float32"}


def test_a_model_of_stock_layers_is_unchanged():
    model = keras.Sequential([keras.layers.Input((8, 8, 3)), keras.layers.Flatten(), keras.layers.Dense(10)])
    assert to_stock_layers(model) is model

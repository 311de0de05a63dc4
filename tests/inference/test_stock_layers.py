import keras
import numpy as np
import pytest

from cifar_towers.inference.export import to_stock_layers
from cifar_towers.models import MODELS


@pytest.mark.parametrize("name", ["cifarnet", "resnet20", "speednet94", "speednet96"])
def test_stock_layers_compute_the_same(name):
    """Also under a policy that the caller has set."""
    model = MODELS[name](image_size=24, num_classes=7)
    random = np.random.default_rng(0)
    for variable in model.variables:  # as after training: not ones and zeros
        low, high = (0.5, 1.5) if "variance" in variable.path or "gamma" in variable.path else (-0.1, 0.1)
        variable.assign(random.uniform(low, high, variable.shape))
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        copy = to_stock_layers(model)
    finally:
        keras.config.set_dtype_policy("float32")
    assert all(type(layer).__module__.startswith("keras.") for layer in copy.layers)
    assert "cifar_towers" not in copy.to_json() and to_stock_layers(copy) is copy
    images = random.normal(size=(4, 24, 24, 3)).astype("f4")
    expected = np.asarray(model(images, training=False))
    assert np.ptp(expected) > 1e-3
    np.testing.assert_allclose(copy(images, training=False), expected, rtol=1e-4, atol=1e-5 * abs(expected).max())

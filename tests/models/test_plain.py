import keras
import numpy as np
import pytest

from cifar_towers.models import MODELS
from cifar_towers.models.plain import plain


@pytest.mark.parametrize("name", ["cifarnet", "resnet20", "speednet94", "speednet96"])
def test_stock_layers_compute_the_same(name):
    model = MODELS[name](side=24, num_classes=7)
    random = np.random.default_rng(0)
    for variable in model.variables:  # as after training: no ones and zeros
        low, high = (0.5, 1.5) if "variance" in variable.path or "gamma" in variable.path else (-0.1, 0.1)
        variable.assign(random.uniform(low, high, variable.shape))
    copy = plain(model)
    assert all(type(layer).__module__.startswith("keras.") for layer in copy.layers)
    images = random.normal(size=(4, 24, 24, 3)).astype("f4")
    expected = np.asarray(model(images, training=False))
    assert np.ptp(expected) > 1e-3
    np.testing.assert_allclose(copy(images, training=False), expected, rtol=1e-4, atol=1e-5 * abs(expected).max())


def test_a_net_of_stock_layers_stays_as_it_is():
    model = keras.Sequential([keras.layers.Input((8, 8, 3)), keras.layers.Flatten(), keras.layers.Dense(10)])
    assert plain(model) is model

import numpy as np
import pytest

from cifar_towers.reporting.noise_scale import signal_and_noise


def test_noise_scale_of_known_noise():
    """Gradients of examples = true gradient + noise of covariance with trace 50 x 4: noise scale 200 / 25 = 8."""
    random, dimension, batch, towers = np.random.default_rng(1), 50, 64, 4
    true = np.full(dimension, 25**0.5 / dimension**0.5)
    estimates = []
    for _ in range(4000):
        each = true + random.normal(scale=2, size=(towers, dimension)) / (batch / towers) ** 0.5
        norms = np.linalg.norm(each, axis=1)
        estimates.append(signal_and_noise(norms, np.linalg.norm(each.mean(0)), batch))
    signal, trace = np.mean(estimates, 0)
    assert signal == pytest.approx(25, rel=0.02) and trace == pytest.approx(200, rel=0.02)

"""The gradient noise scale: the batch size at which a step is half signal, half noise.

Source: S. McCandlish et al., arXiv 1812.06162, appendix A.1.
"""

from collections.abc import Sequence

import numpy as np

DECAY = 0.9  # of the running averages of signal and noise, whose ratio is the noise scale


class NoiseScale:
    """Running estimate of the gradient noise scale for batches of `batch_size`."""

    def __init__(self, batch_size: int):
        self._batch_size = batch_size
        self._averages = np.zeros(2)  # of signal and noise

    def update(self, tower_norms: Sequence[float], mean_norm: float) -> float | None:
        """Add the norms of one step; the estimate, or None while the signal is not positive."""
        estimates = np.array(signal_and_noise(tower_norms, mean_norm, self._batch_size))
        if np.isfinite(estimates).all():  # the norm of finite gradients may overflow
            self._averages = DECAY * self._averages + (1 - DECAY) * estimates
        signal, noise = self._averages
        return noise / signal if signal > 0 else None


def signal_and_noise(tower_norms: Sequence[float], mean_norm: float, batch_size: int) -> tuple[float, float]:
    """Estimate (squared norm of the true gradient, trace of the covariance of one example's gradient) from one step:
    the norms of K > 1 towers' gradients, each a mean over batch_size / K examples, and of their mean gradient."""
    small, of_small, of_large = batch_size / len(tower_norms), np.mean(np.square(tower_norms)), mean_norm**2
    signal = (batch_size * of_large - small * of_small) / (batch_size - small)
    trace = (of_small - of_large) / (1 / small - 1 / batch_size)
    return float(signal), float(trace)

"""Moving averages of losses, by hand."""

import pytest

from cifar_towers.reporting.smoothed_losses import SmoothedLosses


def test_averages_have_no_bias_and_go_on_from_a_checkpoint():
    smoothed = SmoothedLosses()

    assert smoothed.averages() == {}

    smoothed.update({"total_loss": 4.0})
    assert smoothed.averages() == {"total_loss": pytest.approx(4.0)}

    resumed = SmoothedLosses()
    resumed.restore(smoothed.metadata() | {"step": 1})
    for averages in (smoothed, resumed):
        averages.update({"total_loss": 8.0})
        assert averages.averages() == {"total_loss": pytest.approx((0.9 * 4 + 8) / 1.9)}

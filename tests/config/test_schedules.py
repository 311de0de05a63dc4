"""Schedules of learning rates and image sizes."""

import pytest

from cifar_towers.config import TrainConfig, schedules
from cifar_towers.errors import UsageError


def rate(text, step, total=200, epoch=20):
    kind, points = schedules.parse_rate_schedule(text)
    shape = {"linear": schedules.piecewise_linear, "step": schedules.piecewise_constant}[kind]
    return shape(step, points.steps(schedules.RunLength(epoch, total, total)), points.values)


@pytest.mark.parametrize(
    ("text", "factors"),
    [
        (
            "linear:0=0.2,23%=1,100%=0.07",
            {0: 0.2, 23: 0.6, 46: 1.0, 123: 0.535, 200: 0.07, 300: 0.07},
        ),
        ("step:3=0.1,6=0.01", {0: 1.0, 59: 1.0, 60: 0.1, 119: 0.1, 120: 0.01}),
    ],
)
def test_factors_of_the_learning_rate(text, factors):
    assert {step: rate(text, step) for step in factors} == pytest.approx(factors)


def test_image_sizes_step_by_step():
    side_at = schedules.ImageSizeSchedule("0=24,50%=28,3=32", 32).at(
        schedules.RunLength(steps_per_epoch=2, total=8, last=8)
    )

    assert [side_at(step) for step in range(8)] == [24, 24, 24, 24, 28, 28, 32, 32]

    late = schedules.ImageSizeSchedule("25%=20", 32)
    whole = schedules.ImageSizeSchedule("", 32)

    assert [late.at(schedules.RunLength(2, 8, 8))(step) for step in (1, 2)] == [32, 20]
    assert [whole.at(schedules.RunLength(2, 8, 8))(step) for step in (0, 7)] == [32, 32]


def test_percentages_fall_on_their_exact_step():
    for percent in range(1, 101):
        side_at = schedules.ImageSizeSchedule(f"{percent}%=24", 32).at(
            schedules.RunLength(100, 200, 200)
        )
        assert [side_at(step) for step in (2 * percent - 1, 2 * percent)] == [32, 24]
        assert TrainConfig(epochs=percent / 100).run_length(100).total == percent
    assert TrainConfig(epochs=1e-6).run_length(1).total == 1


@pytest.mark.parametrize(
    "text",
    [
        "cosine:0=1",
        "linear:",
        "linear:0",
        "step:3=x",
        "linear:-1=0",
        "linear:0=1,9=0.5,20%=0",
        "linear:5=1,2=0",
    ],
)
def test_malformed_schedules_and_places_that_descend_are_refused(text):
    with pytest.raises(UsageError, match="learning_rate_schedule"):
        rate(text, 5)

"""Schedules, averages, losses, precision: the arithmetic."""

import numpy as np
import pytest
import tensorflow as tf

from cifar_towers.config import TrainConfig, schedules
from cifar_towers.errors import UsageError
from cifar_towers.training import precision
from cifar_towers.training.ema import ExponentialMovingAverage, Lookahead, SmoothedLosses
from cifar_towers.training.losses import cross_entropy, make_loss
from cifar_towers.training.precision import LossScale


def rate(text, step, total=200, epoch=20):
    kind, points = schedules.parse_rate(text)
    shape = {"linear": schedules.piecewise_linear, "step": schedules.piecewise_constant}[kind]
    return shape(step, points.steps(schedules.RunLength(epoch, total, total)), points.values)


@pytest.mark.parametrize(("step", "expected"), [(0, 0.2), (23, 0.6), (46, 1.0), (123, 0.535), (200, 0.07), (300, 0.07)])
def test_a_linear_schedule_in_percents(step, expected):
    assert rate("linear:0=0.2,23%=1,100%=0.07", step) == pytest.approx(expected)


@pytest.mark.parametrize(("step", "expected"), [(0, 1.0), (59, 1.0), (60, 0.1), (119, 0.1), (120, 0.01)])
def test_a_staircase_in_epochs(step, expected):
    assert rate("step:3=0.1,6=0.01", step) == expected


def test_sides_of_images_step_by_step():
    side_at = schedules.ImageSizeSchedule("0=24,50%=28,3=32", 32).at(
        schedules.RunLength(steps_per_epoch=2, total=8, last=8)
    )
    assert [side_at(step) for step in range(8)] == [24, 24, 24, 24, 28, 28, 32, 32]
    late, whole = schedules.ImageSizeSchedule("25%=20", 32), schedules.ImageSizeSchedule("", 32)
    assert [late.at(schedules.RunLength(2, 8, 8))(step) for step in (1, 2)] == [32, 20] and late.largest() == 32
    assert [whole.at(schedules.RunLength(2, 8, 8))(step) for step in (0, 7)] == [32, 32] and whole.largest() == 32


def test_a_place_in_percents_is_on_its_step():
    for percent in range(1, 101):
        side_at = schedules.ImageSizeSchedule(f"{percent}%=24", 32).at(schedules.RunLength(100, 200, 200))
        assert [side_at(step) for step in (2 * percent - 1, 2 * percent)] == [32, 24]
        assert TrainConfig(epochs=percent / 100).run_length(100).total == percent


@pytest.mark.parametrize("text", ["cosine:0=1", "linear:", "linear:0", "step:3=x", "linear:5=1,2=0", "linear:-1=0"])
def test_schedules_that_are_none(text):
    with pytest.raises(UsageError, match="learning_rate_schedule"):
        schedules.parse_rate(text)


def test_places_that_cross():
    with pytest.raises(UsageError, match="are not in ascending order"):
        rate("linear:0=1,9=0.5,20%=0", 5)


def test_weight_average_by_hand():
    v = tf.Variable([0.0])
    average = ExponentialMovingAverage([v], decay=0.9)
    v.assign([11.0])
    average.update(tf.constant(1, tf.int64), tf.constant(True))  # (1 + 1) / (10 + 1): 2/11 of 0, 9/11 of 11
    np.testing.assert_allclose(average.averages[0], [9.0], rtol=1e-6)
    average.update(tf.constant(1000, tf.int64), tf.constant(True))  # 0.9
    np.testing.assert_allclose(average.averages[0], [0.9 * 9 + 0.1 * 11], rtol=1e-6)


def test_averages_ignore_a_step_that_is_not_finite():
    """They stay as they are to the bit; only the last step takes lookahead's slow weights in any case."""
    v, no = tf.Variable([0.0]), tf.constant(False)
    average, lookahead = ExponentialMovingAverage([v], decay=0.9), Lookahead([v], total_steps=10, enabled=True)
    v.assign([11.0])
    average.update(tf.constant(5, tf.int64), no)
    lookahead.update(tf.constant(5, tf.int64), no)
    assert (average.averages[0][0], lookahead.slow[0][0], v[0]) == (0.0, 0.0, 11.0)
    lookahead.update(tf.constant(10, tf.int64), no)
    assert (lookahead.slow[0][0], v[0]) == (0.0, 0.0)


@pytest.mark.parametrize("total", [10, 12])
def test_lookahead_by_hand(total):
    v, slow = tf.Variable([0.0]), 0.0
    lookahead = Lookahead([v], total_steps=total, enabled=True)
    for step in range(1, total + 1):
        v.assign_add([1.0])
        before = float(v[0])
        lookahead.update(tf.constant(step, tf.int64), tf.constant(True))
        if step % 5 == 0:
            decay = 0.95**5 * (step / total) ** 3
            slow = decay * slow + (1 - decay) * before
            np.testing.assert_allclose(v, [slow], rtol=1e-5)
        elif step < total:
            np.testing.assert_allclose(v, [before])
    np.testing.assert_allclose(v, [slow], rtol=1e-5)  # a last step between two pulls takes the slow weights


def test_loss_averages_are_debiased_and_pass_over_what_is_no_number():
    averages = SmoothedLosses(["total_loss"])

    def average(loss, finite=True):
        return float(averages.update({"total_loss": tf.constant(loss)}, tf.constant(finite))["total_loss"])

    assert average(np.nan, False) == 0.0
    assert average(4.0) == pytest.approx(4.0)
    assert average(np.nan, False) == pytest.approx(4.0)
    assert average(8.0) == pytest.approx((0.9 * 4 + 8) / 1.9)


def test_smoothed_cross_entropy_by_hand():
    logits = tf.constant([[2.0, 0.0, 0.0, 0.0]])
    log_p = np.log(np.exp([2.0, 0, 0, 0]) / np.exp([2.0, 0, 0, 0]).sum())
    expected = -(0.85 * log_p[0] + 0.05 * log_p[1:].sum())
    assert float(cross_entropy(tf.constant([0]), logits, 0.2)[0]) == pytest.approx(expected, rel=1e-6)


def test_weight_losses_add_to_the_total():
    loss = make_loss(0.0, {"local3": (1, 0.004)})
    terms = loss(tf.constant([0]), tf.zeros([1, 10]), [tf.constant([9.0]), tf.constant([3.0, 4.0])])
    assert float(terms["local3/weight_loss"]) == pytest.approx(0.004 * 12.5)
    assert float(terms["total_loss"]) == pytest.approx(np.log(10) + 0.05)


@pytest.mark.parametrize(
    ("features", "expected"),
    [({"fma", "avx512_bf16"}, "bfloat16"), ({"amx_bf16"}, "bfloat16"), ({"bf16_like"}, "float32"), (set(), "float32")],
)
def test_auto_precision_reads_the_processor(monkeypatch, features, expected):
    monkeypatch.setattr(precision, "processor_features", lambda: features)
    assert precision.choose("auto", "/CPU:0")[0] == expected
    assert precision.choose("float16", "/CPU:0")[0] == "float16"


@pytest.mark.parametrize(
    ("capabilities", "native", "chosen"),
    [
        ([(8, 0)], ("bfloat16",), "bfloat16"),
        ([(9, 0), (7, 5)], ("float16",), "float32"),  # by the weakest
        ([(6, 1)], (), "float32"),
    ],
)
def test_auto_precision_asks_the_gpus(monkeypatch, capabilities, native, chosen):
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: capabilities)
    monkeypatch.setattr(
        tf.config.experimental, "get_device_details", lambda capability: {"compute_capability": capability}
    )
    assert precision.native_halves("/GPU:0") == native
    found, why = precision.choose("auto", "/GPU:0")
    assert found == chosen and ("--precision=float16 may be faster" in why) == (native == ("float16",))


def test_loss_scale_halves_on_overflow_and_grows_after_many_good_steps():
    scale = LossScale("float16")
    for finite, scale_then, good_then in ((True, 1, 1), (False, 1 / 2, 0), (False, 1 / 4, 0), (True, 1 / 4, 1)):
        scale.adapt(tf.constant(finite))
        assert (float(scale.scale) / LossScale.INITIAL, int(scale.good_steps)) == (scale_then, good_then)
    ((gradient, _),) = scale.unscale([(tf.constant([LossScale.INITIAL / 4]), tf.Variable([1.0]))])
    np.testing.assert_allclose(gradient, [1.0])
    scale.good_steps.assign(LossScale.GROWTH_STEPS - 1)
    scale.adapt(tf.constant(True))
    assert float(scale.scale) == LossScale.INITIAL / 2


def test_other_precisions_have_no_scale():
    scale, loss = LossScale("bfloat16"), tf.constant(2.0)
    assert scale.scale_loss(loss) is loss and scale.variables == {}

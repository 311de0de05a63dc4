"""The choice of the compute dtype, and the loss scale of float16."""

import numpy as np
import pytest
import tensorflow as tf

from cifar_towers import devices
from cifar_towers.towers import Tower
from cifar_towers.training.state import LossScale


@pytest.mark.parametrize(
    ("vendor", "features", "expected"),
    [
        ("AuthenticAMD", {"fma", "avx512_bf16"}, "bfloat16"),
        ("GenuineIntel", {"fma", "avx512_bf16"}, "float32"),
        ("GenuineIntel", {"avx512_bf16", "amx_bf16"}, "bfloat16"),
        ("", {"bf16"}, "bfloat16"),
        ("AuthenticAMD", {"bf16_like"}, "float32"),
        ("", set(), "float32"),
    ],
)
def test_auto_precision_reads_the_processor(monkeypatch, vendor, features, expected):
    monkeypatch.setattr(devices, "processor_features", lambda: features)
    monkeypatch.setattr(devices, "cpuinfo", lambda field: vendor)
    assert devices.resolve_precision("auto", "/CPU:0")[0] == expected
    assert devices.resolve_precision("float16", "/CPU:0")[0] == "float16"


def test_auto_precision_of_a_run_trained_in_float32_is_float32(monkeypatch, caplog):
    caplog.set_level("INFO", "cifar_towers")
    monkeypatch.setattr(devices, "processor_features", lambda: {"amx_bf16"})
    chosen = {
        (setting, trained_in): devices.choose_precision(setting, [Tower(0, "/CPU:0")], trained_in)
        for setting in ("auto", "float16")
        for trained_in in ("float32", "bfloat16", "float16", "")
    }
    assert chosen.pop(("auto", "float32")) == "float32"
    assert caplog.messages[0] == "precision float32: the run was trained in it"
    for (setting, _), precision in chosen.items():
        assert precision == ("bfloat16" if setting == "auto" else setting)


@pytest.mark.parametrize(
    ("capabilities", "native", "chosen"),
    [
        ([(8, 0)], ("bfloat16",), "bfloat16"),
        ([(9, 0), (7, 5)], ("float16",), "float32"),  # by the weakest
        ([(6, 1)], (), "float32"),
    ],
)
def test_auto_precision_reads_the_gpus(monkeypatch, capabilities, native, chosen):
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: capabilities)
    monkeypatch.setattr(tf.config.experimental, "get_device_details", lambda gpu: {"compute_capability": gpu})
    assert devices.native_halves("/GPU:0") == native
    chosen_type, reason = devices.resolve_precision("auto", "/GPU:0")
    assert chosen_type == chosen and ("--precision=float16 may be faster" in reason) == (native == ("float16",))


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

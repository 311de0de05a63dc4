"""The choice of the precision."""

import pytest

from cifar_towers import hardware


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
    monkeypatch.setattr(hardware, "processor_features", lambda: features)
    monkeypatch.setattr(hardware, "cpuinfo", lambda field: vendor)
    assert hardware.choose_precision("auto", "/CPU:0") == expected
    assert hardware.choose_precision("bfloat16", "/CPU:0") == "bfloat16"


def test_auto_precision_of_a_run_trained_in_float32_is_float32(monkeypatch, caplog):
    caplog.set_level("INFO", "cifar_towers")
    monkeypatch.setattr(hardware, "processor_features", lambda: {"amx_bf16"})
    chosen = {
        (setting, trained_in): hardware.choose_precision(setting, "/CPU:0", trained_in)
        for setting in ("auto", "bfloat16")
        for trained_in in ("float32", "bfloat16", "")
    }
    assert chosen.pop(("auto", "float32")) == "float32"
    assert caplog.messages[0] == "precision float32: the run was trained in it"
    assert set(chosen.values()) == {"bfloat16"}


@pytest.mark.parametrize(
    ("capabilities", "chosen"),
    [([(8, 0)], "bfloat16"), ([(9, 0), (7, 5)], "float32"), ([], "float32")],  # by the weakest
)
def test_auto_precision_reads_the_gpus(monkeypatch, capabilities, chosen):
    monkeypatch.setattr(hardware, "gpu_compute_capabilities", lambda: capabilities)
    assert hardware.choose_precision("auto", "/GPU:0") == chosen

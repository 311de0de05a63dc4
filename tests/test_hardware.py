"""The choice of the precision."""

import pytest

from cifar_towers import hardware


@pytest.mark.parametrize(
    ("device", "vendor", "features", "capabilities", "expected"),
    [
        ("/CPU:0", "AuthenticAMD", {"fma", "avx512_bf16"}, [], "bfloat16"),
        ("/CPU:0", "GenuineIntel", {"fma", "avx512_bf16"}, [], "float32"),
        ("/CPU:0", "GenuineIntel", {"avx512_bf16", "amx_bf16"}, [], "bfloat16"),
        ("/CPU:0", "", {"bf16"}, [], "bfloat16"),
        ("/CPU:0", "AuthenticAMD", {"bf16_like"}, [(9, 0)], "float32"),
        ("/CPU:0", "", set(), [], "float32"),
        ("/GPU:0", "", set(), [(8, 0)], "bfloat16"),
        ("/GPU:0", "", {"bf16"}, [(9, 0), (7, 5)], "float32"),  # the weakest decides
        ("/GPU:0", "", {"bf16"}, [], "float32"),
    ],
)
def test_auto_precision_reads_the_hardware_and_what_a_run_was_trained_in(
    monkeypatch, device, vendor, features, capabilities, expected
):
    monkeypatch.setattr(hardware, "processor_features", lambda: features)
    monkeypatch.setattr(hardware, "cpuinfo", lambda field: vendor)
    monkeypatch.setattr(hardware, "gpu_compute_capabilities", lambda: capabilities)
    for trained_in in ("", "bfloat16"):
        assert hardware.choose_precision("auto", device, trained_in) == expected
    assert hardware.choose_precision("auto", device, "float32") == "float32"
    assert hardware.choose_precision("bfloat16", device, "float32") == "bfloat16"

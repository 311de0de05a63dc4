import gc
import sys
from types import SimpleNamespace

import pytest
import tensorflow as tf

from cifar_towers.reporting.resource_monitor import ResourceMonitor
from cifar_towers.towers import Tower


class NVMLError(Exception):
    pass


@pytest.fixture
def nvml(monkeypatch):
    """A fake of NVIDIA's library with two GPUs."""
    library = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=90 + handle),
    )
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setattr(tf.config.experimental, "get_memory_info", lambda gpu: {"current": 5e9, "peak": 6e9})
    return library


def test_host_memory():
    gc.collect()  # not between the two
    monitor = ResourceMonitor([Tower(0, "/CPU:0")])
    before, held = monitor(), bytearray(10**8)
    assert set(before) == {"memory/host_mb"}
    assert 90 < monitor()["memory/host_mb"] - before["memory/host_mb"] < 130 and held


def test_gpu_memory_and_utilization(nvml):
    values = ResourceMonitor([Tower(0, "/GPU:0"), Tower(1, "/GPU:1")])()
    assert values.pop("memory/host_mb") > 100
    memory = {"memory/GPU:0_mb": 6000, "memory/GPU:1_mb": 6000}
    assert values == memory | {"gpu_utilisation/0": 90, "gpu_utilisation/1": 91}


def test_failing_driver_is_left_out(nvml, monkeypatch):
    def fails(*_):
        raise NVMLError

    nvml.nvmlDeviceGetUtilizationRates = fails
    assert "gpu_utilisation/0" not in ResourceMonitor([Tower(0, "/GPU:0")])()
    nvml.nvmlInit = fails
    assert "gpu_utilisation/0" not in ResourceMonitor([Tower(0, "/GPU:0")])()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "memory/GPU:0_mb" in ResourceMonitor([Tower(0, "/GPU:0")])()

"""What a run takes of the machine: memory of host and devices, and how busy the GPUs are."""

import os
from collections.abc import Sequence

import tensorflow as tf

from cifar_towers.towers import Tower


class ResourceMonitor:
    """Looks at this process's host memory and at the GPUs of its towers; what cannot be seen is left out."""

    def __init__(self, towers: Sequence[Tower]):
        self._gpus = sorted({tower.device.removeprefix("/") for tower in towers if "GPU" in tower.device})
        self._nvml = _nvml() if self._gpus else None

    def __call__(self) -> dict[str, float]:
        """Tag -> value: `memory/host_mb` now, `memory/GPU:0_mb` at its most so far, `gpu_utilisation/0` in percent, for
        each GPU of the machine."""
        found = {f"memory/{gpu}_mb": tf.config.experimental.get_memory_info(gpu)["peak"] / 1e6 for gpu in self._gpus}
        if resident := host_memory_mb():
            found["memory/host_mb"] = resident
        return found | self._utilisation()

    def _utilisation(self) -> dict[str, float]:
        if not self._nvml:
            return {}
        try:
            count = self._nvml.nvmlDeviceGetCount()
            handles = [self._nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
            return {
                f"gpu_utilisation/{index}": float(self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
                for index, handle in enumerate(handles)
            }
        except self._nvml.NVMLError:
            return {}


def host_memory_mb() -> float:
    """What this process holds of the host's memory, in 10^6 bytes; 0 where the system does not tell (not Linux)."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    except OSError:
        return 0.0


def _nvml():
    """NVIDIA's management library, if its bindings (package nvidia-ml-py) and a driver are there."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml

"""Memory of the process and its GPUs, and the GPUs' utilization."""

import contextlib
from collections.abc import Sequence

import psutil
import tensorflow as tf

from cifar_towers.reporting import tags
from cifar_towers.towers import Tower


class ResourceMonitor:
    """Reads this process's host memory and its towers' GPUs; leaves out what is not available."""

    def __init__(self, towers: Sequence[Tower]):
        self._gpus = sorted({tower.device.removeprefix("/") for tower in towers if "GPU" in tower.device})
        self._nvml = _nvml() if self._gpus else None

    def __call__(self) -> dict[str, float]:
        """Tag -> value: `memory/host_mb`, peak `memory/GPU:0_mb`, and `gpu_utilisation/0` in percent for each GPU of
        the machine."""
        values = {f"{tags.MEMORY}/host_mb": psutil.Process().memory_info().rss / 1e6}
        for gpu in self._gpus:
            values[f"{tags.MEMORY}/{gpu}_mb"] = tf.config.experimental.get_memory_info(gpu)["peak"] / 1e6
        if self._nvml:
            with contextlib.suppress(self._nvml.NVMLError):
                for index in range(self._nvml.nvmlDeviceGetCount()):
                    rates = self._nvml.nvmlDeviceGetUtilizationRates(self._nvml.nvmlDeviceGetHandleByIndex(index))
                    values[f"{tags.GPU_UTILIZATION}/{index}"] = float(rates.gpu)
        return values


def _nvml():
    """NVIDIA's management library, if its bindings (package nvidia-ml-py) and a driver are installed."""
    try:
        import pynvml
    except ImportError:
        return None
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        return pynvml

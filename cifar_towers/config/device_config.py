"""Settings of the devices that the towers use."""

import dataclasses
from typing import ClassVar

from cifar_towers.config.settings import check_limits, settings_of
from cifar_towers.errors import DataError, UsageError, describe_exit_codes

ERRORS = (UsageError, DataError)  # of every program that reads data
_towers = settings_of("Towers", on_resume="allow")


@dataclasses.dataclass(frozen=True)
class DeviceConfig:
    """Which devices the towers use, and how."""

    exit_codes: ClassVar[str] = describe_exit_codes(*ERRORS)

    num_gpus: int = _towers(
        0,
        "number of towers; 0: one for each GPU, or two on a CPU without GPUs, or the most of these that can share the "
        "batch evenly (in a cluster: one for each worker without GPUs)",
        low=0,
        high=1024,
    )
    soft_placement: bool = _towers(True, "use logical devices in place of missing GPUs")
    log_device_placement: bool = _towers(False, "print the device of each variable and each tower", per_worker=True)
    gpu_memory_growth: bool = _towers(True, "allocate GPU memory as it is needed", per_worker=True)
    gpu_memory_limit_mb: int = _towers(0, "maximum memory on each GPU in MB; 0: no limit", low=0, per_worker=True)
    intra_op_threads: int = _towers(
        0, "threads inside one operation; 0: the cores divided among the CPU towers", low=0, high=1024, per_worker=True
    )
    deterministic: bool = _towers(
        False, "make TensorFlow guarantee bit-identical results, and fail where an operation cannot"
    )

    def __post_init__(self):
        check_limits(self)

    def default_num_towers(self, num_devices: int) -> tuple[int, str]:
        """(the number of towers on so many devices where `num_gpus` is 0, the reason if it is smaller)."""
        return num_devices, ""

"""Settings of `report.py` and `launch.py`. Must not import TensorFlow."""

import dataclasses
from typing import ClassVar

from cifar_towers.config import TrainConfig
from cifar_towers.config.settings import REST, check_limits, setting
from cifar_towers.errors import UsageError, describe_exit_codes


@dataclasses.dataclass(frozen=True)
class ReportConfig:
    """Which runs to write a page about, and where to."""

    exit_codes: ClassVar[str] = describe_exit_codes(UsageError, failure="a bug or the page cannot be written")

    out: str = setting(
        "", "Report", "where to; by default report.html in the directory of one run, and here for several"
    )
    runs: tuple[str, ...] = setting((), REST, "runs' directories")

    def __post_init__(self):
        if not self.runs:
            raise UsageError("which runs? write: report.py runs/one [runs/other ...] [--out=FILE]")


@dataclasses.dataclass(frozen=True)
class LaunchConfig:
    """What to start, and how often to start it again."""

    exit_codes: ClassVar[str] = TrainConfig.exit_codes

    num_workers: int = setting(
        0,
        "Launch",
        "workers to start on this machine; 0: one process, which its flags, TF_CONFIG or Slurm may put in a cluster",
        low=0,
        high=1024,
    )
    max_restarts: int = setting(
        3, "Launch", "how often to start all again after a worker was lost or told to leave", low=0
    )
    command: tuple[str, ...] = setting((), REST, "flags of train.py")

    def __post_init__(self):
        check_limits(self)
        if self.num_workers == 1:
            raise UsageError("num_workers=1 is no cluster; give 2 or more, or 0 for one process that is started again")
        if not self.command:
            raise UsageError("launch what? write: launch.py --num_workers=2 -- --flagfile=configs/speed94.cfg")
        words = [argument for argument in self.command if not argument.startswith("-")]
        if words:
            raise UsageError(f"{words[0]!r} is not a flag of train.py; write --name=value")

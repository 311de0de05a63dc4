"""Settings of `report.py` and `launch.py`. Must not import TensorFlow."""

import dataclasses
from typing import ClassVar

from cifar_towers.config import TrainConfig
from cifar_towers.config.settings import REST, check_limits, setting
from cifar_towers.errors import UsageError, describe_exit_codes


@dataclasses.dataclass(frozen=True)
class ReportConfig:
    """Settings of the HTML report."""

    exit_codes: ClassVar[str] = describe_exit_codes(UsageError, failure="a bug or the page cannot be written")

    out: str = setting(
        "", "Report", "output file; by default report.html, in the directory of a single run or else in this one"
    )
    runs: tuple[str, ...] = setting((), REST, "runs' directories")

    def __post_init__(self):
        if not self.runs:
            raise UsageError("which runs? write: report.py runs/one [runs/other ...] [--out=FILE]")


@dataclasses.dataclass(frozen=True)
class LaunchConfig:
    """Settings of the launcher."""

    exit_codes: ClassVar[str] = TrainConfig.exit_codes

    num_workers: int = setting(
        0,
        "Launch",
        "workers to start on this machine; 0: one process, which may be a worker of a cluster",
        low=0,
        high=1024,
    )
    max_restarts: int = setting(3, "Launch", "restarts after a worker was lost or received a signal", low=0)
    command: tuple[str, ...] = setting((), REST, "flags of train.py")

    def __post_init__(self):
        check_limits(self)
        if self.num_workers == 1:
            raise UsageError("num_workers=1 is no cluster; give 2 or more, or 0 for one process")
        if not self.command and not self.num_workers:
            raise UsageError("launch what? write: launch.py --num_workers=2 -- --recipe=speed94")
        words = [argument for argument in self.command if not argument.startswith("-")]
        if words:
            raise UsageError(f"{words[0]!r} is not a flag of train.py; write --name=value")

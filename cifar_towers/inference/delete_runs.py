"""Deletes runs: what they wrote, and their directories where nothing else is left."""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

from cifar_towers import files
from cifar_towers.checkpointing import workdir
from cifar_towers.errors import UsageError
from cifar_towers.inference.run_table import is_being_written, is_run


def delete_runs(directories: Sequence[Path], confirm: Callable[[str], bool]) -> str:
    """Deletes these runs if `confirm` says yes to the question; returns what was done.

    Raises:
      UsageError: one of them is no run, or a process writes it; then none is deleted.
    """
    for directory in directories:
        if not is_run(directory):
            raise UsageError(f"{directory} is no run, so nothing was deleted; give directories of runs")
        if is_being_written(directory):
            raise UsageError(f"{directory} is being written, so nothing was deleted; end its training first")
    size = sum(map(files.size_in_bytes, directories))
    names = ", ".join(map(str, directories))
    if not confirm(f"delete {names}, {size / 1e6:,.0f} MB? [y/N] "):
        return "nothing was deleted"
    for directory in directories:
        with workdir.exclusive(directory):
            workdir.clear(directory)
            (directory / files.LOCK).unlink()
        with contextlib.suppress(OSError):  # somebody else's files are in it
            directory.rmdir()
    return f"deleted {names}"

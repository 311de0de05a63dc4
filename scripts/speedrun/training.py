"""A training by `scripts/train.py` in a process of its own."""

import dataclasses
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

from cifar_towers import files
from cifar_towers.config import TrainConfig
from cifar_towers.errors import RunError, error_text

TRAIN_PROGRAM = Path(__file__).resolve().parents[1] / "train.py"


def run_training(config: TrainConfig, quiet: bool = False) -> dict:
    """Run a training with these settings, and return the content of its result.json.

    Raises:
      RunError: the training failed, or left no result.
    """
    with tempfile.TemporaryFile("w+") as captured:
        output = captured if quiet else None
        with subprocess.Popen(train_command(config), stdout=output, stderr=output) as process:
            try:
                code = process.wait()
            except BaseException:  # on a signal, let the training save its last step
                process.terminate()
                raise
        if code:
            error = last_line(captured) if quiet else "its error is printed above"
            raise RunError(
                f"the training in {config.directory} ended with exit code {code} ({error}); mend that, then repeat the "
                "command without --overwrite, which keeps finished seeds"
            )
    result = files.read_json_if_any(config.directory / files.RESULT)
    if not result:
        raise RunError(
            f"the training in {config.directory} left no {files.RESULT}; free disk space and repeat the command"
        )
    return result


def train_command(config: TrainConfig) -> list[str]:
    """Return the command of a training with these settings. It reads the recipe from a flagfile in the run's directory.

    The flagfile gives the run its name, because a user's own recipe has no name in `configs/`.

    Raises:
      RunError: the flagfile cannot be written.
    """
    flags: dict[bool, list[str]] = {True: [], False: []}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value != field.default and field.name != "recipe":
            flags[field.metadata["per_run"]].append(f"--{field.name}={value}")
    flagfile = config.directory / f"{config.name}.cfg"
    try:
        files.make(config.directory)
        files.write_whole(flagfile, "\n".join(["# as it was timed", *flags[False], ""]))
    except OSError as error:
        raise RunError(f"{flagfile} cannot be written: {error_text(error)}") from error
    return [sys.executable, str(TRAIN_PROGRAM), f"--flagfile={flagfile}", *flags[True]]


def last_line(file: IO[str]) -> str:
    """Return the last line of a file that is not blank, at most 200 characters of it."""
    file.seek(0)
    return next((line.strip()[:200] for line in reversed(file.readlines()) if line.strip()), "")

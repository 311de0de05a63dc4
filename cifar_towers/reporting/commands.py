"""Commands to print for the user, with the programs as this process was started: a checkout's scripts, or installed."""

import re
import shlex
import shutil
import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"  # in a checkout
PROGRAM = re.compile(
    r"(?<![\w/=.])(train|launch|benchmark|predict|export|evaluate|compare_runs|report|runs)\.py(?![\w/:])"
)


def command(program: str, *arguments: str) -> str:
    """Return a command that a shell in this directory runs, of `evaluate.py` or another program of this Python."""
    name = name_programs(program)
    words = [Path(sys.executable), SCRIPTS / name] if name.endswith(".py") else [Path(sys.executable).with_name(name)]
    return shlex.join([*map(_from_here, words), *arguments])


def name_programs(text: str) -> str:
    """Write `cifar-towers-evaluate` for `evaluate.py` in a text, and so on, unless a checkout's script was started."""
    if (SCRIPTS / "train.py").exists() and not Path(sys.argv[0]).name.startswith("cifar-towers-"):
        return text
    return PROGRAM.sub(lambda match: f"cifar-towers-{match[1].replace('_', '-')}", text)


def _from_here(program: Path) -> str:
    """Return a program's path as one would type it."""
    if shutil.which(program.name) == str(program) or not program.exists():
        return program.name
    return str(program.relative_to(Path.cwd()) if program.is_relative_to(Path.cwd()) else program)

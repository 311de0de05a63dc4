"""What all command-line programs have in common: signals, exit codes, errors in one line, flags, late TensorFlow."""

import contextlib
import functools
import inspect
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable

from cifar_towers.cli.flags import Config, parse_command_line
from cifar_towers.cli.shutdown import ShutdownHandler
from cifar_towers.cli.tf_import import import_tensorflow
from cifar_towers.config import TrainConfig
from cifar_towers.errors import Interrupted, RunError, error_line, error_text


def program(body: Callable[[ShutdownHandler], int | None]) -> Callable[[], None]:
    """A program that calls `body` and exits with the code it returns or that of the error it raises."""

    @functools.wraps(body)
    def main() -> None:
        sys.exit(run(body))

    return main


def run(body: Callable[[ShutdownHandler], int | None]) -> int:
    """Calls a program; returns its exit code, and prints what it raises as one line."""
    shutdown = ShutdownHandler()
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("cifar_towers").setLevel(logging.INFO)
    try:
        try:
            shutdown.install()  # inside: a signal may come before it returns
            code = body(shutdown) or 0
            shutdown.ignore_signals()
        except Exception as error:
            shutdown.reraise_as_interrupt(error)
            raise
    except (RunError, Interrupted) as error:
        shutdown.ignore_signals()
        print(error_line(error), file=sys.stderr)
        code = error.exit_code
    except MemoryError as error:
        reason = f"the memory of this machine is too small ({error_text(error) or 'no more to be had'})"
        print(error_line(RunError(f"{reason}; end other programs, or raise the limit, and try again")), file=sys.stderr)
        code = RunError.exit_code
    except BrokenPipeError:
        code = RunError.exit_code
    except SystemExit as error:  # from --help
        code = error.code
    except Exception:
        traceback.print_exc()
        code = RunError.exit_code
    try:
        sys.stdout.flush()
    except OSError:  # a closed pipe or a full disk, which Python would report again when it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def parse(config_class: type[Config], program: Callable) -> Config:
    """A config from the command line; the program's docstring is its help text, with its examples indented."""
    description = re.sub(r"^\w+\.py ", r"  \g<0>", inspect.getdoc(program) or "", flags=re.M)
    return parse_command_line(config_class, sys.argv, description)


def start_tool(config_class: type[Config], program: Callable, shutdown: ShutdownHandler, on_interrupt: str) -> Config:
    """Parses the flags and imports TensorFlow; a signal then exits at once, with the message `on_interrupt`."""
    config = parse(config_class, program)
    shutdown.exit_immediately_from_now(on_interrupt)
    import_tensorflow()
    return config


def find_data(config: TrainConfig):
    """The source of the data; imports TensorFlow after checking that there is one."""
    from cifar_towers.data import sources

    source = sources.find(config.dataset, config.data_dir)
    import_tensorflow()
    return source


@contextlib.contextmanager
def checked_output():
    """Flushes what is printed inside.

    Raises:
      RunError: it cannot be written, as to a full disk.
      BrokenPipeError: the reader has closed the pipe.
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise RunError(f"the output cannot be written ({error_text(error)}); redirect it to another place") from error


def confirm(question: str) -> bool:
    """Whether somebody answers yes."""
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        print()
        return False

"""The common parts of all command-line programs: signals, exit codes, errors in one line, flags, late TensorFlow."""

import contextlib
import functools
import inspect
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator

from cifar_towers.cli.flags import Config, parse_command_line
from cifar_towers.config import TrainConfig
from cifar_towers.errors import Interrupted, RunError, UsageError, error_line, error_text, name_programs
from cifar_towers.user_code import find_source

Body = Callable[[], int | None]  # of a program; may return an exit code


class StderrHandler(logging.StreamHandler):
    """A handler that prints to what `sys.stderr` is then. During a live progress line, this prints above the line."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def program(body: Body) -> Callable[[], None]:
    """Make a program that calls `body` and exits with the code that it returns, or that of the error it raises."""

    @functools.wraps(body)
    def main() -> None:
        sys.exit(run(body))

    return main


def run(body: Body) -> int:
    """Call the body of a program and return its exit code; print the error that it raises as one line."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the process, without a traceback
    logging.basicConfig(format="%(message)s", level=logging.WARNING, handlers=[StderrHandler()])
    logging.getLogger("cifar_towers").setLevel(logging.INFO)
    try:
        code = body() or 0
        sys.stdout.flush()
    except (RunError, Interrupted) as error:
        print(name_programs(error_line(error)), file=sys.stderr)
        code = error.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it again when it exits
        code = RunError.exit_code
    return code


def parse(config_class: type[Config], program: Callable) -> Config:
    """Read the config from the command line; the program's docstring is its help text, with its examples indented."""
    description = re.sub(r"^\w+\.py ", r"  \g<0>", inspect.getdoc(program) or "", flags=re.M)
    config = parse_command_line(config_class, sys.argv, name_programs(description))
    check_functions(config)
    return config


def check_functions(config: object) -> None:
    """Check that the files and modules of the user's functions that a config names exist; see `find_source`."""
    recipe = getattr(config, "recipe", None)
    for setting in ("model", "augment", "loss"):
        find_source(setting, getattr(recipe if isinstance(recipe, TrainConfig) else config, setting, ""))


def start_tool(config_class: type[Config], program: Callable) -> Config:
    """Parse the flags and import TensorFlow."""
    config = parse(config_class, program)
    import_tensorflow()
    return config


def find_data(config: TrainConfig):
    """Locate the data, then import TensorFlow. Return the source of the data."""
    from cifar_towers.data import sources

    source = sources.find(config.dataset, config.data_dir)
    import_tensorflow()
    return source


@contextlib.contextmanager
def checked_output() -> Iterator[None]:
    """Flush what is printed inside.

    Raises:
      RunError: the output cannot be written, as to a full disk.
      BrokenPipeError: the reader has closed the pipe.
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise RunError(f"the output cannot be written ({error_text(error)}); redirect it to another place") from error


# TensorFlow -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def tensorflow_imported() -> Iterator[None]:
    """Import TensorFlow for a caller from Python, and restore the caller's settings of Keras at the end."""
    floatx, image_data_format = import_tensorflow()
    import keras

    try:
        yield
    finally:
        keras.config.set_floatx(floatx)
        keras.config.set_image_data_format(image_data_format)


def import_tensorflow() -> tuple[str, str]:
    """Import TensorFlow, with the environment that `cifar_towers` sets, and the settings of Keras that towers need.

    Returns:
      The `floatx` and the `image_data_format` of Keras before.

    Raises:
      UsageError: Keras has another backend.
    """
    with _announced("importing TensorFlow"):
        import keras
        import tensorflow as tf

        tf.get_logger().setLevel(logging.ERROR)
        logging.getLogger("absl").setLevel(logging.ERROR)  # some of its modules log here
        tf.config.list_physical_devices()
        before = keras.config.floatx(), keras.config.image_data_format()
        keras.config.set_image_data_format("channels_last")  # whatever the user's keras.json says
        keras.config.set_floatx("float32")
    if (backend := keras.backend.backend()) != "tensorflow":
        raise UsageError(f"Keras has the backend {backend}; towers need KERAS_BACKEND=tensorflow")
    return before


@contextlib.contextmanager
def _announced(activity: str) -> Iterator[None]:
    """Show on the terminal, if there is one, what the program is doing while it does it."""
    is_terminal = sys.stderr.isatty()
    if is_terminal:
        print(f"{activity} ...", end="\r", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if is_terminal:
            print("\033[K", end="", file=sys.stderr, flush=True)

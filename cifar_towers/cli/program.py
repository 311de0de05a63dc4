"""The common parts of all command-line programs: signals, exit codes, errors in one line, flags, late TensorFlow."""

import contextlib
import functools
import inspect
import logging
import os
import platform
import re
import sys
import traceback
from collections.abc import Callable, Iterator

from cifar_towers import hardware
from cifar_towers.cli.flags import Config, parse_command_line
from cifar_towers.config import TrainConfig
from cifar_towers.errors import Interrupted, RunError, UsageError, error_line, error_text, name_programs
from cifar_towers.shutdown import ShutdownHandler
from cifar_towers.stderr import messages_only_of_a_failure
from cifar_towers.user_code import find_source

Body = Callable[[ShutdownHandler], int | None]  # of a program; may return an exit code


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
    shutdown = ShutdownHandler()
    logging.basicConfig(format="%(message)s", level=logging.WARNING, handlers=[StderrHandler()])
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
        print(name_programs(error_line(error)), file=sys.stderr)
        code = error.exit_code
    except MemoryError as error:
        reason = f"the memory of this machine is too small ({error_text(error) or 'no more to be had'})"
        print(error_line(RunError(f"{reason}; end other programs, or raise the limit, and try again")), file=sys.stderr)
        code = RunError.exit_code
    except BrokenPipeError:
        code = RunError.exit_code
    except PermissionError as error:
        print(error_line(RunError(f"{error}; give another path, or change its permissions")), file=sys.stderr)
        code = RunError.exit_code
    except SystemExit as error:  # from --help
        code = error.code if isinstance(error.code, int) else RunError.exit_code
    except Exception:
        traceback.print_exc()
        code = RunError.exit_code
    try:
        sys.stdout.flush()
    except OSError:  # a closed pipe or a full disk, which Python would report again when it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
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


def start_tool(config_class: type[Config], program: Callable, shutdown: ShutdownHandler, on_interrupt: str) -> Config:
    """Parse the flags and import TensorFlow. A signal then exits at once, with the message `on_interrupt`."""
    config = parse(config_class, program)
    shutdown.exit_immediately_from_now(on_interrupt)
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


def confirm(question: str) -> bool:
    """Return whether somebody answers yes."""
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        print()
        return False


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

    Its startup messages are printed only if the import fails or ends the process, or if TF_CPP_MIN_LOG_LEVEL is 0 or 1.
    By default it prints no errors later either, as it raises those that matter.

    Returns:
      The `floatx` and the `image_data_format` of Keras before.

    Raises:
      UsageError: KERAS_BACKEND is set to another backend, or Keras was imported with another.
      RunError: the processor lacks the instructions that TensorFlow is compiled for.
    """
    if (backend := os.environ.get("KERAS_BACKEND", "tensorflow")) != "tensorflow":
        raise UsageError(f"KERAS_BACKEND={backend} is set; towers need KERAS_BACKEND=tensorflow")
    features = hardware.processor_features()
    if features and platform.machine() == "x86_64" and "avx" not in features:
        raise RunError("this processor has no AVX, which TensorFlow's packages are compiled for; use another machine")
    verbose = os.environ.get("TF_CPP_MIN_LOG_LEVEL") in ("0", "1")
    with _announced("importing TensorFlow"), contextlib.nullcontext() if verbose else messages_only_of_a_failure():
        import keras
        import tensorflow as tf

        tf.get_logger().setLevel(logging.ERROR)
        logging.getLogger("absl").setLevel(logging.ERROR)  # some of its modules log here
        tf.config.list_physical_devices()
        before = keras.config.floatx(), keras.config.image_data_format()
        keras.config.set_image_data_format("channels_last")  # whatever the user's keras.json says
        keras.config.set_floatx("float32")
    if (backend := keras.backend.backend()) != "tensorflow":
        raise UsageError(f"Keras was imported with {backend}; set KERAS_BACKEND=tensorflow before, as towers need it")
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

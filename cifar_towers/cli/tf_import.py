"""Importing TensorFlow with the settings that the towers need, and without its startup messages."""

import contextlib
import logging
import os
import sys
import tempfile
from collections.abc import Iterator

from cifar_towers.errors import UsageError, caused_by_interrupt


@contextlib.contextmanager
def announced(activity: str) -> Iterator[None]:
    """Shows on the terminal, if there is one, what the program is doing, as long as it does it."""
    is_terminal = sys.stderr.isatty()
    if is_terminal:
        print(f"{activity} ...", end="\r", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if is_terminal:
            print("\033[K", end="", file=sys.stderr, flush=True)


def import_tensorflow() -> None:
    """Imports TensorFlow; its startup messages are printed only if that fails, or with TF_CPP_MIN_LOG_LEVEL=0 or 1.

    By default it prints no errors either, as it raises those that matter.

    Raises:
      UsageError: KERAS_BACKEND is set to another backend.
    """
    verbose = os.environ.get("TF_CPP_MIN_LOG_LEVEL") in ("0", "1")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    # TensorFlow enables oneDNN by default only on CPUs with AVX-512 VNNI; with AVX2 it gains as much
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # GPUs are numbered as in nvidia-smi
    if os.environ["KERAS_BACKEND"] != "tensorflow":
        raise UsageError(f"KERAS_BACKEND={os.environ['KERAS_BACKEND']} is set; towers need KERAS_BACKEND=tensorflow")
    with announced("importing TensorFlow"), tempfile.TemporaryFile() as messages:
        stderr = os.dup(2)
        if not verbose:
            os.dup2(messages.fileno(), 2)
        try:
            import keras
            import tensorflow as tf

            tf.get_logger().setLevel(logging.ERROR)
            logging.getLogger("absl").setLevel(logging.ERROR)  # some of its modules log here
            tf.config.list_physical_devices()
            keras.config.set_image_data_format("channels_last")  # whatever the user's keras.json says
            keras.config.set_floatx("float32")
        except Exception as error:
            if not caused_by_interrupt(error):
                messages.seek(0)
                os.write(stderr, messages.read())
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)

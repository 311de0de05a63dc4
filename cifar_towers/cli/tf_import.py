"""Importing TensorFlow quietly, configured as this project needs it."""

import logging
import os
import tempfile

from cifar_towers.errors import UsageError, caused_by_interrupt


def import_tensorflow() -> None:
    """Imports TensorFlow without its notes on the terminal; what it says is shown only if it cannot be imported, or to
    who asks for it by TF_CPP_MIN_LOG_LEVEL=0 or 1."""
    wanted = os.environ.get("TF_CPP_MIN_LOG_LEVEL") in ("0", "1")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    # by itself TensorFlow takes oneDNN only where there are AVX-512 instructions for nets; with AVX2 it gains as much
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # GPUs are numbered as nvidia-smi does
    if os.environ["KERAS_BACKEND"] != "tensorflow":
        raise UsageError(f"KERAS_BACKEND={os.environ['KERAS_BACKEND']} is set; towers need KERAS_BACKEND=tensorflow")
    with tempfile.TemporaryFile() as notes:
        terminal = os.dup(2)
        if not wanted:
            os.dup2(notes.fileno(), 2)
        try:
            import keras
            import tensorflow as tf

            tf.get_logger().setLevel(logging.ERROR)
            tf.config.list_physical_devices()
            keras.config.set_image_data_format("channels_last")  # whatever a keras.json in the user's home says
            keras.config.set_floatx("float32")
        except Exception as error:
            if not caused_by_interrupt(error):
                notes.seek(0)
                os.write(terminal, notes.read())
            raise
        finally:
            os.dup2(terminal, 2)
            os.close(terminal)

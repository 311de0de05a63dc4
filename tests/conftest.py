"""Before TensorFlow wakes: the CPU as eight logical devices, so that towers can be tested on any machine."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")  # as the programs do

import pytest
import tensorflow as tf

from cifar_towers.towers import make_towers

MOST_TOWERS = 8


def pytest_configure(config):
    tf.config.set_visible_devices([], "GPU")
    make_towers(MOST_TOWERS)


@pytest.fixture
def towers():
    """towers(k): k towers on the logical CPU devices."""
    return make_towers

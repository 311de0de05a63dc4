"""Before TensorFlow wakes: the CPU as eight logical devices, so that towers can be tested on any machine."""

import os
import tempfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")  # as the programs do

import pytest
import tensorflow as tf

from cifar_towers.towers import make_towers

MOST_TOWERS = 8


def pytest_configure(config):
    if not hasattr(config, "workerinput"):  # one cache for all processes of the tests, and nothing in the user's
        cache = tempfile.TemporaryDirectory(prefix="cifar_towers-tests-")
        os.environ["XDG_CACHE_HOME"] = cache.name
        config.add_cleanup(cache.cleanup)
    tf.config.set_visible_devices([], "GPU")
    make_towers(MOST_TOWERS)


@pytest.fixture
def towers():
    """towers(k): k towers on the logical CPU devices."""
    return make_towers

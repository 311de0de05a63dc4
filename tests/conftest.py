"""Fixtures of all tests.

The CPU is split into eight logical devices before TensorFlow is initialized, so that towers run on
any machine; under `make test-gpu` the GPUs are split into four.
"""

import os
import tempfile

if "CIFAR_TOWERS_TEST_ON_GPUS" not in os.environ:
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # here, and in the programs that tests start

import pytest

from cifar_towers.data import synthetic
from tests.helpers import programs
from tests.helpers.user_data import write_folder

MAX_TOWERS = 4 if "CIFAR_TOWERS_TEST_ON_GPUS" in os.environ else 8


def pytest_configure(config):
    is_worker = hasattr(config, "workerinput")  # of pytest-xdist
    if not is_worker:  # one cache for all test processes, not the user's
        cache = tempfile.TemporaryDirectory(prefix="cifar_towers-tests-")
        os.environ["XDG_CACHE_HOME"] = cache.name
        config.add_cleanup(cache.cleanup)
    if is_worker or not config.getoption("numprocesses", None):  # not in the controller
        import tensorflow as tf

        from cifar_towers.towers import make_towers

        # no witness of float32 has 10 bits
        tf.config.experimental.enable_tensor_float_32_execution(False)
        make_towers(MAX_TOWERS)


@pytest.fixture(autouse=True)
def no_program_is_left():
    """End every program that a test started, also when the test fails."""
    yield
    programs.end_all()


@pytest.fixture(scope="session")
def towers():
    """Return towers(k), which returns k towers on the logical devices."""
    from cifar_towers.towers import make_towers

    return make_towers


@pytest.fixture(scope="session")
def examples():
    """Make 480 training examples."""
    return synthetic.make(480, 0, 0)


@pytest.fixture(scope="session")
def small_folder(tmp_path_factory):
    """Return a value of `--dataset` for programs that tests start: a folder of 160 + 40 images."""
    splits = {"train": synthetic.make(160, 0, 0), "test": synthetic.make(40, 0, 1)}
    return write_folder(tmp_path_factory.mktemp("pictures"), **splits)

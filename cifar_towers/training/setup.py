"""The setup of a run: what its parts are made from. The workers of a cluster check that theirs fit
together.
"""

import dataclasses
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from cifar_towers.config import TrainConfig
from cifar_towers.config.schedules import RunLength
from cifar_towers.config.train_config import code_digests, shared_settings
from cifar_towers.data import sources
from cifar_towers.data.dataset import Dataset
from cifar_towers.errors import UsageError
from cifar_towers.hardware import choose_precision
from cifar_towers.multi_worker.cluster_spec import Workers
from cifar_towers.registry import FUNCTIONS, load_function, split_function
from cifar_towers.towers import Tower
from cifar_towers.training.distributed_step import local_towers_of

PACKAGE = Path(__file__).resolve().parents[1]


@dataclasses.dataclass(frozen=True)
class RunSetup:
    """The parts that a run is made from: settings, data, devices, workers and length."""

    config: TrainConfig
    dataset: Dataset
    strategy: tf.distribute.Strategy | None  # of a cluster
    towers: Sequence[Tower]  # those of all workers; the batch is split over them
    local_towers: Sequence[Tower]  # those of this process
    precision: str
    workers: Workers
    length: RunLength

    @property
    def rows(self) -> tuple[int, int]:
        """Return (first, count) of the rows of each batch that this process draws."""
        count = self.config.batch_size * len(self.local_towers) // len(self.towers)
        return self.workers.index * count, count


def make_setup(
    config: TrainConfig, source: sources.Source, devices: tuple, workers: Workers
) -> RunSetup:
    """Read the data, and return the setup of a run on the devices that `build.make_run_devices`
    returned.

    Raises:
      UsageError: the workers of a cluster have different setups. Other errors are those of
        `sources.load`.
    """
    strategy, towers = devices
    dataset = sources.load(source, config.validation_examples, config.image_size)
    local_towers = local_towers_of(strategy, towers) if strategy else towers
    setup = RunSetup(
        config=config,
        dataset=dataset,
        strategy=strategy,
        towers=towers,
        local_towers=local_towers,
        precision=choose_precision(config.precision, local_towers[0].device),
        workers=workers,
        length=config.run_length(len(dataset.train.labels) // config.batch_size),
    )
    difference = workers.describe_difference(shared_values(setup)) if workers.size > 1 else ""
    if difference:
        raise UsageError(f"{difference}; they must be equal")
    return setup


def library_versions() -> dict[str, str]:
    """Return the versions of the libraries on which the bits of a run depend."""
    return {
        "TensorFlow": tf.__version__,
        "Keras": keras.__version__,
        "NumPy": np.__version__,  # which orders the examples
    }


def shared_values(setup: RunSetup) -> dict[str, Any]:
    """Return what must be equal on all workers of a cluster: settings, code, versions, data,
    precision and towers.
    """
    package = b"".join(path.read_bytes() for path in sorted(PACKAGE.rglob("*.py")))
    versions = {
        "the SHA-256 of cifar_towers's code": hashlib.sha256(package).hexdigest(),
        **library_versions(),
        "TF_ENABLE_ONEDNN_OPTS": os.environ.get("TF_ENABLE_ONEDNN_OPTS"),
        "precision": setup.precision,
        "towers": len(setup.local_towers),
    }
    for setting in FUNCTIONS:
        if split_function(getattr(setup.config, setting)):
            load_function(setting, getattr(setup.config, setting))
    code = {
        f"the SHA-256 of the code of {name}": digest
        for name, digest in code_digests(setup.config).items()
    }
    splits = ("train", "validation", "test")
    data = {
        f"the SHA-256 of the {name} images": getattr(setup.dataset, name).digest for name in splits
    }
    return shared_settings(setup.config) | versions | code | data

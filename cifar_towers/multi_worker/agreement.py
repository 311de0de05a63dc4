"""What the workers of a cluster check, share and gather during a run; without effect for a single worker."""

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator, Mapping

import numpy as np
import tensorflow as tf

from cifar_towers.config import TrainConfig, shared_settings
from cifar_towers.data.dataset import Dataset
from cifar_towers.multi_worker.coordination import Coordinator
from cifar_towers.training.results import StepMetrics, TowerGradientStats


@contextlib.contextmanager
def worker_train_dir(workers: Coordinator, config: TrainConfig) -> Iterator[TrainConfig]:
    """The config with this worker's `train_dir`: worker 0's stays; the others' are temporary."""
    if workers.is_chief:
        yield config
        return
    own = tempfile.TemporaryDirectory(prefix=f"cifar_towers-worker{workers.index}-", ignore_cleanup_errors=True)
    with own:
        yield dataclasses.replace(config, train_dir=own.name)


def assert_workers_agree(
    workers: Coordinator, config: TrainConfig, dataset: Dataset, compute_dtype: str, num_towers: int
) -> None:
    """Checks that all workers have the same settings, data, compute dtype and number of towers.

    Raises:
      UsageError: naming the worker and what differs.
    """
    data = {f"{name} images, as sha256,": getattr(dataset, name).digest for name in ("train", "test")}
    workers.assert_equal(shared_settings(config) | data | {"compute dtype": compute_dtype, "towers": num_towers})


def broadcast_state(workers: Coordinator, variables: Mapping[str, tf.Variable]) -> None:
    """Assigns the chief's values to the variables of all workers."""
    if workers.size > 1:
        values = workers.broadcast_from_chief(lambda: {name: v.numpy() for name, v in variables.items()})
        for name, value in {} if workers.is_chief else values.items():
            variables[name].assign(value)


def gather_diagnostics(workers: Coordinator, metrics: StepMetrics) -> StepMetrics:
    """The metrics of a step with the diagnostics of the other workers' towers: each tower's gradient statistics, and
    the forward pass of the final one."""
    if workers.size == 1 or not metrics.diagnostics:
        return metrics
    own = metrics.diagnostics
    forward = own.forward if workers.index == workers.size - 1 else None
    gathered = workers.gather((own.tower_gradients, forward))
    tower_gradients = map(np.concatenate, zip(*(worker[0] for worker in gathered), strict=True))
    return metrics._replace(
        diagnostics=own._replace(forward=gathered[-1][1], tower_gradients=TowerGradientStats(*tower_gradients))
    )

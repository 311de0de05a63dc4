"""The cluster that a process trains in, from flags, `TF_CONFIG` or Slurm's variables."""

import logging
import os
from collections.abc import Mapping

from cifar_towers.config import TrainConfig
from cifar_towers.multi_worker import cluster_spec
from cifar_towers.multi_worker.cluster_spec import ClusterSpec

log = logging.getLogger(__name__)


def resolve_cluster(config: TrainConfig, environment: Mapping[str, str]) -> ClusterSpec | None:
    """The workers of strategy=multi_worker; None for a run in one process.

    Raises:
      UsageError: no workers are given, they make no cluster, or they cannot share the batch evenly.
    """
    if config.strategy != "multi_worker":
        return None
    cluster = cluster_spec.resolve_cluster(config.workers, config.worker_index, environment)
    config.check_shares(max(config.num_gpus, 1) * cluster.size)
    return cluster


def join_cluster(config: TrainConfig) -> ClusterSpec | None:
    """The workers that this process will train with, after a warning of the port that it opens; None for a run in one
    process, which opens none.

    Raises:
      UsageError: as `resolve_cluster`, or this worker's address is public.
    """
    cluster = resolve_cluster(config, os.environ)
    if not cluster:
        return None
    address = cluster.addresses[cluster.index]
    if not config.allow_public_cluster:
        cluster_spec.check_not_public(address, config.worker_wait_seconds)
    if cluster.index:
        logging.getLogger("cifar_towers").setLevel(logging.WARNING)  # the chief logs for all workers
    log.info(
        f"{cluster.name(cluster.index)}: TensorFlow opens port {address.rpartition(':')[2]} on every interface, "
        "without authentication; see docs/cluster.md"
    )
    return cluster

"""The workers of a cluster: their addresses, the index of this process, and what they can ask of
each other.
"""

import dataclasses
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

from cifar_towers.errors import UsageError

SLURM_PORTS = 20_000  # the first port of jobs under Slurm, and the number of their ports
MAX_TASKS_PER_NODE = 1024  # of a job under Slurm
EXAMPLE = '{"cluster": {"worker": ["a:5000", "b:5000"]}, "task": {"type": "worker", "index": 0}}'


@dataclasses.dataclass(frozen=True)
class Workers:
    """The workers of a run, as one of them sees them: a process alone, or the workers of a cluster.

    Worker 0 is the chief. All workers call the same methods in the same order, and each method that
    exchanges values waits for all of them.
    """

    addresses: tuple[str, ...] = ("",)  # host:port of each worker's TensorFlow server
    index: int = 0  # of this process
    # takes one value on each worker and returns the values of all, in the workers' order; a
    # cluster's is from `connect`
    gather: Callable[[Any], list] = dataclasses.field(default=lambda value: [value], compare=False)

    @property
    def size(self) -> int:
        """Number of workers."""
        return len(self.addresses)

    def name(self, index: int) -> str:
        """Return a worker's name for messages: `worker 1 of 3 (10.0.0.2:5000)`."""
        return f"worker {index} of {self.size} ({self.addresses[index]})"

    def log(self, line: str) -> None:
        """Log what this worker does, unless it is alone."""
        if self.size > 1:
            logging.getLogger(__name__).info(f"{self.name(self.index)} {line}")

    @property
    def is_chief(self) -> bool:
        """True on worker 0, the only one that reads and writes `train_dir`."""
        return self.index == 0

    def broadcast_from_chief(self, make: Callable[[], Any]) -> Any:
        """Return the result of `make` on the chief, on all workers."""
        return self.gather(make() if self.is_chief else None)[0]

    def describe_difference(self, values: Mapping[str, Any]) -> str:
        """Return the first worker and its first value that is not the chief's, the same text on all
        workers; empty if all have the chief's values.
        """
        expected, *others = self.gather(dict(values))
        for worker, other in enumerate(others, 1):
            for name, value in expected.items():
                if other.get(name) != value:
                    theirs = f"{name} is {other.get(name)} on {self.name(worker)}"
                    return f"{theirs} and {value} on worker 0"
        return ""


ALONE = Workers()


def resolve_cluster(environment: Mapping[str, str]) -> Workers:
    """Read the cluster from `TF_CONFIG`, or else from Slurm's variables.

    Raises:
      UsageError: the workers are not named anywhere, or they make no cluster.
    """
    if environment.get("TF_CONFIG"):
        addresses, index = _from_tf_config(json.loads(environment["TF_CONFIG"]))
    elif "SLURM_PROCID" in environment:
        addresses, index = _from_slurm(environment)
    else:
        raise UsageError(
            "strategy=multi_worker needs to know its workers; start them with cifar-towers launch "
            f"--num_workers=2 -- ..., with srun, or with TF_CONFIG='{EXAMPLE}'"
        )
    is_cluster = len(set(addresses)) == len(addresses) >= 2
    if not is_cluster or not 0 <= index < len(addresses):
        raise UsageError(
            f"index {index} of [{', '.join(addresses)}] is no worker of a cluster, which has two "
            "or more, each at its own host:port; their indices begin at 0"
        )
    return Workers(tuple(addresses), index)


def _from_tf_config(content: Mapping[str, Any]) -> tuple[list[str], int]:
    """Read addresses and index from {"cluster": {"worker": [...]}, "task": {"type": "worker",
    "index": 0}}.

    A `chief` is worker 0.

    Raises:
      UsageError: the task is another.
    """
    cluster = content["cluster"]
    task = content["task"]
    chiefs = cluster.get("chief", [])
    first_index = {"chief": 0, "worker": len(chiefs)}
    if task["type"] not in first_index:
        raise UsageError(
            f"TF_CONFIG has the task {task['type']}; only a chief and workers train; start no other"
        )
    addresses = [*chiefs, *cluster.get("worker", [])]
    return addresses, first_index[task["type"]] + int(task["index"])


def _from_slurm(environment: Mapping[str, str]) -> tuple[list[str], int]:
    """Return addresses and index of a job step's tasks; the job id gives the ports.

    TensorFlow sorts the nodes by name. Slurm does not, so the task's place on its node gives the
    index.
    """
    import tensorflow as tf  # only here, because the import takes seconds

    first_port = SLURM_PORTS + int(environment["SLURM_JOB_ID"]) % SLURM_PORTS
    resolver = tf.distribute.cluster_resolver.SlurmClusterResolver(
        port_base=first_port, gpus_per_node=MAX_TASKS_PER_NODE, gpus_per_task=1, auto_set_gpu=False
    )
    addresses = resolver.cluster_spec().job_tasks("worker")
    port = first_port + int(environment["SLURM_LOCALID"])
    return addresses, addresses.index(f"{environment['SLURMD_NODENAME']}:{port}")

"""The workers of a cluster: their addresses, the index of this process, and what they can ask of each other."""

import dataclasses
import ipaddress
import itertools
import json
import logging
import re
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from cifar_towers.errors import UsageError, WorkerLostError

RETRY_SECONDS = 0.2  # between attempts to resolve a name
SLURM_PORTS = 20_000  # the first port of jobs under Slurm, and the number of their ports
HOW_TO_NAME_WORKERS = "give --workers=host:port,... and --worker_index, or set TF_CONFIG, or start it with srun"


@dataclasses.dataclass(frozen=True)
class ClusterSpec:
    """All workers of a cluster. Worker 0 is the chief."""

    addresses: tuple[str, ...]  # host:port of each worker's TensorFlow server
    index: int  # of this process

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


class Workers:
    """The workers of a run, as one of them sees them: a process alone, or the workers of a cluster.

    All workers call the same methods in the same order, and each method waits for all of them. `gather` takes one value
    on each worker and returns the values of all, in the workers' order.
    """

    def __init__(
        self, cluster: ClusterSpec = ClusterSpec(("",), 0), gather: Callable[[Any], list] = lambda value: [value]
    ):
        self.cluster, self.index, self.size, self.gather = cluster, cluster.index, cluster.size, gather

    @property
    def is_chief(self) -> bool:
        """True on worker 0, the only one that reads and writes `train_dir`."""
        return self.index == 0

    def broadcast_from_chief(self, make: Callable[[], Any]) -> Any:
        """Return the result of `make` on the chief, on all workers."""
        return self.gather(make() if self.is_chief else None)[0]

    def assert_equal(self, values: Mapping[str, Any]) -> None:
        """Check that all workers have the chief's values.

        Raises:
          UsageError: naming the first worker and the first value that differ; the same on all workers.
        """
        expected, *others = self.gather(dict(values))
        for worker, theirs in enumerate(others, 1):
            for name, value in expected.items():
                if theirs.get(name) != value:
                    raise UsageError(
                        f"{self.cluster.name(worker)} has {name} {theirs.get(name)}, worker 0 has {value}; "
                        "give all workers the same"
                    )


ALONE = Workers()


def resolve_cluster(workers: str, worker_index: int, environment: Mapping[str, str]) -> ClusterSpec:
    """Read the cluster from the flags, or else from `TF_CONFIG`, or else from Slurm's variables.

    Raises:
      UsageError: the workers are not named anywhere, or they make no cluster.
    """
    if workers:
        (addresses, index), source = (workers.split(","), worker_index), "workers"
        if worker_index < 0:
            raise UsageError(f"workers={workers} needs the index of this process; give --worker_index=0 or more")
    elif environment.get("TF_CONFIG"):
        (addresses, index), source = _from_tf_config(environment["TF_CONFIG"]), "TF_CONFIG"
    elif "SLURM_PROCID" in environment:
        (addresses, index), source = _from_slurm(environment), "Slurm's variables"
    else:
        raise UsageError(f"strategy=multi_worker needs to know its workers; {HOW_TO_NAME_WORKERS}")
    if worker_index >= 0 and worker_index != index:
        raise UsageError(f"worker_index={worker_index}, but {source} says that this is worker {index}")
    return _validated(addresses, index, source)


def _validated(addresses: list[str], index: int, source: str) -> ClusterSpec:
    for address in addresses:
        split_address(address)
    if len(set(addresses)) < len(addresses):
        repeated = next(address for address in addresses if addresses.count(address) > 1)
        raise UsageError(f"{source}: {repeated} is given twice; each worker needs its own address")
    if len(addresses) < 2:
        raise UsageError(f"{source}: one worker is no cluster; give more workers, or leave out strategy=multi_worker")
    if not 0 <= index < len(addresses):
        raise UsageError(f"{source}: worker_index={index} is not from 0 to {len(addresses) - 1}")
    return ClusterSpec(tuple(addresses), index)


def split_address(address: str) -> tuple[str, int]:
    """Split an address: `"10.0.0.1:5000"` -> ("10.0.0.1", 5000); `"[::1]:5000"` -> ("::1", 5000).

    Raises:
      UsageError: the address is not a host and a port.
    """
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    try:
        named = bool(host.encode("idna")) and not re.search(r"[\s/]", host)
    except UnicodeError:  # a label of the name is empty or too long
        named = False
    if not (colon and named and re.fullmatch(r"\d+", port) and 0 < int(port) < 2**16):
        raise UsageError(f"workers: {address!r} is not host:port; write --workers=10.0.0.1:5000,10.0.0.2:5000")
    return host, int(port)


def resolve(host: str, port: int, seconds: float) -> list[tuple]:
    """Call `socket.getaddrinfo` until the host's name is known, as for pods that have just been created.

    Raises:
      WorkerLostError: the name is still unknown after `seconds`.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            if time.monotonic() > deadline:
                raise WorkerLostError(f"workers: {host}:{port} cannot be resolved: {error.strerror}") from error
            time.sleep(RETRY_SECONDS)


def check_not_public(address: str, seconds: float) -> None:
    """Check that a worker's address is private, as TensorFlow's port has no authentication.

    Raises:
      UsageError: the address is public.
      WorkerLostError: its name cannot be resolved within `seconds`.
    """
    addresses = {info[4][0] for info in resolve(*split_address(address), seconds)}
    public = sorted(ip for ip in addresses if ipaddress.ip_address(ip.partition("%")[0]).is_global)
    if public:
        raise UsageError(
            f"workers: {public[0]} is a public address, and TensorFlow's port there has no authentication; use a "
            "private network, or give --allow_public_cluster if a firewall admits only the workers"
        )


def _from_tf_config(text: str) -> tuple[list[str], int]:
    """Read addresses and index from {"cluster": {"worker": [...]}, "task": {"type": "worker", "index": 0}}.

    A `chief` is worker 0.
    """
    try:
        content = json.loads(text)
        cluster, task = content["cluster"], content["task"]
        chiefs, workers = list(cluster.get("chief", [])), list(cluster.get("worker", []))
        kind, index = task["type"], int(task["index"])
        addresses = [str(address) for address in chiefs + workers]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(
            f"TF_CONFIG cannot be read ({type(error).__name__}: {error}); write "
            '{"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", "index": 0}}'
        ) from None
    if kind not in ("chief", "worker"):
        raise UsageError(
            f"TF_CONFIG: tasks of type {kind} are not supported; use worker, of which worker 0 is the chief"
        )
    return addresses, index + (len(chiefs) if kind == "worker" else 0)


def _from_slurm(environment: Mapping[str, str]) -> tuple[list[str], int]:
    """Return addresses and index of a job step's tasks, in Slurm's block distribution; the job id gives the ports."""
    try:
        index, tasks = int(environment["SLURM_PROCID"]), int(environment["SLURM_NTASKS"])
        nodes = _expand_nodelist(environment.get("SLURM_STEP_NODELIST") or environment["SLURM_JOB_NODELIST"])
        counts = _expand_counts(environment.get("SLURM_STEP_TASKS_PER_NODE") or environment["SLURM_TASKS_PER_NODE"])
        base = SLURM_PORTS + int(environment.get("SLURM_JOB_ID", 0)) % SLURM_PORTS
    except (KeyError, ValueError) as error:
        message = f"Slurm's variables are incomplete: {error} is missing or not a number; {HOW_TO_NAME_WORKERS}"
        raise UsageError(message) from None
    addresses = [f"{node}:{base + place}" for node, count in zip(nodes, counts, strict=False) for place in range(count)]
    if len(addresses) != tasks or len(nodes) != len(counts):
        raise UsageError(
            f"Slurm's variables name {tasks} tasks, but {len(addresses)} on {len(nodes)} nodes; {HOW_TO_NAME_WORKERS}"
        )
    return addresses, index


def _expand_counts(tasks_per_node: str) -> list[int]:
    """Expand Slurm's tasks per node: `"2,1(x3)"` -> 2, 1, 1, 1."""
    counts = re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks_per_node)
    return [int(count) for count, times in counts for _ in range(int(times or 1))]


def _expand_nodelist(nodes: str) -> list[str]:
    """Expand names: `"gpu[1-2,7],login"` -> gpu1, gpu2, gpu7, login; numbers keep their leading zeros."""
    expanded: list[str] = []
    for name in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodes):
        parts = re.findall(r"([^\[]+)|\[([^\]]*)\]", name)
        choices = [[plain] if plain else _expand_range(ranges) for plain, ranges in parts]
        expanded += map("".join, itertools.product(*choices))
    return expanded


def _expand_range(choices: str) -> list[str]:
    """Expand ranges: `"01-03,7"` -> 01, 02, 03, 7."""
    expanded = []
    for part in choices.split(","):
        low, _, high = part.partition("-")
        expanded += [str(number).zfill(len(low)) for number in range(int(low), int(high or low) + 1)]
    return expanded

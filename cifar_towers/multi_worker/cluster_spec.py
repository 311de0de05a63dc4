"""Who trains together: every worker's address, and which of them this process is."""

import ipaddress
import json
import re
import socket
import time
from collections.abc import Mapping
from typing import NamedTuple

from cifar_towers.errors import UsageError, WorkerLostError

RETRY_SECONDS = 0.2  # seconds between two tries to find or reach another worker
COORDINATION_PORT_OFFSET = 100  # from worker 0's port, which is TensorFlow's, to its own for coordination
MAX_WORKER_PORT = 2**16 - 1 - COORDINATION_PORT_OFFSET  # of a worker
SLURM_PORTS = 20_000  # what jobs under Slurm take their ports from, and how many there are
WAYS = "give --workers=host:port,... and --worker_index, or set TF_CONFIG, or start it with srun"


class ClusterSpec(NamedTuple):
    """All workers of a cluster. Worker 0 is the chief: it alone reads and writes the run's directory."""

    addresses: tuple[str, ...]  # host:port of each, where TensorFlow will listen
    index: int  # this process's

    @property
    def size(self) -> int:
        """How many workers there are."""
        return len(self.addresses)

    def name(self, index: int) -> str:
        """A worker as messages have it: `worker 1 of 3 (10.0.0.2:5000)`."""
        return f"worker {index} of {self.size} ({self.addresses[index]})"

    @property
    def coordination_address(self) -> tuple[str, int]:
        """Where worker 0 listens for what the workers say to each other."""
        host, port = split_address(self.addresses[0])
        return host, port + COORDINATION_PORT_OFFSET


def resolve_cluster(workers: str, worker_index: int, environment: Mapping[str, str]) -> ClusterSpec:
    """The cluster that the flags tell of, or else `TF_CONFIG`, or else Slurm.

    Raises:
      UsageError: none of them does, or what it says makes no cluster.
    """
    if workers:
        cluster, source = (workers.split(","), worker_index), "workers"
        if worker_index < 0:
            raise UsageError(f"workers={workers} does not tell which of them this is; give --worker_index=0 or more")
    elif environment.get("TF_CONFIG"):
        cluster, source = _of_tf_config(environment["TF_CONFIG"]), "TF_CONFIG"
    elif "SLURM_PROCID" in environment:
        cluster, source = _of_slurm(environment), "Slurm's variables"
    else:
        raise UsageError(f"strategy=multi_worker needs to know its workers; {WAYS}")
    if worker_index >= 0 and worker_index != cluster[1]:
        raise UsageError(f"worker_index={worker_index}, but {source} says that this is worker {cluster[1]}; leave one")
    return _checked(*cluster, source)


def _checked(addresses: list[str], index: int, source: str) -> ClusterSpec:
    for address in addresses:
        split_address(address)
    if len(set(addresses)) < len(addresses):
        twice = next(address for address in addresses if addresses.count(address) > 1)
        raise UsageError(f"{source}: {twice} is two workers; each needs an address of its own")
    if len(addresses) < 2:
        raise UsageError(f"{source}: one worker is no cluster; leave strategy=multi_worker, or name more workers")
    if not 0 <= index < len(addresses):
        raise UsageError(
            f"{source}: there is no worker {index} among {len(addresses)}, which count from 0 to {len(addresses) - 1}"
        )
    cluster = ClusterSpec(tuple(addresses), index)
    host, port = cluster.coordination_address
    if (host, port) in map(split_address, addresses):
        raise UsageError(
            f"{source}: worker 0 coordinates the others at its port + {COORDINATION_PORT_OFFSET}, "
            f"and {host}:{port} is a worker's"
        )
    return cluster


def split_address(address: str) -> tuple[str, int]:
    """`"10.0.0.1:5000"` -> ("10.0.0.1", 5000); `"[::1]:5000"` -> ("::1", 5000).

    Raises:
      UsageError: it is not a host and a port.
    """
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    try:
        named = bool(host.encode("idna")) and not re.search(r"[\s/]", host)
    except UnicodeError:  # a part of the name is empty or too long
        named = False
    if not (colon and named and re.fullmatch(r"\d+", port) and 0 < int(port) <= MAX_WORKER_PORT):
        raise UsageError(
            f"workers: {address!r} is not a host:port with a port up to {MAX_WORKER_PORT}; "
            "write --workers=10.0.0.1:5000,10.0.0.2:5000"
        )
    return host, int(port)


def resolve(host: str, port: int, seconds: float) -> list[tuple]:
    """What `socket.getaddrinfo` says of a host; waits for a name that is not known yet, as those of new pods.

    Raises:
      LostError: it is not known after these seconds either.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            if time.monotonic() > deadline:
                raise WorkerLostError(f"workers: {host}:{port} has no address: {error.strerror}") from error
            time.sleep(RETRY_SECONDS)


def check_not_public(address: str, seconds: float) -> None:
    """Refuses to open a port that the whole internet may reach.

    Raises:
      UsageError: the host has an address that is not a private one. LostError: it has none after these seconds.
    """
    found = {info[4][0] for info in resolve(*split_address(address), seconds)}
    public = sorted(ip for ip in found if ipaddress.ip_address(ip.partition("%")[0]).is_global)
    if public:
        raise UsageError(
            f"workers: {public[0]} is a public address, and TensorFlow asks nobody who comes there who it is; use "
            "a private network, or give --allow_public_cluster where a firewall lets only the workers in"
        )


def _of_tf_config(text: str) -> tuple[list[str], int]:
    """TensorFlow's own variable: {"cluster": {"worker": [...]}, "task": {"type": "worker", "index": 0}}; a `chief`
    counts as worker 0."""
    try:
        content = json.loads(text)
        cluster, task = content["cluster"], content["task"]
        chiefs, workers = list(cluster.get("chief", [])), list(cluster.get("worker", []))
        kind, index = task["type"], int(task["index"])
        addresses = [str(address) for address in chiefs + workers]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(
            f"TF_CONFIG cannot be read ({type(error).__name__}: {error}); it is to be like "
            '{"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", "index": 0}}'
        ) from None
    if kind not in ("chief", "worker"):
        raise UsageError(
            f"TF_CONFIG: a task of type {kind} has nothing to do here; all are workers, and worker 0 is the chief"
        )
    return addresses, index + (len(chiefs) if kind == "worker" else 0)


def _of_slurm(environment: Mapping[str, str]) -> tuple[list[str], int]:
    """The tasks of a job step, in the order of Slurm's block distribution; the ports follow from the job's number."""
    try:
        index, tasks = int(environment["SLURM_PROCID"]), int(environment["SLURM_NTASKS"])
        nodes = _expand(environment.get("SLURM_STEP_NODELIST") or environment["SLURM_JOB_NODELIST"])
        a_node = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment["SLURM_TASKS_PER_NODE"]
        counts = [int(n) for n, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", a_node) for _ in range(int(times or 1))]
        base = SLURM_PORTS + int(environment.get("SLURM_JOB_ID", 0)) % SLURM_PORTS
    except (KeyError, ValueError) as error:
        raise UsageError(f"Slurm's variables tell no cluster: {error} is missing or no number; {WAYS}") from None
    addresses = [f"{node}:{base + place}" for node, count in zip(nodes, counts, strict=False) for place in range(count)]
    if len(addresses) != tasks or len(nodes) != len(counts):
        raise UsageError(
            f"Slurm's variables tell of {tasks} tasks, and of {len(addresses)} on {len(nodes)} nodes; {WAYS}"
        )
    return addresses, index


def _expand(nodes: str) -> list[str]:
    """`"gpu[1-2,7],login"` -> gpu1, gpu2, gpu7, login; numbers keep their leading zeros."""
    found = []
    for name in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodes):
        names = [""]
        for plain, choices in re.findall(r"([^\[]+)|\[([^\]]*)\]", name):
            names = [start + end for start in names for end in ([plain] if plain else _numbers(choices))]
        found += names
    return found


def _numbers(choices: str) -> list[str]:
    """`"01-03,7"` -> 01, 02, 03, 7."""
    found = []
    for part in choices.split(","):
        low, _, high = part.partition("-")
        found += [str(number).zfill(len(low)) for number in range(int(low), int(high or low) + 1)]
    return found

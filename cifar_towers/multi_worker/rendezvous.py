"""Rendezvous of a cluster: every worker connects to the chief, which checks all of them and answers each the same."""

import contextlib
import errno
import os
import select
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

from cifar_towers.errors import UsageError, WorkerLostError
from cifar_towers.multi_worker import messages, timeouts
from cifar_towers.multi_worker.cluster_spec import (
    COORDINATION_PORT_OFFSET,
    ClusterSpec,
    resolve,
    split_address,
)

Connections = dict[int, socket.socket]  # by worker
HELLO, ANSWER = b"h", b"v"
MAX_HELLO_BYTES = 2**20


def connect_workers(cluster: ClusterSpec, settings: Mapping[str, Any], timeout_seconds: float) -> Connections:
    """Connects this worker with the others, once all are there and have the same settings.

    Args:
      settings: must be the same on all workers.
      timeout_seconds: how long to wait for the last worker.

    Raises:
      UsageError: two processes are the same worker, a port is in use, or settings differ; the same line on all workers.
      WorkerLostError: a worker did not connect in time.
    """
    hello = {
        "index": cluster.index,
        "workers": list(cluster.addresses),
        "settings": dict(settings),
        "process": f"process {os.getpid()} on {socket.gethostname()}",
        "trouble": _describe_port_error(cluster),
    }
    if cluster.index == 0 and (listener := _listen(cluster, timeout_seconds)):
        connections = _answer_all(cluster, hello, *_accept_workers(listener, cluster.size, timeout_seconds))
        threading.Thread(target=_refuse_latecomers, args=(listener, cluster), daemon=True).start()
        return connections
    return _connect_to_chief(cluster, hello, timeout_seconds)


def _describe_port_error(cluster: ClusterSpec) -> str:
    """Why TensorFlow cannot listen at this worker's port; empty if it can."""
    _, port = split_address(cluster.addresses[cluster.index])
    try:
        with socket.create_server(("", port)):
            return ""
    except OSError as error:
        name, reason = cluster.name(cluster.index), os.strerror(error.errno).lower()
        return f"{name} cannot listen at port {port}: {reason}; give it another port"


# On the chief -----------------------------------------------------------------------------------------------------


def _listen(cluster: ClusterSpec, seconds: float) -> socket.socket | None:
    """The chief's listening socket; None if its port is in use, perhaps by another process that is worker 0."""
    host, port = cluster.coordination_address
    family, *_, address = resolve(host, port, seconds)[0]
    shared = all(split_address(each)[0] == host for each in cluster.addresses)
    if address[0].startswith("127.") and not shared:  # a name that means the loopback only on this machine
        address = ("", port)
    try:
        return socket.create_server(address[:2], family=family, backlog=cluster.size)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        raise UsageError(
            f"worker 0 cannot listen at {_address_text(cluster)}: {error.strerror}; "
            "give worker 0 an address of this machine"
        ) from error


def _accept_workers(listener: socket.socket, size: int, seconds: float) -> tuple[list[socket.socket], list[dict]]:
    """Connections and hellos of the workers that connect in time."""
    deadline, connected = time.monotonic() + seconds, []
    while len(connected) < size - 1 and (left := deadline - time.monotonic()) > 0:
        listener.settimeout(left)
        with contextlib.suppress(TimeoutError):
            connected.append(_accept(listener, size))
            connected = [worker for worker in connected if worker and not _is_closed(worker[0])]
    return [connection for connection, _ in connected], [hello for _, hello in connected]


def _accept(listener: socket.socket, size: int) -> tuple[socket.socket, dict] | None:
    """The next connection and its hello; None for a client that is no worker."""
    connection, _ = listener.accept()
    connection.settimeout(timeouts.REPLY_TIMEOUT_SECONDS)
    try:
        _, hello = messages.receive(connection, MAX_HELLO_BYTES)
        if {"workers", "settings", "process", "trouble"} <= hello.keys() and hello["index"] in range(size):
            return connection, hello
    except (OSError, ValueError, AttributeError, KeyError):
        pass
    connection.close()
    return None


def _is_closed(connection: socket.socket) -> bool:
    """Whether a worker has closed its connection, as after it was killed and restarted."""
    readable, _, _ = select.select([connection], [], [], 0)  # it sends nothing until it is answered
    return bool(readable)


def _refuse_latecomers(listener: socket.socket, cluster: ClusterSpec) -> None:
    """Answers workers that connect after the cluster is complete; ends when it can accept no more."""
    listener.settimeout(None)
    with contextlib.suppress(OSError):
        while True:
            if latecomer := _accept(listener, cluster.size):
                connection, hello = latecomer
                line = f"{cluster.name(hello['index'])} is already connected, and the cluster is training"
                answer = [f"{line}; end it first, or give this one another worker_index", WorkerLostError.exit_code]
                with connection, contextlib.suppress(OSError):
                    messages.send(connection, ANSWER, answer)


def _answer_all(
    cluster: ClusterSpec, own_hello: dict, connections: list[socket.socket], hellos: list[dict]
) -> Connections:
    """Answers all workers with the first conflict or with none; returns the connections by worker."""
    error = _find_conflict(cluster, [own_hello, *hellos])
    for connection in connections:
        connection.settimeout(timeouts.REPLY_TIMEOUT_SECONDS)
        with contextlib.suppress(OSError):
            messages.send(connection, ANSWER, error and [str(error), error.exit_code])
    if error:
        raise error
    by_worker = dict(zip((hello["index"] for hello in hellos), connections, strict=True))
    return {worker: _configured(connection) for worker, connection in sorted(by_worker.items())}


def _find_conflict(cluster: ClusterSpec, hellos: list[dict]) -> UsageError | WorkerLostError | None:
    """The first conflict between the workers, or a missing worker."""
    first, by_index = hellos[0], {}
    for hello in hellos:
        index, other = hello["index"], by_index.get(hello["index"])
        if hello["workers"] != first["workers"]:
            return UsageError(
                f"worker {index} has workers={','.join(hello['workers'])}, worker 0 has "
                f"workers={','.join(first['workers'])}; give all the same list"
            )
        if other:
            return UsageError(
                f"two processes are worker {index}: {other['process']} and {hello['process']}; "
                "give each a worker_index of its own"
            )
        by_index[index] = hello
    trouble = next((hello["trouble"] for hello in hellos if hello["trouble"]), "")
    if trouble:
        return UsageError(trouble)
    missing = [index for index in range(cluster.size) if index not in by_index]
    if missing:
        names = ", ".join(cluster.name(index) for index in missing)
        return WorkerLostError(
            f"{names} did not connect to {_address_text(cluster)}; "
            "start it with the same workers and its own worker_index"
        )
    settings = {index: hello["settings"] for index, hello in by_index.items()}
    if difference := first_difference(settings.items()):
        index, name = difference
        return UsageError(
            f"{cluster.name(index)} has {name}={settings[index].get(name)}, worker 0 has {name}={settings[0][name]}; "
            "give all workers the same"
        )
    return None


def first_difference(values: Iterable[tuple[int, Mapping[str, Any]]]) -> tuple[int, str] | None:
    """The first worker whose values differ from worker 0's, which come first, and the first name that differs."""
    (_, expected), *others = values
    different = ((worker, name) for worker, theirs in others for name in expected if theirs.get(name) != expected[name])
    return next(different, None)


# On the others ----------------------------------------------------------------------------------------------------


def _connect_to_chief(cluster: ClusterSpec, hello: dict, seconds: float) -> Connections:
    """Connects to the chief and waits for its answer."""
    connection = _open_connection(cluster, seconds)
    try:
        messages.send(connection, HELLO, hello)
        connection.settimeout(seconds + timeouts.REPLY_TIMEOUT_SECONDS)
        _, answer = messages.receive(connection)
    except (OSError, ValueError) as error:
        raise WorkerLostError(
            f"the process at {_address_text(cluster)} does not answer as worker 0 ({error}); worker 0 may have ended, "
            "or another program uses its port"
        ) from error
    if answer:
        line, code = answer
        raise (UsageError if code == UsageError.exit_code else WorkerLostError)(line)
    return {0: _configured(connection)}


def _open_connection(cluster: ClusterSpec, seconds: float) -> socket.socket:
    deadline = time.monotonic() + seconds
    while True:
        try:
            return socket.create_connection(cluster.coordination_address, timeout=timeouts.REPLY_TIMEOUT_SECONDS)
        except OSError as error:
            if time.monotonic() + timeouts.RETRY_SECONDS > deadline:
                raise WorkerLostError(
                    f"worker 0 does not answer at {_address_text(cluster)}, its port + {COORDINATION_PORT_OFFSET} "
                    f"({error.strerror or error}); start it, with the same workers"
                ) from error
            time.sleep(timeouts.RETRY_SECONDS)


def _address_text(cluster: ClusterSpec) -> str:
    return ":".join(map(str, cluster.coordination_address))


def _configured(connection: socket.socket) -> socket.socket:
    connection.settimeout(timeouts.HEARTBEAT_TIMEOUT_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection

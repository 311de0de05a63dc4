"""How a cluster meets: every worker comes to the chief, who judges all of them at once and tells everybody the same."""

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
from cifar_towers.multi_worker import messages
from cifar_towers.multi_worker.cluster_spec import (
    COORDINATION_PORT_OFFSET,
    RETRY_SECONDS,
    ClusterSpec,
    resolve,
    split_address,
)

Connections = dict[int, socket.socket]  # by worker
HELLO, VERDICT = b"h", b"v"
PATIENCE = 5.0  # seconds for one who is there to say who it is, and for the chief to judge
MOST_SAID = 2**20  # bytes of what a worker says of itself
HEARTBEAT_TIMEOUT_SECONDS = 20.0  # seconds without a sign of life until a worker is lost


def meet(cluster: ClusterSpec, settings: Mapping[str, Any], seconds: float) -> Connections:
    """Waits until all workers are there and have found each other to be of one mind.

    Args:
      settings: what must be the same on all of them.
      seconds: how long to wait for the last.

    Raises:
      UsageError: two processes are one worker, a port is taken, or settings differ; all workers get the same line.
      LostError: somebody did not come.
    """
    hello = {
        "index": cluster.index,
        "workers": list(cluster.addresses),
        "settings": dict(settings),
        "process": f"process {os.getpid()} on {socket.gethostname()}",
        "trouble": _port_taken(cluster),
    }
    if cluster.index == 0 and (listener := _listen(cluster, seconds)):
        connections = _judge(cluster, hello, *_collect(listener, cluster.size, seconds))
        threading.Thread(target=_turn_away, args=(listener, cluster), daemon=True).start()
        return connections
    return _report(cluster, hello, seconds)


def _port_taken(cluster: ClusterSpec) -> str:
    """What keeps TensorFlow from listening at this worker's port; empty if nothing does."""
    _, port = split_address(cluster.addresses[cluster.index])
    try:
        with socket.create_server(("", port)):
            return ""
    except OSError as error:
        name, why = cluster.name(cluster.index), os.strerror(error.errno).lower()
        return f"{name} cannot listen at port {port}: {why}; give it another port"


# The chief --------------------------------------------------------------------------------------------------------


def _listen(cluster: ClusterSpec, seconds: float) -> socket.socket | None:
    """The chief's door; None if somebody else has it already, who may be another process that is worker 0."""
    host, port = cluster.coordination_address
    family, *_, address = resolve(host, port, seconds)[0]
    shared = all(split_address(each)[0] == host for each in cluster.addresses)
    if address[0].startswith("127.") and not shared:  # this machine's own name for itself, which others do not share
        address = ("", port)
    try:
        return socket.create_server(address[:2], family=family, backlog=cluster.size)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        raise UsageError(
            f"worker 0 cannot listen at {_place(cluster)}: {error.strerror}; it is to be an address of this machine"
        ) from error


def _collect(listener: socket.socket, size: int, seconds: float) -> tuple[list[socket.socket], list[dict]]:
    """Those who came: connections and what each said, until all have or time is up."""
    deadline, came = time.monotonic() + seconds, []
    while len(came) < size - 1 and (left := deadline - time.monotonic()) > 0:
        listener.settimeout(left)
        with contextlib.suppress(TimeoutError):
            came.append(_hear(listener, size))
            came = [(connection, hello) for connection, hello in filter(None, came) if not _has_ended(connection)]
    return [connection for connection, _ in came], [hello for _, hello in came]


def _hear(listener: socket.socket, size: int) -> tuple[socket.socket, dict] | None:
    """The next who comes, and what it says of itself; None for a stranger."""
    connection, _ = listener.accept()
    connection.settimeout(PATIENCE)
    try:
        _, hello = messages.receive(connection, MOST_SAID)
        if {"workers", "settings", "process", "trouble"} <= hello.keys() and hello["index"] in range(size):
            return connection, hello
    except (OSError, ValueError, AttributeError, KeyError):
        pass
    connection.close()
    return None


def _has_ended(connection: socket.socket) -> bool:
    """Whether who came has gone again, as one does that is killed and started anew."""
    readable, _, _ = select.select([connection], [], [], 0)  # it says nothing more until it is answered
    return bool(readable)


def _turn_away(listener: socket.socket, cluster: ClusterSpec) -> None:
    """Tells whoever comes when all are there that it comes too late; ends when it can hear nobody any more."""
    listener.settimeout(None)
    with contextlib.suppress(OSError):
        while True:
            if visitor := _hear(listener, cluster.size):
                connection, hello = visitor
                line = f"{cluster.name(hello['index'])} is there already, and the cluster trains"
                verdict = [f"{line}; end it first, or give this one another worker_index", WorkerLostError.exit_code]
                with connection, contextlib.suppress(OSError):
                    messages.send(connection, VERDICT, verdict)


def _judge(cluster: ClusterSpec, mine: dict, connections: list[socket.socket], hellos: list[dict]) -> Connections:
    error = _trouble(cluster, [mine, *hellos])
    for connection in connections:
        connection.settimeout(PATIENCE)
        with contextlib.suppress(OSError):
            messages.send(connection, VERDICT, error and [str(error), error.exit_code])
    if error:
        raise error
    found = dict(zip((hello["index"] for hello in hellos), connections, strict=True))
    return {worker: _kept(connection) for worker, connection in sorted(found.items())}


def _trouble(cluster: ClusterSpec, hellos: list[dict]) -> UsageError | WorkerLostError | None:
    """The first thing that is wrong with those who came."""
    first, came = hellos[0], {}
    for hello in hellos:
        index, other = hello["index"], came.get(hello["index"])
        if hello["workers"] != first["workers"]:
            return UsageError(
                f"worker {index} was told of workers {','.join(hello['workers'])}, worker 0 of "
                f"{','.join(first['workers'])}; give all the same list"
            )
        if other:
            return UsageError(
                f"two processes are worker {index}: {other['process']} and {hello['process']}; "
                "give each a worker_index of its own"
            )
        came[index] = hello
    trouble = next((hello["trouble"] for hello in hellos if hello["trouble"]), "")
    if trouble:
        return UsageError(trouble)
    missing = [index for index in range(cluster.size) if index not in came]
    if missing:
        names = ", ".join(cluster.name(index) for index in missing)
        return WorkerLostError(
            f"{names} did not come to {_place(cluster)}; start it with the same workers and its own worker_index"
        )
    settings = {index: hello["settings"] for index, hello in came.items()}
    if odd := first_difference(settings.items()):
        index, name = odd
        return UsageError(
            f"{cluster.name(index)} has {name}={settings[index].get(name)}, worker 0 has {name}={settings[0][name]}; "
            "give all workers the same"
        )
    return None


def first_difference(said: Iterable[tuple[int, Mapping[str, Any]]]) -> tuple[int, str] | None:
    """The first worker that says something else than worker 0, which comes first, and the first name of it."""
    (_, expected), *others = said
    different = ((worker, name) for worker, theirs in others for name in expected if theirs.get(name) != expected[name])
    return next(different, None)


# The others -------------------------------------------------------------------------------------------------------


def _report(cluster: ClusterSpec, hello: dict, seconds: float) -> Connections:
    """Comes to the chief and hears what it says."""
    connection = _reach(cluster, seconds)
    try:
        messages.send(connection, HELLO, hello)
        connection.settimeout(seconds + PATIENCE)
        _, verdict = messages.receive(connection)
    except (OSError, ValueError) as error:
        raise WorkerLostError(
            f"whoever listens at {_place(cluster)}, where worker 0 should, does not answer as it would ({error}); it "
            "may be gone, or another program has its port"
        ) from error
    if verdict:
        line, code = verdict
        raise (UsageError if code == UsageError.exit_code else WorkerLostError)(line)
    return {0: _kept(connection)}


def _reach(cluster: ClusterSpec, seconds: float) -> socket.socket:
    deadline = time.monotonic() + seconds
    while True:
        try:
            return socket.create_connection(cluster.coordination_address, timeout=PATIENCE)
        except OSError as error:
            if time.monotonic() + RETRY_SECONDS > deadline:
                raise WorkerLostError(
                    f"worker 0 does not answer at {_place(cluster)}, its port + {COORDINATION_PORT_OFFSET} "
                    f"({error.strerror or error}); start it, with the same workers"
                ) from error
            time.sleep(RETRY_SECONDS)


def _place(cluster: ClusterSpec) -> str:
    return ":".join(map(str, cluster.coordination_address))


def _kept(connection: socket.socket) -> socket.socket:
    connection.settimeout(HEARTBEAT_TIMEOUT_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection

"""Rendezvous, exchange, heartbeats and end of workers: real sockets, a thread for each worker."""

import contextlib
import queue
import socket
import threading
import time

import numpy as np
import pytest

from cifar_towers.errors import Interrupted, UsageError, WorkerLostError
from cifar_towers.multi_worker import coordination, messages, rendezvous, timeouts
from cifar_towers.multi_worker.cluster_spec import ClusterSpec
from cifar_towers.multi_worker.launcher import free_addresses


def run_in_threads(*workers):
    """Runs a function for each worker at the same time; returns what each returned or raised."""
    outcomes = [None] * len(workers)

    def run(place, worker):
        try:
            outcomes[place] = worker()
        except BaseException as error:
            outcomes[place] = error

    threads = [threading.Thread(target=run, args=each, daemon=True) for each in enumerate(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return outcomes


def connecting(cluster, settings=(), seconds=5.0):
    return lambda: rendezvous.connect_workers(cluster, dict(settings), seconds)


def make_coordinators(addresses, ends):
    """A coordinator for each worker; ends of their processes are put on `ends` as (worker, line, code)."""
    clusters = [ClusterSpec(addresses, index) for index in range(len(addresses))]
    connected = run_in_threads(*map(connecting, clusters))

    def end_of(index):
        return lambda line, code: ends.put((index, line, code))

    return [
        coordination.Coordinator(cluster, connections, end_of(cluster.index))
        for cluster, connections in zip(clusters, connected, strict=True)
    ]


def test_values_are_unpacked_as_packed():
    value = {"a": [1, 2.5, None, True, "é"], "weights": [np.arange(6, dtype=np.float32).reshape(2, 3), np.array(7)]}
    back = messages.unpack(messages.pack(value | {"b": np.float32(0.1), "nan": float("nan")}))
    assert back["a"] == value["a"] and back["b"] == float(np.float32(0.1)) and np.isnan(back["nan"])
    for mine, theirs in zip(back["weights"], value["weights"], strict=True):
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("content", [b"", b"x" * 9, messages.pack([np.ones(4)])[:-1], b"\0" * 7 + b"\2[]trailing"])
def test_malformed_messages_are_refused(content):
    with pytest.raises(ValueError):
        messages.unpack(content)


def test_objects_cannot_be_packed():
    with pytest.raises(TypeError):
        messages.pack({"a": object()})
    with pytest.raises(TypeError):
        messages.pack(np.array([object()]))


def test_workers_exchange_in_order_and_close():
    ends = queue.SimpleQueue()
    coordinators = make_coordinators(free_addresses(3), ends)

    def work(coordinator):
        def worker():
            gathered = [coordinator.gather([coordinator.index, turn]) for turn in range(50)]
            large = coordinator.broadcast_from_chief(lambda: np.arange(10**6))
            coordinator.assert_equal({"same": 1})
            coordinator.close()
            return gathered, large.sum()

        return worker

    outcomes = run_in_threads(*map(work, coordinators))
    expected = [[[index, turn] for index in range(3)] for turn in range(50)]
    assert outcomes == [(expected, 499999500000)] * 3
    time.sleep(0.2)
    assert ends.empty()


def test_unequal_values_are_named_on_all_workers():
    coordinators = make_coordinators(free_addresses(3), queue.SimpleQueue())
    outcomes = run_in_threads(
        *[lambda each=each: each.assert_equal({"towers": 1, "data": each.index // 2}) for each in coordinators]
    )
    assert {str(outcome) for outcome in outcomes} == {str(outcomes[0])}
    assert isinstance(outcomes[0], UsageError) and "worker 2 of 3" in str(outcomes[0]) and "data 1" in str(outcomes[0])


@pytest.mark.parametrize("victim", [0, 1])
def test_lost_worker_ends_all_and_is_named(monkeypatch, victim):
    monkeypatch.setattr(timeouts, "EXIT_GRACE_SECONDS", 0.1)
    ends = queue.SimpleQueue()
    coordinators, tidied = make_coordinators(free_addresses(3), ends), queue.SimpleQueue()
    for each in coordinators:
        each.before_exit = lambda index=each.index: tidied.put(index)
    coordinators[victim]._closed.set()  # it takes no part in its own end
    for connection in coordinators[victim]._connections.values():
        connection.shutdown(socket.SHUT_RDWR)
    reports = sorted(ends.get(timeout=5) for _ in range(2))
    assert [index for index, *_ in reports] == [index for index in range(3) if index != victim]
    assert all(f"worker {victim} of 3" in line and code == 5 for _, line, code in reports)
    assert sorted(tidied.get(timeout=5) for _ in range(2)) == [index for index, *_ in reports]


@pytest.mark.parametrize("victim", [0, 2])
def test_silent_worker_ends_all_and_is_named(monkeypatch, victim):
    monkeypatch.setattr(timeouts, "EXIT_GRACE_SECONDS", 0.1)
    monkeypatch.setattr(timeouts, "HEARTBEAT_INTERVAL_SECONDS", 0.1)
    monkeypatch.setattr(timeouts, "HEARTBEAT_TIMEOUT_SECONDS", 2.0)
    ends = queue.SimpleQueue()
    coordinators = make_coordinators(free_addresses(3), ends)
    coordinators[victim]._send = lambda *_: None  # its connections stay open
    reports = [ends.get(timeout=20) for _ in range(2)]
    lines = [line for index, line, _ in reports if index != victim]
    assert lines and all(f"worker {victim} of 3" in line and "no heartbeat" in line for line in lines)


def test_abort_ends_all_with_the_same_line(monkeypatch):
    monkeypatch.setattr(timeouts, "EXIT_GRACE_SECONDS", 0.1)
    ends = queue.SimpleQueue()
    coordinators = make_coordinators(free_addresses(3), ends)
    coordinators[2].abort("data: no such file", 3)
    reports = sorted(ends.get(timeout=5) for _ in range(2))
    assert [index for index, *_ in reports] == [0, 1]
    for _, line, code in reports:
        assert line.startswith("worker 2 of 3") and line.endswith("ended: data: no such file") and code == 3


def test_second_end_does_not_wait():
    """As when the chief learns of a worker's end while it is about to exit by itself."""
    coordinators = make_coordinators(free_addresses(3), queue.SimpleQueue())
    coordinators[0]._send_end("one line", 5)
    start = time.monotonic()
    coordinators[0].abort("another", 1)
    assert time.monotonic() - start < timeouts.HEARTBEAT_INTERVAL_SECONDS / 2


def test_main_thread_may_exit_by_itself():
    """After a signal to all workers, each exits with its own line."""
    ends = queue.SimpleQueue()
    coordinators = make_coordinators(free_addresses(2), ends)
    for coordinator in coordinators:
        coordinator.abort("interrupted: saved step 3", 143)
    time.sleep(0.3)
    assert ends.empty()


def bad_clusters():
    """(name, cluster of each process, error type, message) of clusters that cannot train."""
    two, other = free_addresses(2), free_addresses(2)
    yield "missing", [ClusterSpec(two, 0)], WorkerLostError, "worker 1 of 2"
    yield "no chief", [ClusterSpec(two, 1)], WorkerLostError, "worker 0 does not answer"
    yield "twice 1", [ClusterSpec((*two, other[0]), i) for i in (0, 1, 1)], UsageError, "two processes are worker 1"
    yield "twice 0", [ClusterSpec(free_addresses(2), 0)] * 2, UsageError, "two processes are worker 0"
    lists = (other[0], other[1]), (other[0], two[1])
    yield "lists", [ClusterSpec(lists[0], 0), ClusterSpec(lists[1], 1)], UsageError, "give all the same list"


@pytest.mark.parametrize("case", range(5))
def test_invalid_cluster_is_refused_with_the_same_line_everywhere(case):
    _, clusters, error, message = list(bad_clusters())[case]
    outcomes = run_in_threads(*[connecting(cluster, seconds=1.5) for cluster in clusters])
    for outcome in outcomes:
        assert type(outcome) is error and message in str(outcome) and "\n" not in str(outcome)
    assert len({str(outcome) for outcome in outcomes}) == 1


def test_different_settings_are_named():
    addresses = free_addresses(2)
    outcomes = run_in_threads(
        connecting(ClusterSpec(addresses, 0), {"seed": 0}.items()),
        connecting(ClusterSpec(addresses, 1), {"seed": 1}.items()),
    )
    assert all("seed=1, worker 0 has seed=0" in str(outcome) for outcome in outcomes)


def test_port_in_use_is_reported_to_all():
    addresses = free_addresses(2)
    with socket.create_server(("", int(addresses[1].rpartition(":")[2]))):
        outcomes = run_in_threads(*[connecting(ClusterSpec(addresses, index)) for index in range(2)])
    assert all("worker 1 of 2" in str(o) and "cannot listen" in str(o) for o in outcomes)


def test_strangers_and_latecomers_are_turned_away():
    addresses = free_addresses(2)
    host, port = ClusterSpec(addresses, 0).coordination_address

    def stranger():
        for _ in range(50):
            with contextlib.suppress(OSError), socket.create_connection((host, port)) as connection:
                connection.sendall(b"GET / HTTP/1.1\r\n\r\n" + b"x" * 100)
                return
            time.sleep(0.02)

    first = threading.Thread(target=stranger)
    first.start()
    chief, other, _ = run_in_threads(
        connecting(ClusterSpec(addresses, 0)),
        lambda: (time.sleep(0.3), connecting(ClusterSpec(addresses, 1))())[1],
        stranger,
    )
    assert set(chief) == {1} and set(other) == {0}
    (late,) = run_in_threads(
        lambda: rendezvous._connect_to_chief(
            ClusterSpec(addresses, 1), {"index": 1, "workers": [], "settings": {}, "process": "", "trouble": ""}, 1.0
        )
    )
    assert isinstance(late, WorkerLostError) and "is already connected" in str(late)


def test_error_inside_connect_ends_the_others(monkeypatch):
    ends = queue.SimpleQueue()
    monkeypatch.setattr(timeouts, "EXIT_GRACE_SECONDS", 0.2)
    monkeypatch.setattr(coordination, "_end_process", lambda _, line, code: ends.put((line, code)))
    addresses = free_addresses(2)

    def worker(index):
        with coordination.connect(ClusterSpec(addresses, index), {}, 5.0):
            if index:
                raise Interrupted(15, "before the first step; nothing to save")
            reports.append(ends.get(timeout=5))
            raise WorkerLostError("the process has ended")

    reports = []
    run_in_threads(lambda: worker(0), lambda: worker(1))
    ((line, code),) = reports
    assert (
        "worker 1 of 2" in line and line.endswith("interrupted: before the first step; nothing to save") and code == 143
    )


def test_single_worker():
    coordinator = coordination.single_worker()
    assert coordinator.is_chief and coordinator.gather(5) == [5] and coordinator.broadcast_from_chief(lambda: 6) == 6
    coordinator.assert_equal({"a": 1})
    coordinator.close()

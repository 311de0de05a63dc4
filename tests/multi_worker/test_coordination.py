"""How workers meet, exchange, watch over each other and part: real sockets, a thread for each worker."""

import contextlib
import queue
import socket
import threading
import time

import numpy as np
import pytest

from cifar_towers.errors import Interrupted, UsageError, WorkerLostError
from cifar_towers.multi_worker import coordination, messages, rendezvous
from cifar_towers.multi_worker.cluster_spec import ClusterSpec
from cifar_towers.multi_worker.launcher import free_addresses


def together(*workers):
    """Runs a function for each worker at the same time; what each returned or raised."""
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


def meet(cluster, settings=(), seconds=5.0):
    return lambda: rendezvous.meet(cluster, dict(settings), seconds)


def make_teams(addresses, ends):
    """A team for each worker; what ends their processes is put on `ends` as (worker, line, code)."""
    cluster = [ClusterSpec(addresses, index) for index in range(len(addresses))]
    found = together(*map(meet, cluster))

    def end_of(index):
        return lambda line, code: ends.put((index, line, code))

    return [
        coordination.Coordinator(one, connections, end_of(one.index))
        for one, connections in zip(cluster, found, strict=True)
    ]


def test_values_travel_as_they_are():
    value = {"a": [1, 2.5, None, True, "é"], "weights": [np.arange(6, dtype=np.float32).reshape(2, 3), np.array(7)]}
    back = messages.unpack(messages.pack(value | {"b": np.float32(0.1), "nan": float("nan")}))
    assert back["a"] == value["a"] and back["b"] == float(np.float32(0.1)) and np.isnan(back["nan"])
    for mine, theirs in zip(back["weights"], value["weights"], strict=True):
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("content", [b"", b"x" * 9, messages.pack([np.ones(4)])[:-1], b"\0" * 7 + b"\2[]trailing"])
def test_what_is_no_message_is_refused(content):
    with pytest.raises(ValueError):
        messages.unpack(content)


def test_objects_cannot_be_sent():
    with pytest.raises(TypeError):
        messages.pack({"a": object()})
    with pytest.raises(TypeError):
        messages.pack(np.array([object()]))


def test_workers_exchange_in_their_order_and_part():
    ends = queue.SimpleQueue()
    teams = make_teams(free_addresses(3), ends)

    def work(one):
        def worker():
            found = [one.gather([one.index, turn]) for turn in range(50)]
            large = one.broadcast_from_chief(lambda: np.arange(10**6))
            one.assert_equal({"same": 1})
            one.close()
            return found, large.sum()

        return worker

    outcomes = together(*map(work, teams))
    expected = [[[index, turn] for index in range(3)] for turn in range(50)]
    assert outcomes == [(expected, 499999500000)] * 3
    time.sleep(0.2)
    assert ends.empty()


def test_facts_that_differ_are_named_on_all():
    teams = make_teams(free_addresses(3), queue.SimpleQueue())
    outcomes = together(*[lambda one=one: one.assert_equal({"towers": 1, "data": one.index // 2}) for one in teams])
    assert {str(outcome) for outcome in outcomes} == {str(outcomes[0])}
    assert isinstance(outcomes[0], UsageError) and "worker 2 of 3" in str(outcomes[0]) and "data 1" in str(outcomes[0])


@pytest.mark.parametrize("victim", [0, 1])
def test_a_worker_that_is_gone_ends_all_with_its_name(monkeypatch, victim):
    monkeypatch.setattr(coordination, "EXIT_GRACE_SECONDS", 0.1)
    ends = queue.SimpleQueue()
    teams, tidied = make_teams(free_addresses(3), ends), queue.SimpleQueue()
    for each in teams:
        each.before_exit = lambda index=each.index: tidied.put(index)
    teams[victim]._parted.set()  # it does nothing any more
    for connection in teams[victim]._connections.values():
        connection.shutdown(socket.SHUT_RDWR)
    told = sorted(ends.get(timeout=5) for _ in range(2))
    assert [index for index, *_ in told] == [index for index in range(3) if index != victim]
    assert all(f"worker {victim} of 3" in line and code == 5 for _, line, code in told)
    assert sorted(tidied.get(timeout=5) for _ in range(2)) == [index for index, *_ in told]


@pytest.mark.parametrize("victim", [0, 2])
def test_a_worker_that_is_silent_ends_all_with_its_name(monkeypatch, victim):
    monkeypatch.setattr(coordination, "EXIT_GRACE_SECONDS", 0.1)
    monkeypatch.setattr(coordination, "HEARTBEAT_INTERVAL_SECONDS", 0.1)
    monkeypatch.setattr(rendezvous, "HEARTBEAT_TIMEOUT_SECONDS", 2.0)
    ends = queue.SimpleQueue()
    teams = make_teams(free_addresses(3), ends)
    teams[victim]._send = lambda *_: None  # its connections stay, and nothing comes from it
    told = [ends.get(timeout=20) for _ in range(2)]
    lines = [line for index, line, _ in told if index != victim]
    assert lines and all(f"worker {victim} of 3" in line and "nothing was heard" in line for line in lines)


def test_what_ends_one_is_told_by_all(monkeypatch):
    monkeypatch.setattr(coordination, "EXIT_GRACE_SECONDS", 0.1)
    ends = queue.SimpleQueue()
    teams = make_teams(free_addresses(3), ends)
    teams[2].abort("data: no such file", 3)
    told = sorted(ends.get(timeout=5) for _ in range(2))
    assert [index for index, *_ in told] == [0, 1]
    for _, line, code in told:
        assert line.startswith("worker 2 of 3") and line.endswith("ended: data: no such file") and code == 3


def test_who_ends_twice_waits_for_nobody():
    """As the chief does that hears of a worker's end while it is about to leave by itself."""
    teams = make_teams(free_addresses(3), queue.SimpleQueue())
    teams[0]._tell_all("one line", 5)
    start = time.monotonic()
    teams[0].abort("another", 1)
    assert time.monotonic() - start < coordination.HEARTBEAT_INTERVAL_SECONDS / 2


def test_the_main_thread_may_end_by_itself():
    """All were asked to leave: each has its own line already, and nobody ends it from the side."""
    ends = queue.SimpleQueue()
    teams = make_teams(free_addresses(2), ends)
    for one in teams:
        one.abort("interrupted: saved step 3", 143)
    time.sleep(0.3)
    assert ends.empty()


def bad_clusters():
    """Name -> (what each process believes, what all are told)."""
    two, other = free_addresses(2), free_addresses(2)
    yield "missing", [ClusterSpec(two, 0)], WorkerLostError, "worker 1 of 2"
    yield "no chief", [ClusterSpec(two, 1)], WorkerLostError, "worker 0 does not answer"
    yield "twice 1", [ClusterSpec((*two, other[0]), i) for i in (0, 1, 1)], UsageError, "two processes are worker 1"
    yield "twice 0", [ClusterSpec(free_addresses(2), 0)] * 2, UsageError, "two processes are worker 0"
    lists = (other[0], other[1]), (other[0], two[1])
    yield "lists", [ClusterSpec(lists[0], 0), ClusterSpec(lists[1], 1)], UsageError, "give all the same list"


@pytest.mark.parametrize("case", range(5))
def test_a_bad_cluster_is_told_to_every_process_in_the_same_line(case):
    _, believed, kind, told = list(bad_clusters())[case]
    outcomes = together(*[meet(cluster, seconds=1.5) for cluster in believed])
    for outcome in outcomes:
        assert type(outcome) is kind and told in str(outcome) and "\n" not in str(outcome)
    assert len({str(outcome) for outcome in outcomes}) == 1


def test_settings_that_differ_are_named():
    found = free_addresses(2)
    outcomes = together(
        meet(ClusterSpec(found, 0), {"seed": 0}.items()), meet(ClusterSpec(found, 1), {"seed": 1}.items())
    )
    assert all("seed=1, worker 0 has seed=0" in str(outcome) for outcome in outcomes)


def test_a_taken_port_is_told_to_all():
    found = free_addresses(2)
    with socket.create_server(("", int(found[1].rpartition(":")[2]))):
        outcomes = together(*[meet(ClusterSpec(found, index)) for index in range(2)])
    assert all("worker 1 of 2" in str(o) and "cannot listen" in str(o) for o in outcomes)


def test_strangers_and_latecomers_change_nothing():
    found = free_addresses(2)
    host, port = ClusterSpec(found, 0).coordination_address

    def stranger():
        for _ in range(50):
            with contextlib.suppress(OSError), socket.create_connection((host, port)) as connection:
                connection.sendall(b"GET / HTTP/1.1\r\n\r\n" + b"x" * 100)
                return
            time.sleep(0.02)

    first = threading.Thread(target=stranger)
    first.start()
    chief, other, _ = together(
        meet(ClusterSpec(found, 0)), lambda: (time.sleep(0.3), meet(ClusterSpec(found, 1))())[1], stranger
    )
    assert set(chief) == {1} and set(other) == {0}
    (late,) = together(
        lambda: rendezvous._report(
            ClusterSpec(found, 1), {"index": 1, "workers": [], "settings": {}, "process": "", "trouble": ""}, 1.0
        )
    )
    assert isinstance(late, WorkerLostError) and "is there already" in str(late)


def test_joined_tells_the_others_what_ended_it(monkeypatch):
    ends = queue.SimpleQueue()
    monkeypatch.setattr(coordination, "EXIT_GRACE_SECONDS", 0.2)
    monkeypatch.setattr(coordination, "_end_process", lambda _, line, code: ends.put((line, code)))
    found = free_addresses(2)

    def worker(index):
        with coordination.connect(ClusterSpec(found, index), {}, 5.0):
            if index:
                raise Interrupted(15, "before the first step; nothing to save")
            told.append(ends.get(timeout=5))
            raise WorkerLostError("the process has ended")

    told = []
    together(lambda: worker(0), lambda: worker(1))
    ((line, code),) = told
    assert (
        "worker 1 of 2" in line and line.endswith("interrupted: before the first step; nothing to save") and code == 143
    )


def test_alone_everything_is_trivial():
    one = coordination.single_worker()
    assert one.is_chief and one.gather(5) == [5] and one.broadcast_from_chief(lambda: 6) == 6
    one.assert_equal({"a": 1})
    one.close()

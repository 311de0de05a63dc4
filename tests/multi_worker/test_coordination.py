"""Exchange, start and end of workers. What other workers cause is in test_workers.py, with real processes."""

import ctypes
import dataclasses
import inspect
import signal
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import context

from cifar_towers import trainer
from cifar_towers.config import TrainConfig
from cifar_towers.data import synthetic
from cifar_towers.data.dataset import Dataset
from cifar_towers.errors import RunError, UsageError, WorkerLostError
from cifar_towers.multi_worker import coordination
from cifar_towers.multi_worker.cluster_spec import ALONE, ClusterSpec, Workers
from cifar_towers.multi_worker.coordination import run_interruptibly
from cifar_towers.multi_worker.launcher import free_addresses
from cifar_towers.shutdown import ShutdownHandler
from cifar_towers.trainer import shared_values
from cifar_towers.training.distributed_step import make_strategy

FROM_TASK = "from remote target /job:worker/replica:0/task:{}"
CLUSTER = ClusterSpec(("a:1", "b:1", "c:1"), 0)
LOST = "Collective ops is aborted by: {}\nThe error could be from a previous operation. Restart your program to reset."


def test_values_of_the_first_replica_are_gathered(towers):
    """Two replicas of one worker, as on a machine with two GPUs."""
    gather = coordination._make_gather(make_strategy(towers(2)))
    value = {"a": [1, 2.5, None, True, "é"], "weights": [np.arange(6, dtype=np.float32).reshape(2, 3), np.array(7)]}
    (back,) = gather(value | {"b": np.float32(0.1), "nan": float("nan")})
    assert back["a"] == value["a"] and back["b"] == float(np.float32(0.1)) and np.isnan(back["nan"])
    for mine, theirs in zip(back["weights"], value["weights"], strict=True):
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(mine, theirs)
    for other in ([5, -6, 7], [], None):
        assert gather(other) == [other]


def test_silent_workers_are_named():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        addresses = "a:1", f"127.0.0.1:{listener.getsockname()[1]}", *free_addresses(1)
        assert coordination._silent_workers(ClusterSpec(addresses, 0)) == f"worker 2 of 3 ({addresses[2]})"
        assert coordination._silent_workers(ClusterSpec(addresses[:2], 0)) == ""


UNREACHABLE = "worker {} cannot be reached; launch.py restarts the workers; without it, start all of them again with "
UNREACHABLE += "the same list to resume from the last checkpoint"


@pytest.mark.parametrize(
    ("index", "text", "line"),
    [
        (
            0,
            f"recvmsg:Connection reset by peer\n{FROM_TASK.format(1)} while calling",
            UNREACHABLE.format("1 of 3 (b:1)"),
        ),
        (0, f"failed to connect to all addresses\n{FROM_TASK.format(0)} while", UNREACHABLE.format("0 of 3 (a:1)")),
        (1, "Deadline Exceeded\n\nRPC: /tensorflow.CoordinationService/Heartbeat", UNREACHABLE.format("0 of 3 (a:1)")),
        (
            0,
            "Error reported from /job:worker/task:2: The following tasks are unhealthy (stopped sending heartbeats):\n"
            "/job:worker/replica:0/task:2\nThe tasks have crashed.",
            "worker 2 of 3 (c:1) sent no heartbeat for 10 s; launch.py restarts the workers; without it, "
            "start all of them again",
        ),
        (
            0,
            "exit code 3: worker 1 of 3 (b:1) ended: data: no such file",
            "worker 1 of 3 (b:1) ended: data: no such file",
        ),
        (0, "exit code 5: worker 2 of 3 (c:1) cannot be reached", "worker 2 of 3 (c:1)"),
    ],
)
def test_errors_about_other_workers_are_explained(index, text, line):
    """A worker that the others cannot reach is named by itself too; one that is cut off names worker 0."""
    cluster = dataclasses.replace(CLUSTER, index=index)
    error = coordination._explain(cluster, tf.errors.UnavailableError(None, None, LOST.format(text)))
    assert str(error).startswith(line) and "\n" not in str(error)
    assert (type(error), error.exit_code) == ((RunError, 3) if "exit code 3" in text else (WorkerLostError, 5))


@pytest.mark.parametrize("text", ["OOM when allocating tensor", "from /job:worker/replica:0/task:0 while calling"])
def test_errors_of_this_worker_stay(text):
    assert coordination._explain(CLUSTER, tf.errors.ResourceExhaustedError(None, None, text)) is None


def test_waiting_returns_raises_and_ends():
    shutdown = ShutdownHandler()
    assert run_interruptibly(lambda: 5, shutdown) == 5
    with pytest.raises(KeyError, match="missing"):
        run_interruptibly(lambda: {}["missing"], shutdown)
    with pytest.raises(TimeoutError):
        run_interruptibly(lambda: time.sleep(1), shutdown, time.monotonic())


def test_signals_are_handled_while_waiting():
    """Also after the function that is waited for has replaced the handler, as TensorFlow's server does."""
    received, release = [], threading.Event()
    before = signal.getsignal(signal.SIGUSR1)

    class Shutdown:
        def reinstall_handlers(self):
            signal.signal(signal.SIGUSR1, lambda number, frame: (received.append(number), release.set()))

    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        threading.Timer(0.5, signal.raise_signal, [signal.SIGUSR1]).start()
        assert run_interruptibly(lambda: release.wait(30), Shutdown())
        assert received == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_private_parts_of_tensorflow_are_where_they_were():
    """Check private names that coordination.py uses. If this fails, read the new version's sources first."""
    assert tf.__version__.startswith("2.21.")
    library = ctypes.CDLL(str(Path(tf.__file__).parent / "libtensorflow_cc.so.2"))
    for function in ("TFE_EnableCollectiveOps", "TF_NewStatus", "TF_GetCode", "TF_Message", "TF_DeleteStatus"):
        assert hasattr(library, function)
    source = inspect.getsource(context.Context.ensure_initialized)
    assert "pywrap_tfe.TFE_EnableCollectiveOps(context_handle, server_def_str)" in source
    assert hasattr(pywrap_tfe, "TFE_EnableCollectiveOps")
    for method, parameters in {
        "configure_coordination_service": "service_type service_leader heartbeat_timeout_in_ms coordinated_jobs",
        "get_config_key_value": "key timeout_in_ms",
        "set_config_key_value": "",
        "report_error_to_cluster": "error_code error_message",
    }.items():
        accepted = inspect.signature(getattr(context.Context, method)).parameters
        assert parameters.split() == [name for name in accepted if name in parameters.split()]


def test_a_process_alone_waits_for_nobody():
    assert ALONE.is_chief and ALONE.gather(5) == [5] and ALONE.broadcast_from_chief(lambda: 6) == 6
    ALONE.assert_equal({"a": 1})


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_workers_with_other_images_are_refused(split):
    """With other validation images the workers would disagree on the accuracy, and on when to stop."""
    dataset = Dataset("mine", *(synthetic.make(10, 0, stream) for stream in range(3)))

    def check(gather, dataset):
        workers = Workers(dataclasses.replace(CLUSTER, addresses=CLUSTER.addresses[:2]), gather)
        workers.assert_equal(shared_values(TrainConfig(), dataset, "float32", 2))

    sent = []
    check(lambda values: sent.append(values) or [values, values], dataset._replace(**{split: synthetic.make(10, 0, 3)}))
    with pytest.raises(UsageError, match=rf"worker 1 of 2 \(b:1\) has {split} images, as sha256, "):
        check(lambda values: [values, *sent], dataset)


def test_other_versions_of_a_worker_are_refused(monkeypatch, tmp_path):
    data = synthetic.make(10, 0, 0)

    def values():
        return shared_values(TrainConfig(), Dataset("d", data, data, data), "float32", 2)

    own = values()
    (tmp_path / "step.py").write_text("")
    for owner, attribute, value, named in (
        (trainer.tf, "__version__", "2.20.0", "TensorFlow 2.20.0, worker 0 has 2."),
        (trainer.keras, "__version__", "3.14.0", "Keras 3.14.0, worker 0 has 3."),
        (trainer, "__file__", str(tmp_path / "trainer.py"), "the code of cifar_towers, as sha256, e3b0c44298fc1c14"),
        (trainer.os, "environ", {"TF_ENABLE_ONEDNN_OPTS": "0"}, "TF_ENABLE_ONEDNN_OPTS 0, worker 0 has "),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, attribute, value)
            others = [own, values()]
        workers = Workers(dataclasses.replace(CLUSTER, addresses=CLUSTER.addresses[:2]), lambda _, sent=others: sent)
        with pytest.raises(UsageError, match=rf"worker 1 of 2 \(b:1\) has {named}"):
            workers.assert_equal(own)


def test_other_code_of_a_worker_is_refused(tmp_path):
    file, data, values = tmp_path / "mine.py", synthetic.make(10, 0, 0), []
    for number in (1, 2):
        file.write_text(f"def loss(labels, logits):\n    return {number}\n")
        values.append(shared_values(TrainConfig(loss=f"{file}:loss"), Dataset("d", data, data, data), "float32", 2))
    workers = Workers(dataclasses.replace(CLUSTER, addresses=CLUSTER.addresses[:2]), lambda _: values)
    with pytest.raises(UsageError, match=r"worker 1 of 2 \(b:1\) has a file of loss, as sha256, "):
        workers.assert_equal(values[0])

"""Exchange, start and end of workers. What other workers cause is in test_workers.py, with real
processes.
"""

import dataclasses
import re
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from cifar_towers.config import TrainConfig
from cifar_towers.data import synthetic
from cifar_towers.data.dataset import Dataset
from cifar_towers.errors import RunError, UsageError, WorkerLostError
from cifar_towers.multi_worker import coordination
from cifar_towers.multi_worker.cluster_spec import Workers
from cifar_towers.training import setup
from cifar_towers.training.distributed_step import make_strategy

FROM_TASK = "from remote target /job:worker/replica:0/task:{}"
CLUSTER = Workers(("a:1", "b:1", "c:1"), 0)
LOST = (
    "Collective ops is aborted by: {}\nThe error could be from a previous operation. "
    "Restart your program to reset."
)


def test_values_of_the_first_replica_are_gathered(towers):
    """Two replicas of one worker, as on a machine with two GPUs."""
    gather = coordination._make_gather(make_strategy(towers(2)))
    value = {
        "a": [1, 2.5, None, True, "é"],
        "weights": [np.arange(6, dtype=np.float32).reshape(2, 3), np.array(7)],
    }
    (back,) = gather(value | {"b": np.float32(0.1), "nan": float("nan")})

    assert back["a"] == value["a"]
    assert back["b"] == float(np.float32(0.1))
    assert np.isnan(back["nan"])

    for mine, theirs in zip(back["weights"], value["weights"], strict=True):
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(mine, theirs)
    for other in ([5, -6, 7], [], None):
        assert gather(other) == [other]


A = "worker 0 of 3 (a:1)"
B = "worker 1 of 3 (b:1)"
C = "worker 2 of 3 (c:1)"
OOM = "OOM when allocating tensor with shape[9,9]\n"
SILENT = (
    "Error reported from /job:worker/task:2: The following tasks are unhealthy (stopped sending "
    "heartbeats):\n/job:worker/replica:0/task:2\nThe tasks have crashed."
)
ABSENT = (
    "The first task at the barrier: /job:worker/replica:0/task:0. Some timed out task names:\n"
    "/job:worker/replica:0/task:1\n/job:worker/replica:0/task:2\n\n" + FROM_TASK.format(0)
)


@pytest.mark.parametrize(
    ("index", "text", "exit_code", "named"),
    [
        (0, f"recvmsg:Connection reset by peer\n{FROM_TASK.format(1)} while calling", 5, [B]),
        (
            0,
            f"failed to connect to all addresses\n{FROM_TASK.format(0)} while",
            5,
            [A],
        ),  # as the others see it
        (
            1,
            "Deadline Exceeded\n\nRPC: /tensorflow.CoordinationService/Heartbeat",
            5,
            [A],
        ),  # it is cut off
        (0, SILENT, 5, [C, "10 s"]),
        (0, f"exit code 3: {B} ended: data: no such file", 3, [B, "no such file"]),
        (0, f"exit code 5: {C} was lost", 5, [C]),
        (0, ABSENT, 5, [B, C]),
        (0, f"{OOM}{FROM_TASK.format(2)} while", 1, [C]),
        (0, OOM, None, []),  # its own
        (0, "from /job:worker/replica:0/task:0 while calling", None, []),
    ],
)
def test_errors_about_other_workers_name_them_and_those_of_this_worker_stay(
    index, text, exit_code, named
):
    """An error of TensorFlow's explains itself, and one of the trainer's that it caused."""
    error = tf.errors.UnavailableError(None, None, LOST.format(text))
    caused = UsageError("the memory is too small for this")
    caused.__cause__ = error
    for each in (error, caused):
        found = coordination._explain(dataclasses.replace(CLUSTER, index=index), each)
        assert (found and found.exit_code) == exit_code
        assert found is None or type(found) is (WorkerLostError if exit_code == 5 else RunError)
        assert all(part in str(found) for part in named)
        assert "\n" not in str(found)


DATA = Dataset("mine", *(synthetic.make(10, 0, stream) for stream in range(3)))


def shared_values(dataset=DATA, **settings):
    run_setup = SimpleNamespace(
        config=TrainConfig(**settings), dataset=dataset, precision="float32", local_towers=[0, 1]
    )
    return setup.shared_values(run_setup)


def check_refused(values, of_other_worker, named):
    workers = dataclasses.replace(CLUSTER, gather=lambda _: [values, of_other_worker])
    difference = workers.describe_difference(values)
    assert re.search(rf"{named}.* on worker 1 of 3 \(b:1\)", difference)
    same = dataclasses.replace(CLUSTER, gather=lambda _: [values, values])
    assert same.describe_difference(values) == ""


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_workers_with_other_images_are_refused(split):
    """With other validation images the workers would disagree on the accuracy, and on when to
    stop.
    """
    other = shared_values(DATA._replace(**{split: synthetic.make(10, 0, 3)}))
    check_refused(shared_values(), other, f"the SHA-256 of the {split} images is ")


def test_other_versions_and_other_code_of_a_worker_are_refused(monkeypatch, tmp_path):
    values = shared_values()
    (tmp_path / "step.py").write_text("")
    for owner, attribute, value, named in (
        (tf, "__version__", "2.20.0", "TensorFlow is 2.20.0"),
        (setup, "PACKAGE", tmp_path, "the SHA-256 of cifar_towers's code is e3b0c44298fc1c14"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, attribute, value)
            other = shared_values()
        check_refused(values, other, named)
    mine = []
    for number in (1, 2):
        (tmp_path / "mine.py").write_text(f"def loss(labels, logits):\n    return {number}\n")
        mine.append(shared_values(loss=f"{tmp_path}/mine.py:loss"))
    check_refused(*mine, "the SHA-256 of the code of loss")

"""Clusters from TF_CONFIG and Slurm's variables."""

import json
import os

import pytest

from cifar_towers.cli.main import resolve_cluster
from cifar_towers.config import TrainConfig
from cifar_towers.errors import UsageError
from cifar_towers.multi_worker.cluster_spec import EXAMPLE, Workers

THREE = ("a:5000", "b:5000", "c:5000")
CHIEF = {"chief": ["a:5000"], "worker": ["b:5000", "c:5000"]}


def resolved(environment, **settings):
    config = TrainConfig(**{"strategy": "multi_worker", "batch_size": 48} | settings)
    return resolve_cluster(config, environment)


def tf_config(addresses=THREE, index=0, job="worker"):
    cluster = addresses if isinstance(addresses, dict) else {"worker": addresses}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})}


@pytest.mark.parametrize(
    ("environment", "settings", "expected"),
    [
        (tf_config(index=1), {}, Workers(THREE, 1)),
        (tf_config(["[::1]:1", "[fd00::2]:1"]), {}, Workers(("[::1]:1", "[fd00::2]:1"), 0)),
        (tf_config(CHIEF, 1), {}, Workers(THREE, 2)),
        (tf_config(CHIEF, 0, "chief"), {}, Workers(THREE, 0)),
        (tf_config() | {"SLURM_PROCID": "1"}, {}, Workers(THREE, 0)),
        ({"TF_CONFIG": EXAMPLE}, {}, Workers(("a:5000", "b:5000"), 0)),
        ({"TF_CONFIG": "{}", "SLURM_PROCID": "0"}, {"strategy": "towers"}, None),
    ],
)
def test_cluster_from_tf_config(environment, settings, expected):
    assert resolved(environment, **settings) == expected


@pytest.mark.parametrize(
    ("node", "place", "index"), [("gpu9", 0, 2), ("gpu9", 1, 3), ("gpu10", 1, 1)]
)
def test_cluster_from_slurm(monkeypatch, node, place, index):
    """TensorFlow sorts gpu10 before gpu9, where Slurm starts its first task."""
    variables = {
        "SLURM_PROCID": "0",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_NODELIST": "gpu[9-10]",
    }
    variables |= {"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_JOB_ID": "40007"}
    variables |= {"SLURMD_NODENAME": node, "SLURM_LOCALID": str(place)}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    assert resolved(os.environ) == Workers(
        ("gpu10:20007", "gpu10:20008", "gpu9:20007", "gpu9:20008"), index
    )


FIVE = [f"{host}:1" for host in "abcde"]


@pytest.mark.parametrize(
    ("environment", "settings", "named"),
    [
        ({}, {}, "srun, or with TF_CONFIG="),
        (tf_config(["a:5000"]), {}, r"index 0 of \[a:5000\]"),
        (tf_config(["a:5000", "a:5000"]), {}, "a:5000, a:5000"),
        (tf_config(index=3), {}, "index 3 of"),
        (tf_config(index=-1), {}, "index -1 of"),
        (tf_config(job="ps"), {}, "TF_CONFIG has the task ps"),
        (tf_config(FIVE), {}, "batch_size=48 .* 5 towers"),
        (tf_config(FIVE), {"num_gpus": 2}, "10 towers"),
    ],
)
def test_invalid_cluster_is_refused(environment, settings, named):
    with pytest.raises(UsageError, match=named):
        resolved(environment, **settings)

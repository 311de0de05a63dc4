"""Clusters from flags, TF_CONFIG and Slurm's variables."""

import json

import pytest

from cifar_towers.errors import UsageError, WorkerLostError
from cifar_towers.multi_worker.cluster_spec import ClusterSpec, check_not_public, resolve_cluster

THREE = ("a:5000", "b:5000", "c:5000")


def tf_config(kind="worker", index=0, **cluster):
    cluster = cluster or {"worker": list(THREE)}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


def slurm(tasks="5", nodes="gpu[08-09,11],login", tasks_per_node="2,1(x3)"):
    step = {"SLURM_NTASKS": tasks, "SLURM_STEP_NODELIST": nodes, "SLURM_STEP_TASKS_PER_NODE": tasks_per_node}
    return step | {"SLURM_PROCID": "3", "SLURM_JOB_ID": "40007"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("a:5000,b:5000,c:5000", 2, {}), ClusterSpec(THREE, 2)),
        (("[::1]:1,[fd00::2]:1", 0, {}), ClusterSpec(("[::1]:1", "[fd00::2]:1"), 0)),
        (("", -1, tf_config(index=1)), ClusterSpec(THREE, 1)),
        (("", -1, tf_config("worker", 1, chief=["a:5000"], worker=["b:5000", "c:5000"])), ClusterSpec(THREE, 2)),
        (("", -1, tf_config("chief", 0, chief=["a:5000"], worker=["b:5000", "c:5000"])), ClusterSpec(THREE, 0)),
        (
            ("", -1, slurm()),
            ClusterSpec(("gpu08:20007", "gpu08:20008", "gpu09:20007", "gpu11:20007", "login:20007"), 3),
        ),
        (
            ("", -1, slurm("4", "r[1-2]n[1-2]", "1(x4)")),
            ClusterSpec(("r1n1:20007", "r1n2:20007", "r2n1:20007", "r2n2:20007"), 3),
        ),
        (("x:1,y:1", 1, tf_config() | slurm()), ClusterSpec(("x:1", "y:1"), 1)),  # flags take precedence
        (("", -1, tf_config(index=2) | slurm()), ClusterSpec(THREE, 2)),
    ],
)
def test_cluster_from_flags_tf_config_or_slurm(given, expected):
    assert resolve_cluster(*given) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("", -1, {}), "--workers=host:port"),
        (("a:5000,b:5000", -1, {}), "--worker_index"),
        (("a:5000,b:5000", 2, {}), "0 to 1"),
        (("a:5000", 0, {}), "one worker is no cluster"),
        (("", 1, tf_config(index=2)), "worker_index=1"),
        (("gpu..2:5000,b:5000", 0, {}), "'gpu..2:5000' is not host:port"),
        ((f"{'g' * 64}:5000,b:5000", 0, {}), "is not host:port"),
        (("a:5000,a:5000", 0, {}), "a:5000 is given twice"),
        (("a:5000,b", 0, {}), "'b' is not host:port"),
        (("a:5000,b:70000", 0, {}), "'b:70000'"),
        (("a:5000,b:5000/x", 0, {}), "'b:5000/x'"),
        (("", -1, {"TF_CONFIG": "{"}), "TF_CONFIG cannot be read"),
        (("", -1, {"TF_CONFIG": "[]"}), "TF_CONFIG cannot be read"),
        (("", -1, tf_config("ps")), "type ps are not supported"),
        (("", -1, slurm("9")), "9 tasks, but 5 on 4 nodes"),
        (("", -1, {"SLURM_PROCID": "0"}), "SLURM_NTASKS"),
    ],
)
def test_invalid_cluster_is_refused_in_one_line(given, message):
    with pytest.raises(UsageError) as caught:
        resolve_cluster(*given)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_only_private_addresses_are_accepted():
    for address in ("127.0.0.1:5000", "10.1.2.3:5000", "192.168.1.1:5000", "[::1]:5000", "100.64.0.1:1"):
        check_not_public(address, 0)
    for address in ("8.8.8.8:5000", "[2606:4700::1]:5000"):
        with pytest.raises(UsageError, match="allow_public_cluster"):
            check_not_public(address, 0)


def test_unknown_host_is_retried_then_named():
    with pytest.raises(WorkerLostError, match="nowhere.invalid:5000"):
        check_not_public("nowhere.invalid:5000", 0.3)

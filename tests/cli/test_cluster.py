import os
import subprocess
import textwrap
from pathlib import Path

import pytest

from cifar_towers.cli.flags import parse_command_line
from cifar_towers.cli.main import resolve_cluster
from cifar_towers.config import TrainConfig
from cifar_towers.errors import UsageError
from cifar_towers.multi_worker.cluster_spec import ClusterSpec

TWO_WORKERS = {"strategy": "multi_worker", "workers": "a:1,b:1", "worker_index": 0}


def test_only_strategy_multi_worker_makes_a_cluster():
    assert resolve_cluster(TrainConfig(**TWO_WORKERS), {}) == ClusterSpec(("a:1", "b:1"), 0)
    assert resolve_cluster(TrainConfig(), {"TF_CONFIG": "{}", "SLURM_PROCID": "0"}) is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 999}, "batch_size=999 .* 2 towers"),
        ({"batch_size": 6, "num_gpus": 2}, "batch_size=6 .* 4 towers"),
        ({"workers": ""}, "strategy=multi_worker .*workers"),
    ],
)
def test_a_cluster_that_cannot_train_is_refused(settings, message):
    with pytest.raises(UsageError, match=message):
        resolve_cluster(TrainConfig(**TWO_WORKERS | settings), {})


@pytest.mark.parametrize("workers", [2, 3, 4, 5, 6])
def test_the_job_on_kubernetes_makes_a_cluster_of_any_small_number_of_workers(tmp_path, workers):
    """Run the container's shell script with a program in place of Python that prints its arguments."""
    job = (Path(__file__).parents[2] / "docs/cluster/job.yaml").read_text()
    script = textwrap.dedent(job.partition("- |\n")[2].partition("          ports:")[0])
    (tmp_path / "python").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "python").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    environment = {"PATH": path, "WORKERS": str(workers), "JOB_COMPLETION_INDEX": "1"}
    out = subprocess.run(["sh", "-c", script], env=environment, capture_output=True, text=True, check=True).stdout
    launcher, _, flags = out.partition("\n--\n")
    assert launcher.splitlines() == ["scripts/launch.py", "--max_restarts=100"]
    cluster = resolve_cluster(parse_command_line(TrainConfig, ["train.py", *flags.splitlines()], ""), {})
    assert cluster.index == 1 and cluster.size == workers
    assert cluster.addresses[-1] == f"cifar-towers-{workers - 1}.cifar-towers:5000"

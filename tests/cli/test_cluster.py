import pytest

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

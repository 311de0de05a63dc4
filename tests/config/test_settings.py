from cifar_towers.config import TrainConfig
from cifar_towers.config.settings import names_with
from cifar_towers.config.train_config import shared_settings


def test_settings_of_data_model_and_optimizer_belong_to_the_recipe():
    recipe = set(names_with(TrainConfig, on_resume="refuse"))
    assert {"seed", "epochs"} | set(names_with(TrainConfig, group="Optimizer")) <= recipe
    for group in ("Data", "Model"):
        assert set(names_with(TrainConfig, group=group)) - recipe <= {"dataset", "data_dir"}


def test_workers_share_the_recipe_but_not_their_own_paths_and_addresses():
    shared = shared_settings(TrainConfig(train_dir="here", seed=3))
    assert shared["seed"] == 3 and shared.keys() >= set(names_with(TrainConfig, on_resume="refuse"))
    assert not shared.keys() & {"train_dir", "data_dir", "workers", "worker_index", "intra_op_threads"}


def test_repetitions_of_an_experiment_differ_in_seed_and_reporting_only():
    per_run = set(names_with(TrainConfig, per_run=True))
    assert {"seed", "train_dir", "keep_checkpoints"} <= per_run
    assert not per_run & set(names_with(TrainConfig, group="Optimizer"))

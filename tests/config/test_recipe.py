import pytest

from cifar_towers.config import TrainConfig
from cifar_towers.config.recipe import differing_settings, recipe_fields


@pytest.mark.parametrize("name, value", [("batch_statistics", "synchronized"), ("micro_batches", 2)])
def test_function_changed_by_batch_norm_alone_is_refused_only_there(name, value):
    config, saved = TrainConfig(**{name: value}), recipe_fields(TrainConfig())
    assert differing_settings(config, saved, has_batch_norm=False) == []
    assert differing_settings(config, saved, has_batch_norm=True) == [f"{name} {saved[name]} -> {value}"]
    del saved[name]  # a run from before it was recorded
    assert differing_settings(config, saved, has_batch_norm=True) == []


@pytest.mark.parametrize("name, value", [("num_gpus", 2), ("strategy", "mirrored"), ("seed", 0), ("tta", 2)])
def test_settings_that_place_or_report_may_change(name, value):
    config = TrainConfig(**{name: value})
    assert differing_settings(config, recipe_fields(TrainConfig()), has_batch_norm=True) == []


def test_recipe_of_an_earlier_version_is_read_under_todays_names():
    config = TrainConfig(batch_size=512, hard_example_pool=1024)
    saved = {**recipe_fields(config)}
    saved["hardest_of"] = saved.pop("hard_example_pool")
    assert differing_settings(config, saved, has_batch_norm=True) == []
    saved["hardest_of"] = 2048
    assert differing_settings(config, saved, has_batch_norm=True) == ["hard_example_pool 2048 -> 1024"]

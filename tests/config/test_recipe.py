import pytest

from cifar_towers.config import TrainConfig
from cifar_towers.config.recipe import differing_settings, recipe_fields


@pytest.mark.parametrize(
    ("name", "value", "refused"),
    [("batch_statistics", "synchronized", True), ("micro_batches", 2, True)]
    + [(name, value, False) for name, value in (("num_gpus", 2), ("strategy", "mirrored"), ("seed", 0), ("tta", 2))],
)
def test_settings_that_change_the_function_only_with_batch_norm_are_refused_only_there(name, value, refused):
    config, saved = TrainConfig(**{name: value}), recipe_fields(TrainConfig())
    assert differing_settings(config, saved, has_batch_norm=False) == []
    expected = [f"{name} {saved[name]} -> {value}"] if refused else []
    assert differing_settings(config, saved, has_batch_norm=True) == expected
    saved.pop(name, None)  # a run from before it was recorded
    assert differing_settings(config, saved, has_batch_norm=True) == []


def test_recipe_of_an_earlier_version_is_read_under_todays_names():
    config = TrainConfig(batch_size=512, hard_example_pool=1024)
    saved = {**recipe_fields(config)}
    saved["hardest_of"] = saved.pop("hard_example_pool")
    assert differing_settings(config, saved, has_batch_norm=True) == []
    saved["hardest_of"] = 2048
    assert differing_settings(config, saved, has_batch_norm=True) == ["hard_example_pool 2048 -> 1024"]

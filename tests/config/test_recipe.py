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


def test_a_setting_that_no_longer_exists_is_named():
    saved = {**recipe_fields(TrainConfig()), "hardest_of": 2048}
    (difference,) = differing_settings(TrainConfig(), saved, has_batch_norm=True)
    assert "hardest_of 2048" in difference

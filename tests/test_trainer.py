"""The line of a resumed run that computes another function than before."""

import pytest

from cifar_towers.trainer import describe_changes

SAVED = {
    "precision": "float32", "towers": 2, "micro_batches": 1, "tower_shares": "", "recipe": {"batch_statistics": "mean"}
}  # fmt: skip
SYNCHRONIZED = {"recipe": {"batch_statistics": "synchronized"}}


@pytest.mark.parametrize(
    ("now", "has_batch_norm", "parts"),
    [
        ({}, True, ()),
        ({"towers": 4}, False, ()),
        ({"towers": 4}, True, ("1/4", "1/2", "--num_gpus=2")),
        ({"towers": 4} | SYNCHRONIZED, True, ()),
        ({"towers": 1, "micro_batches": 2}, True, ()),  # parts of the same size
        ({"micro_batches": 3}, True, ("1/6", "1/2", "--micro_batches=1")),
        ({"tower_shares": "3,1"}, True, ("3,1", "--tower_shares=")),
        ({"precision": "bfloat16"}, False, ("bfloat16", "float32", "--precision=float32")),
        ({"precision": "bfloat16", "towers": 1}, True, ("bfloat16", "1/1", "--precision=float32 --num_gpus=2")),
    ],
)
def test_resuming_says_what_is_computed_otherwise(now, has_batch_norm, parts):
    line = describe_changes(SAVED, SAVED | now, has_batch_norm)
    assert bool(line) == bool(parts) and all(part in line for part in parts) and "\n" not in line

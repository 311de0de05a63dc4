"""Verified steps: the same weights, every pair of towers in turn, and flipped bits that are found."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from cifar_towers.errors import CorruptedError, UsageError
from cifar_towers.training.step_runner import StepRunner
from tests.configs import TINY_NET, recipe
from tests.training.flips import BitFlip
from tests.training.runs import Run

SETTINGS = {"model": TINY_NET, "crop": 20, "shift": 0, "batch_size": 24, "whitening_images": 60, "ema_decay": 0.9}
SLOW = [
    (1, "float16", {"micro_batches": 2}),
    (2, "bfloat16", {"model": "speednet_proxy", "optimizer": "muon", "lookahead": True, "crop": 0}),
    (2, "float32", {"batch_statistics": "final", "variable_placement": "round_robin", "gradient_device": "cpu"}),
    (2, "float32", {"model": "cifarnet", "crop": 24}),
    (4, "float32", {"brightness": 9.0, "contrast": 0.2, "cutout": 8, "standardize": "image", "crop": 0}),
]
WAYS = [
    (3, "float32", {}),
    (2, "float32", {"data_on": "device"}),
    *(pytest.param(*way, marks=pytest.mark.slow) for way in SLOW),
]
OPTIONS = {"rate_factor": 1.0, "collect_diagnostics": False}


class Verified:
    """A run of which every step is verified; `pairs` has the towers and those that repeated their work."""

    def __init__(self, towers, examples, precision="float32", every=1, **settings):
        self.run = run = Run(towers, examples, recipe("smoke", **SETTINGS | settings), precision)
        self.names = [*run.state.loss_averages.sums, *run.state.weight_names]
        self.runner = StepRunner(self._step, run.state.optimizer, lambda step: 32, every, towers, self.names)
        self.pairs = []

    def _step(self, **arguments):
        self.pairs += [arguments["repeat"]] if "repeat" in arguments else []
        return self.run.train_step(**arguments)

    def step(self, number, batch=None, **options):
        batch = self.run.batches.at(number) if batch is None else batch
        (finished,) = self.runner.start(number, batch, **OPTIONS | options) or self.runner.finish()
        assert finished.step == number + 1
        return finished


@pytest.mark.parametrize(("count", "precision", "settings"), WAYS)
def test_verified_steps_give_the_same_bits_and_all_pairs_have_their_turn(towers, examples, count, precision, settings):
    plain, verified = (Verified(towers(count), examples, precision, every, **settings) for every in (0, 1))
    for number in range(max(2, count * (count - 1))):
        summary = {"collect_diagnostics": number % 2 == 0}
        expected, finished = (each.step(number, **summary) for each in (plain, verified))
        assert finished.error is None and finished.metrics.loss == expected.metrics.loss
        assert expected.metrics.original is None and len(finished.metrics.original) == len(verified.names)
    assert not plain.pairs and sorted(set(verified.pairs)) == (
        list(itertools.permutations(range(count), 2)) or [(0, 0)]
    )
    assert [owner for owner, _ in verified.pairs[:count]] == list(range(count))
    before, after = plain.run.values(), verified.run.values()
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value, err_msg=name)


def test_only_every_nth_step_is_verified_and_pairs_depend_on_the_step_alone(towers):
    runners = [StepRunner(None, None, None, every, towers(3)) for every in (2, 5)]
    pairs = [[runner._pair(step) for step in range(60)] for runner in runners]
    in_turn = [(0, 1), (1, 2), (2, 0), (0, 2), (1, 0), (2, 1)]
    for every, of_run in zip((2, 5), pairs, strict=True):
        assert of_run[every - 1 :: every] == (in_turn * 5)[: 60 // every]
        assert sum(pair is not None for pair in of_run) == 60 // every


def test_repetition_is_computed_on_the_other_tower(towers, examples):
    run = Run(towers(3), examples, recipe("smoke", **SETTINGS))
    arguments = run.batches.at(0), run.rates(), 0, tf.constant(False)
    graph = run.train_step.get_concrete_function(*arguments, repeat=(0, 2)).graph
    used = {op.device[-5:] for op in graph.get_operations() if op.type.startswith(("Conv2D", "MatMul"))}
    assert used == {"CPU:2"} and not [op for op in graph.get_operations() if op.type.startswith("Assign")]
    ordinary = run.train_step.get_concrete_function(*arguments).graph
    assert not {"Case", "StatelessCase", "SerializeTensor"} & {op.type for op in ordinary.get_operations()}


@pytest.mark.parametrize("lasting", [False, True])
def test_flipped_bit_is_found_and_the_step_changes_nothing(towers, examples, monkeypatch, lasting):
    flip = BitFlip(tower=1, lasting=lasting)
    flip.install(monkeypatch.setattr)
    flip.switch(False)
    verified = Verified(towers(2), examples)
    for number in (0, 1):  # towers 0 and 1
        assert verified.step(number).error is None
    before = verified.run.values()
    flip.switch(True)
    finished = verified.step(3)
    after = verified.run.values()
    assert [name for name, value in before.items() if not np.array_equal(after[name], value)] == ["step"]
    assert not finished.metrics.updated and (finished.metrics.nonfinite_towers == -1).all()
    message = str(finished.error)
    if lasting:  # while both towers agree on what the repetition has: as where it is compiled differently
        assert isinstance(finished.error, UsageError) and f"{flip.name} of tower_1 has other bits where" in message
        return
    assert isinstance(finished.error, CorruptedError) and "the same command resumes" in message
    expected = f"step 4 is not applied: {flip.name} of tower_1 (/CPU:1) has other bits if tower_0 (/CPU:0) "
    assert message.startswith(expected)
    flip.switch(True)
    assert verified.step(2).error is None  # which verifies tower 0
    assert verified.step(5).error is None


@pytest.mark.parametrize(
    ("model", "precision"),
    [("speednet_proxy", "float32"), pytest.param(TINY_NET, "bfloat16", marks=pytest.mark.slow)],
)
def test_a_net_that_is_compiled_in_another_way_alone_raises_no_alarm(towers, examples, model, precision):
    """Micro-batches are such a case where a tower shares its device with the host, and on some processors only."""
    settings = {"model": model, "micro_batches": 2, "optimizer": "momentum", "crop": 0}
    verified = Verified(towers(2), examples, precision, **settings)
    errors = [verified.step(number).error for number in range(2)]
    assert all(error is None or isinstance(error, UsageError) for error in errors)
    print(errors)


def test_same_nonfinite_numbers_are_no_difference(towers, examples):
    verified = Verified(towers(2), examples)
    batch = verified.run.batches.at(0)
    images = tf.cast(batch.images, tf.float32).numpy()
    images[3] = np.nan
    finished = verified.step(0, batch._replace(images=tf.constant(images)))
    assert finished.error is None and finished.metrics.nonfinite_towers[0] >= 0 and not finished.metrics.updated

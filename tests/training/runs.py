"""A training step on towers, its state, and the batches for it."""

import tensorflow as tf

from cifar_towers.config.schedules import RunLength
from cifar_towers.training import build
from cifar_towers.training.step import to_numpy


class Run:
    """The steps of a run of 100 steps, on the towers of the test."""

    def __init__(self, towers, examples, config, precision="float32"):
        self.config, self.towers = config, towers
        self.batches = build.make_batches(config, examples)
        length = RunLength(self.batches.steps_per_epoch, 100, 100)
        augmentation = build.make_own_augmentation(config, examples.info)
        self.state, self.train_step = build.make_training(
            config, towers, precision, examples, length, augmentation
        )

    def rates(self, step=0, rate=None):
        """Return the recipe's learning rates of a step, or `rate` for all groups that are active in
        it.
        """
        rates = self.state.optimizer.learning_rates(step)
        return {
            name: tf.constant(own if rate is None else rate, tf.float32)
            for name, own in rates.items()
        }

    def step(self, number=0, batch=None, rates=None, **options):
        """Make a step, by default on its own batch at its own rates; return the metrics as NumPy
        arrays.
        """
        batch = self.batches.at(number) if batch is None else batch
        return to_numpy(self.train_step(batch, rates or self.rates(number), **options))

    def values(self, prefix=""):
        """Return the variables' values whose names in checkpoints begin with `prefix`, by the rest
        of the name.
        """
        named = self.state.named_variables().items()
        return {
            name.removeprefix(prefix): v.numpy() for name, v in named if name.startswith(prefix)
        }

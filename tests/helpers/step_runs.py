"""A training step on towers, its state, and the batches for it."""

import tensorflow as tf

from cifar_towers.config.schedules import RunLength
from cifar_towers.data.dataset import Dataset
from cifar_towers.multi_worker.cluster_spec import ALONE
from cifar_towers.training import build
from cifar_towers.training.runner import to_numpy
from cifar_towers.training.setup import RunSetup


class StepRun:
    """The steps of a run of 100 steps, on the towers of the test."""

    def __init__(self, towers, examples, config, precision="float32"):
        self.config = config
        self.towers = towers
        self.batches = build.make_batches(config, examples)
        setup = RunSetup(
            config=config,
            dataset=Dataset("examples", examples, examples.take(slice(0)), examples),
            strategy=None,
            towers=towers,
            local_towers=towers,
            precision=precision,
            workers=ALONE,
            length=RunLength(self.batches.steps_per_epoch, 100, 100),
        )
        augmentation = build.make_training_augmentation(config, examples.info)
        self.state, self.train_step = build.make_training(setup, augmentation)
        self.gradients = None  # of the last step

    def rates(self, step=0, rate=None):
        """Return the recipe's learning rates of a step, or `rate` for all groups."""
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
        rates = rates or self.rates(number)
        metrics, self.gradients = to_numpy(self.train_step(batch, rates, **options))
        return metrics

    def traced(self):
        """Return the function of the first step."""
        return self.train_step.get_concrete_function(self.batches.at(0), self.rates())

    def values(self, prefix=""):
        """Return the variables' values whose names in checkpoints begin with `prefix`, by the rest
        of the name.
        """
        return {
            name.removeprefix(prefix): variable.numpy()
            for name, variable in self.state.named_variables().items()
            if name.startswith(prefix)
        }

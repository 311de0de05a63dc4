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
        self.state, self.train_step, self.hard_examples = build.make_training(setup, augmentation)
        self.selected = None  # the hard examples of the last step
        self.proxy_metrics = None
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
        if self.hard_examples:
            batch, proxy_metrics = self.hard_examples.select(batch, rates, **options)
            self.selected = to_numpy(batch)
            self.proxy_metrics = to_numpy(proxy_metrics)
        metrics, self.gradients = to_numpy(self.train_step(batch, rates, **options))
        return metrics

    def traced(self):
        """Return the functions of the first step: of the selection of hard examples, and the
        step's.
        """
        batch = self.batches.at(0)
        rates = self.rates()
        if not self.hard_examples:
            return [self.train_step.get_concrete_function(batch, rates)]
        selection = self.hard_examples.select.get_concrete_function(batch, rates)
        selected, _ = self.hard_examples.select(batch, rates)
        return [selection, self.train_step.get_concrete_function(selected, rates)]

    def values(self, prefix=""):
        """Return the variables' values whose names in checkpoints begin with `prefix`, by the rest
        of the name.
        """
        named = self.state.named_variables()
        if self.hard_examples:
            proxy = self.hard_examples.proxy.named_variables()
            named |= {f"proxy.{name}": variable for name, variable in proxy.items()}
        return {
            name.removeprefix(prefix): variable.numpy()
            for name, variable in named.items()
            if name.startswith(prefix)
        }

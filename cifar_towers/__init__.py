"""CIFAR-10 on towers: synchronous data-parallel training, readable from end to end."""

__version__ = "0.1.0"

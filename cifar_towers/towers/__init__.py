"""Towers: copies of one computation on several devices that meet once a step.

Nothing here knows of images, settings, files or any one model; the folder can be lifted into another project.
"""

from cifar_towers.towers.collectives import all_reduce_mean, num_replicas, run_on_towers_synchronized
from cifar_towers.towers.devices import Tower, make_towers
from cifar_towers.towers.gradients import average_gradients
from cifar_towers.towers.keras_parallel import make_parallel_model
from cifar_towers.towers.make_parallel import make_parallel, map_on_towers
from cifar_towers.towers.placement import placement_report, variable_placement
from cifar_towers.towers.sharding import run_micro_batches, run_on_towers, split_batch

__all__ = [
    "Tower",
    "all_reduce_mean",
    "average_gradients",
    "make_parallel",
    "make_parallel_model",
    "make_towers",
    "map_on_towers",
    "num_replicas",
    "placement_report",
    "run_micro_batches",
    "run_on_towers",
    "run_on_towers_synchronized",
    "split_batch",
    "variable_placement",
]

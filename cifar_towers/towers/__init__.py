"""Towers: copies of one computation on several devices that meet once a step.

Nothing here knows of images, settings, files or any one model; the folder can be lifted into another project.
"""

from cifar_towers.towers.devices import Tower, make_towers
from cifar_towers.towers.gradients import average_gradients
from cifar_towers.towers.make_parallel import make_parallel, map_on_towers
from cifar_towers.towers.meeting import count_towers, mean_over_towers, run_together
from cifar_towers.towers.parallel import run_on_parts, run_on_towers, split_batch
from cifar_towers.towers.parallel_model import make_parallel_model
from cifar_towers.towers.placement import device_table, variable_placement

__all__ = [
    "Tower",
    "average_gradients",
    "count_towers",
    "device_table",
    "make_parallel",
    "make_parallel_model",
    "make_towers",
    "map_on_towers",
    "mean_over_towers",
    "run_on_parts",
    "run_on_towers",
    "run_together",
    "split_batch",
    "variable_placement",
]

"""Synchronous data parallelism with towers: copies of one computation on several devices.

All towers compute gradients at the same weights, and no variable is updated before its gradients of
all towers have arrived. (Asynchronous workers update at once, with gradients of older weights.) A
whole step is

    shards = split_batch(batch, towers)
    tower_grads = run_on_towers(on_tower, towers, shards)  # K lists of (gradient, variable)
    optimizer.apply_gradients(average_gradients(tower_grads))

This folder knows nothing of this project's images, settings, files or models, and can be lifted
into another project together with `hardware.py` and `errors.py`. Read it in this order:

1. `devices`: a `Tower` and the device it computes on.
2. `sharding`: split a batch and run a function on every tower.
3. `gradients`: average the towers' gradients, the one synchronization point.
4. `placement`: the devices where shared variables live. This is all of the idea; the rest are
   extensions.
5. `collectives`: means over the towers inside the forward pass.
6. `model_parallel`: parts of one net on several devices.
7. `make_parallel`, `keras_parallel`: a function or a Keras model for one device, run on several.
"""

from cifar_towers.towers.collectives import (
    all_reduce_mean,
    num_replicas,
    run_on_towers_synchronized,
)
from cifar_towers.towers.devices import Tower, make_towers
from cifar_towers.towers.gradients import average_gradients
from cifar_towers.towers.keras_parallel import make_parallel_model
from cifar_towers.towers.make_parallel import make_parallel, map_on_towers
from cifar_towers.towers.model_parallel import place_on_device
from cifar_towers.towers.placement import placement_report, variable_placement
from cifar_towers.towers.sharding import (
    run_micro_batches,
    run_on_towers,
    split_batch,
    split_uneven_batch,
)

__all__ = [
    "Tower",
    "all_reduce_mean",
    "average_gradients",
    "make_parallel",
    "make_parallel_model",
    "make_towers",
    "map_on_towers",
    "num_replicas",
    "place_on_device",
    "placement_report",
    "run_micro_batches",
    "run_on_towers",
    "run_on_towers_synchronized",
    "split_batch",
    "split_uneven_batch",
    "variable_placement",
]

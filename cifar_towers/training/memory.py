"""`micro_batches=auto`: one, or as many as the run was trained with so far, and twice as many where memory is short."""

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Iterator

import keras
import tensorflow as tf

from cifar_towers.config import TrainConfig
from cifar_towers.models.layers import has_batch_norm
from cifar_towers.training.devices import describe_out_of_memory, shard_sizes, smaller_micro_batches
from cifar_towers.training.run_setup import RunSetup


class InSmallerParts(Exception):
    """The run is to continue from its last checkpoint with this number of micro-batches."""

    def __init__(self, micro_batches: int):
        super().__init__(f"micro_batches={micro_batches}")
        self.micro_batches = micro_batches


@contextlib.contextmanager
def smaller_parts_for_memory(setup: RunSetup, log: Callable[[str], None]) -> Iterator[None]:
    """Raises and logs `InSmallerParts` where a step does not fit into the memory, if that is asked for and possible."""
    try:
        yield
    except tf.errors.OpError as error:
        reason = "" if setup.requested.micro_batches else describe_out_of_memory(error)
        count = smaller_micro_batches(setup.config, len(setup.towers)) if reason else 0
        if not count:
            raise
        line = f"a step does not fit into the memory ({reason}): continuing with --micro_batches={count}"
        if has_batch_norm(setup.state.model):
            largest = max(shard_sizes(setup.config, len(setup.towers)))
            now, then = largest // setup.config.micro_batches, largest // count
            line += (
                f"; batch norm now sees {then} images at a time instead of {now}, which is another function: to train "
                f"one throughout, give --overwrite --micro_batches={count}"
            )
        log(line)
        raise InSmallerParts(count) from error


def retry_in_smaller_parts(attempt: Callable[[TrainConfig, dict], dict], config: TrainConfig) -> dict:
    """The result of `attempt(config, chosen)`, where `chosen` has the number of micro-batches after one did not fit."""
    chosen: dict = {}
    while True:
        try:
            return attempt(config, chosen)
        except InSmallerParts as error:
            chosen = {"micro_batches": error.micro_batches}
        config = dataclasses.replace(config, overwrite=False)  # it has been done
        keras.backend.clear_session()
        gc.collect()  # the variables of the attempt

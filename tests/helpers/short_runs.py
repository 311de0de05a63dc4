"""Short runs, mostly on a small synthetic set, and what they wrote."""

import contextlib
import json
import shutil
from dataclasses import replace
from signal import SIGTERM

import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cifar_towers import api
from cifar_towers.data import synthetic
from cifar_towers.models import user_model
from cifar_towers.reporting import figures
from cifar_towers.runs.checkpoint import checkpoint_path, list_checkpoints
from cifar_towers.signals import StopSignals
from tests.helpers.configs import TINY_NET, recipe

QUICK = recipe(
    "smoke",
    model="speednet93",
    image_size=20,
    image_size_schedule="0=18,50%=20",
    shift=0,
    batch_size=200,
    tta=False,
    precision="float32",
    summary_every_steps=5,
    ema_decay=0.5,
)
STEPS = 20
RATES = {"learning_rate": 0.1, "bias_learning_rate": 0.0}
# where the model does not matter
TINY = replace(QUICK, model=TINY_NET, image_size_schedule="", num_gpus=1, **RATES)


@contextlib.contextmanager
def small_runs(*splits):
    """Replace the synthetic set by these two splits, if given; leave out two things that take time
    in every run.

    These are the confusion matrix and the check of a user's model, which
    tests/models/test_user_model.py tests.
    """
    with pytest.MonkeyPatch.context() as patch:
        if splits:
            patch.setattr(synthetic, "load", lambda: splits)
        patch.setattr(figures, "confusion_matrix", draw_nothing)
        patch.setattr(user_model, "check_model", lambda *_: None)
        yield patch


def draw_nothing(*_):
    return png_of(np.zeros([8, 8, 3], np.uint8))


def png_of(image):
    return tf.io.encode_png(image).numpy()


def run(config, train_dir="", stop=None, callbacks=(), **settings):
    """Train with `config`, some settings replaced, and return the result."""
    config = replace(config, train_dir=str(train_dir or config.train_dir), **settings)
    source, config = api.locate_data(config)
    return api.train_run(config, source, stop or StopSignals(()), callbacks=callbacks)


class StopAtStep:
    """A signal that arrives during step `at`; the loop looks for one once a step."""

    def __init__(self, at):
        self._left = at

    @property
    def received(self):
        self._left -= 1
        return SIGTERM if self._left <= 0 else 0

    @contextlib.contextmanager
    def recorded(self):
        yield


class Recorder:
    """A callback that keeps what it is told."""

    def __init__(self):
        self.calls = []

    def on_start(self, run):
        self.calls.append(("start", run.directory))

    def on_step(self, step, metrics):
        self.calls.append(("step", step, metrics))

    def on_evaluation(self, step, evaluation):
        self.calls.append(("evaluation", step, evaluation))

    def on_end(self, run):
        self.calls.append(("end", run.directory, run.result is not None))


def stopped_after(step, directory, place):
    """Copy a run as it was if a kill came when nothing later than this step was saved: with its
    later records.
    """
    copy = shutil.copytree(directory, place)
    for checkpoint in list_checkpoints(copy):
        if checkpoint != checkpoint_path(copy, step):
            checkpoint.unlink()
    (copy / "result.json").unlink()
    return copy


def records_of(train_dir, kind):
    lines = (train_dir / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def events_of(directory):
    return EventAccumulator(str(directory), size_guidance={"tensors": 0}).Reload()


def tensors_of(events, tag):
    return {event.step: tf.make_ndarray(event.tensor_proto) for event in events.Tensors(tag)}

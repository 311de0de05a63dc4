import json
from pathlib import Path
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from cifar_towers.data.dataset import CIFAR10, Dataset, Split
from cifar_towers.reporting import environment
from cifar_towers.towers import Tower

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("program", "command"),
    [("scripts/train.py", ["python", "scripts/train.py"]), ("cifar-towers-train", ["cifar-towers-train"])],
)
def test_command_can_be_typed_again(monkeypatch, program, command):
    monkeypatch.setattr("sys.argv", [program, "--seed=3"])
    assert environment.describe_machine()["command"] == [*command, "--seed=3"]


def test_installed_copy_ignores_the_repository_around_it(monkeypatch):
    assert environment._git_revision() != "unknown" or not (ROOT / ".git").exists()
    monkeypatch.setattr(environment, "__file__", str(ROOT / "tests" / "a" / "b" / "environment.py"))
    assert environment._git_revision() == "unknown"


def split(number):
    return Split(np.zeros((number, 4, 4, 3), np.uint8), np.zeros(number, np.int64), CIFAR10)


def describe(model, variables, dataset, banner=""):
    run = SimpleNamespace(model=model, variables=variables, dataset=dataset, banner=banner, precision="float32")
    run.towers, run.config = [Tower(0, "/CPU:0")], SimpleNamespace(crop=4)
    return environment.describe_run(run)


def test_environment_of_a_run():
    images = keras.Input((4, 4, 3))
    with tf.device("/CPU:0"):
        model = keras.Model(images, keras.layers.Dense(10, name="head")(keras.layers.Flatten()(images)))
    head = {f"model.head.{v.name}": v.value for v in model.trainable_variables}
    some = split(2)
    content = describe(model, head, Dataset("mine", some, split(0), some))
    assert content["packages"]["tensorflow"].startswith("2.") and content["processor"]
    assert content["towers"] == [{"name": "tower_0", "device": "/CPU:0"}]
    assert content["data_sha256"] == {"train": some.digest, "test": some.digest} and len(content["class_names"]) == 10
    assert content["variables"] == [
        {"name": "model.head.kernel", "shape": [48, 10], "bytes": 1920, "device": "/CPU:0"},
        {"name": "model.head.bias", "shape": [10], "bytes": 40, "device": "/CPU:0"},
    ]
    assert content["model"][-1]["name"] == "head" and content["model"][-1]["parameters"] == 490
    json.dumps(content)


def test_subclassed_model_has_no_list_of_layers():
    class Subclassed(keras.Model):
        def call(self, images):
            return images

    content = describe(Subclassed(), {}, Dataset("mine", split(0), split(0), split(0)), "FAKE")
    assert content["model"] == content["variables"] == [] and content["synthetic_data"] == "FAKE"

import json
from pathlib import Path
from types import SimpleNamespace

import keras
import numpy as np
import tensorflow as tf

from cifar_towers.data.dataset import CIFAR10, Dataset, Split
from cifar_towers.reporting import environment
from cifar_towers.towers import Tower

ROOT = Path(__file__).parents[2]


def test_the_command_can_be_typed_again(monkeypatch):
    for typed, told in (("scripts/train.py", ["python", "scripts/train.py", "--seed=3"]), ("cifar-towers-train", None)):
        monkeypatch.setattr("sys.argv", [typed, "--seed=3"])
        assert environment.machine()["command"] == (told or [typed, "--seed=3"])


def test_no_other_projects_revision_is_told(monkeypatch, tmp_path):
    """Of an installed copy, which may stand inside of another repository."""
    assert environment._git_revision() != "unknown" or not (ROOT / ".git").exists()
    monkeypatch.setattr(environment, "__file__", str(ROOT / "tests" / "a" / "b" / "environment.py"))
    assert environment._git_revision() == "unknown"


def test_a_run_tells_versions_devices_data_and_what_it_trains():
    images = keras.Input((4, 4, 3))
    with tf.device("/CPU:0"):
        model = keras.Model(images, keras.layers.Dense(10, name="head")(keras.layers.Flatten()(images)))
    head = {f"model.head.{v.name}": v.value for v in model.trainable_variables}
    state = SimpleNamespace(model=model, named_variables=lambda: head)
    some, none = (Split(np.zeros((n, 4, 4, 3), np.uint8), np.zeros(n, np.int64), CIFAR10) for n in (2, 0))
    dataset = Dataset("mine", some, none, some)
    told = environment.of_run([Tower(0, "/CPU:0")], "float32", dataset, "", state, 4)
    assert told["packages"]["tensorflow"].startswith("2.") and told["processor"]
    assert told["towers"] == [{"name": "tower_0", "device": "/CPU:0"}]
    assert told["data_sha256"] == {"train": some.digest, "test": some.digest} and len(told["class_names"]) == 10
    assert told["variables"] == [
        {"name": "model.head.kernel", "shape": [48, 10], "bytes": 1920, "device": "/CPU:0"},
        {"name": "model.head.bias", "shape": [10], "bytes": 40, "device": "/CPU:0"},
    ]
    assert told["model"][-1]["name"] == "head" and told["model"][-1]["parameters"] == 490
    json.dumps(told)


def test_a_net_that_cannot_be_looked_into_has_no_layers_to_tell_of():
    class Hidden(keras.Model):
        def call(self, images):
            return images

    state = SimpleNamespace(model=Hidden(), named_variables=dict)
    empty = Split(np.zeros((0, 4, 4, 3), np.uint8), np.zeros(0, np.int64), CIFAR10)
    told = environment.of_run([Tower(0, "/CPU:0")], "float32", Dataset("mine", empty, empty, empty), "FAKE", state, 4)
    assert told["model"] == told["variables"] == [] and told["synthetic_data"] == "FAKE"

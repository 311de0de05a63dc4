import gc
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from cifar_towers.data.dataset import CIFAR10, Dataset, Split
from cifar_towers.reporting import run_info
from cifar_towers.reporting.run_info import resource_usage
from cifar_towers.towers import Tower

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("program", "command"),
    [("scripts/train.py", ["python", "scripts/train.py"]), ("cifar-towers-train", ["cifar-towers-train"])],
)
def test_command_can_be_typed_again(monkeypatch, program, command):
    monkeypatch.setattr("sys.argv", [program, "--seed=3"])
    assert run_info.describe_machine()["command"] == [*command, "--seed=3"]


def test_installed_copy_ignores_the_repository_around_it(monkeypatch):
    assert run_info._git_revision() != "unknown" or not (ROOT / ".git").exists()
    monkeypatch.setattr(run_info, "__file__", str(ROOT / "tests" / "a" / "b" / "run_info.py"))
    assert run_info._git_revision() == "unknown"


def split(number):
    return Split(np.zeros((number, 4, 4, 3), np.uint8), np.zeros(number, np.int64), CIFAR10)


def describe(model, variables, dataset, banner=""):
    run = SimpleNamespace(model=model, variables=variables, dataset=dataset, banner=banner, precision="float32")
    run.towers, run.config = [Tower(0, "/CPU:0")], SimpleNamespace(crop=4)
    return run_info.describe_run(run)


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


def test_numbers_have_their_nouns():
    assert [run_info.count(number, "step") for number in (0, 1, 1200)] == ["0 steps", "1 step", "1,200 steps"]


class NVMLError(Exception):
    pass


@pytest.fixture
def nvml(monkeypatch):
    """Replace NVIDIA's library by a fake one with two GPUs."""
    library = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=90 + handle),
    )
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setattr(tf.config.experimental, "get_memory_info", lambda gpu: {"current": 5e9, "peak": 6e9})
    return library


def test_host_memory():
    gc.collect()  # not between the two
    towers = [Tower(0, "/CPU:0")]
    before, held = resource_usage(towers), bytearray(10**8)
    assert set(before) == {"memory/host_mb"}
    assert 90 < resource_usage(towers)["memory/host_mb"] - before["memory/host_mb"] < 130 and held


def test_gpu_memory_and_utilization(nvml):
    values = resource_usage([Tower(0, "/GPU:0"), Tower(1, "/GPU:1")])
    assert values.pop("memory/host_mb") > 100
    memory = {"memory/GPU:0_mb": 6000, "memory/GPU:1_mb": 6000}
    assert values == memory | {"gpu_utilisation/0": 90, "gpu_utilisation/1": 91}


def test_failing_driver_is_left_out(nvml, monkeypatch):
    def fails(*_):
        raise NVMLError

    for name in ("nvmlDeviceGetUtilizationRates", "nvmlInit"):
        setattr(nvml, name, fails)
        assert "gpu_utilisation/0" not in resource_usage([Tower(0, "/GPU:0")])
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "memory/GPU:0_mb" in resource_usage([Tower(0, "/GPU:0")])

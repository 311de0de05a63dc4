import pytest
import tensorflow as tf

from cifar_towers.towers import devices, make_towers
from cifar_towers.towers.devices import plan_devices


def test_towers_have_names_and_devices_of_their_own():
    towers = make_towers(3)
    assert [(t.index, t.name, t.device) for t in towers] == [
        (0, "tower_0", "/CPU:0"),
        (1, "tower_1", "/CPU:1"),
        (2, "tower_2", "/CPU:2"),
    ]


def test_two_towers_where_there_is_no_gpu():
    assert len(make_towers()) == 2


@pytest.mark.parametrize(
    ("towers", "gpus", "physical"),
    [(0, 4, (0, 1, 2, 3)), (2, 4, (0, 1)), (4, 2, (0, 0, 1, 1)), (3, 2, (0, 0, 1)), (8, 1, (0,) * 8)],
)
def test_gpus_are_shared_evenly(towers, gpus, physical):
    plan = plan_devices(towers, gpus)
    assert (plan.kind, plan.physical) == ("GPU", physical)
    assert bool(plan.note) == (len(physical) > gpus)


def test_missing_gpus_are_spoken_of():
    assert plan_devices(4, 0).note == "no GPU here: 4 towers on logical CPU devices"


@pytest.mark.parametrize(("visible", "warned"), [(None, True), ("0,1", True), ("", False), ("-1", False)])
def test_a_driver_without_its_packages_is_spoken_of(monkeypatch, tmp_path, caplog, visible, warned):
    monkeypatch.setattr("cifar_towers.towers.devices.NVIDIA_DRIVERS", (tmp_path / "none", tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    make_towers(2)
    assert ("pip install 'tensorflow[and-cuda]'" in caplog.text) == warned


def test_without_soft_placement_missing_gpus_are_an_error():
    with pytest.raises(ValueError, match="4 towers need 4 GPUs and this machine has /GPU:0, /GPU:1"):
        plan_devices(4, 2, soft_placement=False)
    with pytest.raises(ValueError, match="this machine has only /CPU:0"):
        plan_devices(1, 0, soft_placement=False)


def test_too_late_for_more_devices():
    assert len(tf.config.list_logical_devices("CPU")) == 8
    with pytest.raises(RuntimeError, match="already runs with 8 CPU devices, too few for 9 towers"):
        make_towers(9)


@pytest.fixture
def configured(monkeypatch):
    """What `_divide_gpus` asks of TensorFlow, for two GPUs that this machine need not have."""
    asked = []
    monkeypatch.setattr(tf.config, "set_visible_devices", lambda gpus, kind: asked.append(("visible", tuple(gpus))))
    monkeypatch.setattr(
        tf.config,
        "set_logical_device_configuration",
        lambda gpu, parts: asked.append((gpu, [part.memory_limit for part in parts])),
    )
    monkeypatch.setattr(tf.config.experimental, "set_memory_growth", lambda gpu, on: asked.append((gpu, on)))
    return asked


def divide(towers, limit_mb=0, growth=True):
    devices._divide_gpus(["GPU a", "GPU b"], plan_devices(towers, 2), growth, limit_mb)


def test_a_gpu_for_each_tower_grows_its_memory(configured):
    divide(2)
    assert configured == [("visible", ("GPU a", "GPU b")), ("GPU a", True), ("GPU b", True)]


def test_unused_gpus_are_left_to_others(configured):
    divide(1, growth=False)
    assert configured == [("visible", ("GPU a",)), ("GPU a", False)]


def test_shared_gpus_are_cut_into_equal_parts(configured, monkeypatch):
    monkeypatch.setattr(devices, "_gpu_memory_mb", lambda index: 9000)
    divide(3)
    assert configured[1:] == [("GPU a", [4500, 4500]), ("GPU b", [9000])]


def test_a_memory_limit_is_for_the_whole_gpu(configured):
    divide(4, limit_mb=6000)
    assert configured[1:] == [("GPU a", [3000, 3000]), ("GPU b", [3000, 3000])]


def test_a_gpu_of_unknown_size_needs_a_limit(configured, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match="set gpu_memory_limit_mb"):
        divide(4)

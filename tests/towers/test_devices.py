import os
from types import SimpleNamespace

import pytest
import tensorflow as tf

from cifar_towers import hardware
from cifar_towers.towers import Tower, devices, make_parallel, make_towers


def test_towers_are_two_by_default_or_as_many_as_devices(monkeypatch):
    assert make_towers() == [Tower(0, "/CPU:0"), Tower(1, "/CPU:1")]
    assert make_towers(3)[2] == Tower(2, "/CPU:2")
    assert make_towers(3)[2].name == "tower_2"
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: ["/CPU:0"])
    assert make_towers() == [Tower(0, "/CPU:0")]


@pytest.mark.parametrize(
    ("towers", "gpus", "mentions"), [(4, 2, "2 GPUs"), (2, 2, ""), (1, 0, "no GPU here")]
)
def test_towers_without_a_gpu_of_their_own_are_logged(monkeypatch, caplog, towers, gpus, mentions):
    """The last is what docs/cluster/train.sbatch says that the log says."""
    caplog.set_level("INFO")
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: [SimpleNamespace()] * gpus)
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: [SimpleNamespace()] * 8)
    monkeypatch.setattr(devices, "_divide_gpus", lambda gpus, num_towers: None)
    make_towers(towers)

    assert mentions in caplog.text
    assert bool(mentions) == bool(caplog.text)


@pytest.mark.parametrize(("capability", "xla"), [((7, 5), True), ((9, 0), True), ((12, 0), False)])
def test_xla_ends_the_process_on_gpus_newer_than_tensorflow(monkeypatch, capability, xla):
    monkeypatch.setattr(
        tf.config, "get_visible_devices", lambda kind: [SimpleNamespace(name="GPU:0")]
    )
    monkeypatch.setattr(
        tf.config.experimental, "get_device_details", lambda gpu: {"compute_capability": capability}
    )
    assert hardware.xla_runs() == xla


@pytest.mark.parametrize(
    ("towers", "gpus", "options", "error", "mentions"),
    [
        (4, 2, {"soft_placement": False}, ValueError, "4 .* 2"),
        (1, 0, {"soft_placement": False}, ValueError, "1 .* 0"),
        (9, 0, {}, RuntimeError, "8 CPU .* 9"),  # TensorFlow already runs with eight
    ],
)
def test_too_few_devices_are_an_error(monkeypatch, towers, gpus, options, error, mentions):
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: [SimpleNamespace()] * gpus)
    with pytest.raises(error, match=mentions):
        make_towers(towers, **options)


@pytest.mark.parametrize(
    ("quota", "expected"),
    [
        ("max 100000", 8),
        ("150000 100000", 2),
        ("50000 100000", 1),
        ("6400000 100000", 8),
        ("", 8),
        (None, 8),
    ],
)
def test_cores_are_those_of_the_affinity_within_the_quota_of_the_container(
    tmp_path, monkeypatch, quota, expected
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
    monkeypatch.setattr(hardware, "CPU_QUOTA", tmp_path / "cpu.max")
    if quota is not None:
        hardware.CPU_QUOTA.write_text(f"{quota}\n")
    assert hardware.available_cores() == expected


def test_a_worker_of_a_cluster_has_one_tower_on_its_cpu(monkeypatch):
    """Its devices are configured but not initialized, also without soft placement."""
    configured = []
    monkeypatch.setattr(tf.config, "list_logical_devices", None)
    monkeypatch.setattr(
        tf.config,
        "set_logical_device_configuration",
        lambda _, parts: configured.append(len(parts)),
    )
    for name in ("set_inter_op_parallelism_threads", "set_intra_op_parallelism_threads"):
        monkeypatch.setattr(tf.config.threading, name, lambda count: None)
    try:
        assert make_towers(multi_worker=True, soft_placement=False) == [Tower(0, "/CPU:0")]
    finally:
        tf.config.set_soft_device_placement(True)

    assert configured == [1]


@pytest.mark.parametrize("allowed", [False, True])
def test_a_number_of_towers_leaves_soft_placement_as_it_is(allowed):
    tf.config.set_soft_device_placement(allowed)
    try:
        make_parallel(tf.abs, 2, x=tf.ones(2))
        tf.function(lambda: make_parallel(tf.abs, 2, x=tf.ones(2)))()
        assert tf.config.get_soft_device_placement() == allowed
    finally:
        tf.config.set_soft_device_placement(True)


@pytest.fixture
def configured(monkeypatch):
    """Record the calls of `_divide_gpus` to TensorFlow, so that its GPUs need not exist."""
    calls = []
    monkeypatch.setattr(
        tf.config, "set_visible_devices", lambda gpus, kind: calls.append(("visible", tuple(gpus)))
    )

    def record_parts(gpu, parts):
        calls.append((gpu, [part.memory_limit for part in parts]))

    monkeypatch.setattr(tf.config, "set_logical_device_configuration", record_parts)
    monkeypatch.setattr(
        tf.config.experimental, "set_memory_growth", lambda gpu, on: calls.append((gpu, on))
    )
    return calls


@pytest.mark.parametrize(
    ("towers", "divided", "visible", "expected"),
    [
        (2, None, ("GPU a", "GPU b"), [("GPU a", True), ("GPU b", True)]),
        (1, None, ("GPU a",), [("GPU a", True)]),
        (
            1,
            ["a logical GPU"],
            ("GPU a",),
            [],
        ),  # TensorFlow refuses growth, as in a notebook that had four towers
        (3, None, ("GPU a", "GPU b"), [("GPU a", [4500, 4500]), ("GPU b", [9000])]),
    ],
    ids=["memory growth", "unused GPUs are invisible", "divided already", "shared equally"],
)
def test_gpu_memory(configured, monkeypatch, towers, divided, visible, expected):
    monkeypatch.setattr(devices, "_gpu_memory_mb", lambda index: 9000)
    monkeypatch.setattr(tf.config, "get_logical_device_configuration", lambda gpu: divided)
    devices._divide_gpus(["GPU a", "GPU b"], towers)
    assert configured == [("visible", visible), *expected]


def test_memory_of_a_gpu_is_nine_tenths_of_what_its_driver_reports(monkeypatch):
    def report(command, **options):
        assert command[:2] == ["nvidia-smi", "--id=GPU-b"]
        return SimpleNamespace(stdout=b"10000\n")

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    monkeypatch.setattr(devices.subprocess, "run", report)
    assert devices._gpu_memory_mb(1) == 9000

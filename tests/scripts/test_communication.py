"""Predicted bytes against arithmetic and traced steps, predicted times against arithmetic, and docs/scale.md."""

from functools import partial
from pathlib import Path

import pytest

from cifar_towers.config import TrainConfig
from cifar_towers.towers.placement import PLACEMENTS
from scripts.scaling import communication, prediction, table
from scripts.scaling.communication import StepBytes, VariableBytes, link_loads, predict, step_bytes, variable_bytes
from scripts.scaling.settings import ScalingConfig
from tests.scripts.transfers import transfers
from tests.training.runs import Run

ROOT = Path(__file__).parents[2]

EXAMPLE_BYTES = 32 * 32 * 3 + 8 + 1 + 2 * 4  # image, label, flip and window; nothing else is random here
BATCH = 12
NET = [VariableBytes(100), VariableBytes(20, "statistic"), VariableBytes(60), VariableBytes(8, "frozen")]
GPUS = ("/GPU:0", "/GPU:1")


SETUPS = [
    *(({"model": "cifarnet", "variable_placement": placement}, 3) for placement in PLACEMENTS),
    ({"model": "resnet20", "variable_placement": "round_robin", "gradient_device": "cpu"}, 2),
    ({"model": "speednet93", "variable_placement": "round_robin", "micro_batches": 2}, 2),
    ({"model": "cifarnet", "strategy": "mirrored", "all_reduce": "one_device"}, 3),
]


@pytest.mark.parametrize(("settings", "count"), SETUPS)
def test_predicted_bytes_equal_those_of_a_traced_step(towers, examples, settings, count):
    crop = 24 if settings["model"] == "cifarnet" else 0
    config = TrainConfig(flip="random", crop=crop, batch_size=BATCH, whitening_images=20, **settings)
    run = Run(towers(count), examples, config)
    function = run.train_step.get_concrete_function(run.batches.at(0), run.rates(rate=0.1))
    state, devices = run.state, [tower.device for tower in towers(count)]
    net = variable_bytes(state.model)
    exchange, mean_on = settings.get("variable_placement", "one_device"), "/CPU:0" * ("gradient_device" in settings)
    expected = step_bytes(net, exchange, devices, BATCH, EXAMPLE_BYTES, gradient_device=mean_on)
    rest = transfers(function, scalars=False) - expected.total()
    if exchange == "one_device":
        # [K, n] float32 of losses, correct, nonfinite and stop signal, needed on the first device
        metrics_bytes = 4 * count * (len(state.loss_averages.sums) + 2)
        assert rest == {(device, devices[0]): metrics_bytes for device in devices[1:]}
    else:
        assert bool(expected.scatter) == bool(mean_on)
        assert transfers(function, scalars=False) == expected.total()
        scalars = (transfers(function) - expected.total()).total()
        assert 0 < scalars <= 4 * count * (len(state.weights) + 20)  # norms of gradients, losses, rates


def test_bytes_of_shared_variables_with_a_batch():
    """A step of NET on two GPUs: 180 + 8 bytes are read, 180 returned; batches of 3 examples of 10 bytes."""
    host = step_bytes(NET, "cpu", GPUS, 3, 10)
    read = {("/CPU:0", "/GPU:0"): 188 + 20, ("/CPU:0", "/GPU:1"): 188 + 10}
    assert host == StepBytes(read, {("/GPU:0", "/CPU:0"): 180, ("/GPU:1", "/CPU:0"): 180}, {})
    assert link_loads(host.total()) == {"/CPU:0": (406, 360), "/GPU:0": (180, 208), "/GPU:1": (180, 198)}
    on_host = step_bytes(NET, "cpu", ["/CPU:0", "/CPU:1"], 4, 10)
    assert on_host == StepBytes({("/CPU:0", "/CPU:1"): 188 + 20}, {("/CPU:1", "/CPU:0"): 180}, {})


TO_1, TO_0, FROM_0, FROM_1 = GPUS, GPUS[::-1], (GPUS[0], "/CPU:0"), (GPUS[1], "/CPU:0")


@pytest.mark.parametrize(
    ("placement", "mean_on", "expected"),
    [
        # 100 and 60 on the first, 20 and 8 on the second
        ("round_robin", "", StepBytes({TO_1: 160, TO_0: 28}, {TO_0: 160, TO_1: 20}, {})),
        # 100 on the first; 20, 60 and 8 on the second
        ("least_loaded", "", StepBytes({TO_1: 100, TO_0: 88}, {TO_0: 100, TO_1: 80}, {})),
        (
            "round_robin",
            "/CPU:0",
            StepBytes({TO_1: 160, TO_0: 28}, {FROM_0: 160, FROM_1: 160, TO_1: 20}, {("/CPU:0", "/GPU:0"): 160}),
        ),
    ],
)
def test_bytes_of_shared_variables(placement, mean_on, expected):
    assert step_bytes(NET, placement, GPUS, gradient_device=mean_on) == expected
    assert step_bytes(NET, placement, GPUS[:1], gradient_device=mean_on).total() == {}  # nothing to average


def test_bytes_of_mirrored_variables():
    four = [f"/GPU:{index}" for index in range(4)]
    star, ring = (step_bytes(NET, exchange, four) for exchange in ("one_device", "ring"))
    assert star.gather == {(gpu, "/GPU:0"): 180 for gpu in four[1:]}
    assert star.scatter == {("/GPU:0", gpu): 180 for gpu in four[1:]}
    assert ring.gather == ring.scatter == {(four[k], four[(k + 1) % 4]): 135 for k in range(4)}
    assert set(link_loads(ring.total()).values()) == {(270, 270)}  # 2 x 3/4 x 180
    assert step_bytes(NET, "ring", four[:1]).total() == {}


def test_step_times():
    """One weight of 10^6 bytes, 100 examples of 10^4, at 1 GB/s: a millisecond for each of the two."""
    settings = {"compute_seconds": 0.008, "variables": [VariableBytes(10**6)], "batch_size": 100}
    settings |= {"example_bytes": 10**4, "link_gb_per_s": 1.0, "num_towers": (1, 2, 4)}

    def predicted(**more):
        return {(row.exchange, row.num_towers): row for row in predict(**settings, **more)}

    rows = predicted()
    # alone, on the GPU: the batch in 1 ms, then 8 ms
    assert rows["round_robin", 1].step_seconds == pytest.approx(0.009)
    assert rows["round_robin", 1].efficiency == pytest.approx(1)
    # from the host: the weight and a quarter of the batch to each of four, and four gradients back
    assert rows["cpu", 4].compute_seconds == pytest.approx(0.002)
    assert rows["cpu", 4].transfer_seconds == pytest.approx(0.004 + 0.001 + 0.004)
    assert rows["cpu", 4].images_per_sec == pytest.approx(100 / 0.011)
    assert rows["cpu", 4].efficiency == pytest.approx(0.009 / 0.011 / 4)
    # the one GPU that has the weight sends it three times while the host sends the batch
    assert rows["least_loaded", 4].transfer_seconds == pytest.approx(0.003 + 0.003)
    assert rows["one_device", 4].transfer_seconds == pytest.approx(0.001 + 0.003 + 0.003)
    assert rows["ring", 4].transfer_seconds == pytest.approx(0.001 + 2 * 0.75 * 0.001)
    assert rows["ring", 2].transfer_seconds == pytest.approx(0.001 + 2 * 0.5 * 0.001)

    weak = predicted(per_device_batch=True)
    assert weak["ring", 4].batch_size == 400
    assert weak["ring", 4].step_seconds == pytest.approx(0.008 + 0.004 + 0.0015)
    assert weak["ring", 4].efficiency == pytest.approx(0.009 / 0.0135)

    (uneven,) = predict(1.0, NET, 10, 0, 1.0, num_towers=[4], exchanges=["ring"])
    assert uneven.compute_seconds == pytest.approx(0.3)  # by the largest shard


def test_latency_of_messages():
    """A millisecond a message, beside transfers that take no time to speak of; the batch is read in one."""
    settings = {"compute_seconds": 1.0, "variables": NET, "batch_size": 12, "link_gb_per_s": 1e9}

    def latencies(example_bytes, **more):
        rows = predict(**settings, example_bytes=example_bytes, num_towers=(1, 2, 4), latency_seconds=1e-3, **more)
        seconds: dict[str, list[float]] = {}
        for row in rows:
            seconds.setdefault(row.exchange, []).append(round(1000 * row.transfer_seconds, 3))
        return seconds

    assert latencies(10) == {
        "cpu": [2, 2, 2],  # read, gather
        "round_robin": [1, 2, 2],
        "least_loaded": [1, 2, 2],
        "one_device": [1, 3, 3],  # read, gather, scatter
        "ring": [1, 1 + 2 * 1, 1 + 2 * 3],
    }
    assert latencies(0, exchanges=["one_device", "ring"]) == {"one_device": [0, 2, 2], "ring": [0, 2, 6]}


def test_step_with_automatic_micro_batches_is_measured_with_one(towers, examples):
    settings = {"model": "cifarnet", "crop": 24, "shift": 0, "batch_size": 8, "precision": "float32"}
    config = ScalingConfig(recipe=TrainConfig(micro_batches=0, **settings), minutes=0)
    rates = prediction.measure(config, towers(1), examples)
    assert len(rates.images_per_sec) == prediction.ROUNDS and rates.median > 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (partial(step_bytes, NET, "star", GPUS), "'star' is not one of cpu, round_robin, least_loaded, one_device, "),
        (partial(predict, 1.0, NET, 8, 1, 1.0), "8 examples cannot be shared by 64 devices"),
        (partial(predict, 1.0, NET, 64, 1, 0.0), "must be above 0"),
    ],
)
def test_impossible_predictions_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_new_placement_is_predicted_without_a_change(monkeypatch):
    """The cost model predicts with the function that places the variables."""
    monkeypatch.setitem(PLACEMENTS, "last_tower", lambda devices: lambda count_bytes, pinned_to: devices[-1])
    monkeypatch.setattr(communication, "EXCHANGES", (*communication.EXCHANGES, "last_tower"))
    assert step_bytes([VariableBytes(100)], "last_tower", GPUS).read == {("/GPU:1", "/GPU:0"): 100}


def test_table_of_docs_scale():
    assert f"\n{table.make_table()}\n" in (ROOT / "docs/scale.md").read_text()

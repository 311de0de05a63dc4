"""The peers' programs, as the race and as a user starts them."""

import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from cifar_towers.benchmark import framework_comparison, processes
from cifar_towers.benchmark.baselines import count_trained, stock
from cifar_towers.benchmark.cases import NO_EXCHANGE, UNPLACED, BenchmarkCase, build
from cifar_towers.cli import tf_import
from cifar_towers.cli.tool_configs import BenchmarkConfig, SpeedrunConfig
from cifar_towers.config import TrainConfig
from cifar_towers.data import synthetic
from cifar_towers.data.augment import Augmentation
from cifar_towers.data.batches import Batches
from cifar_towers.errors import RunError
from cifar_towers.models import MODELS
from cifar_towers.training import build as setup

PEERS = {
    "keras_fit.py": ("--model=cifarnet", "--precision=float32"),
    "tutorial_graph.py": ("--model=cifarnet", "--towers=2"),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "batches.npz"
    batches = Batches(synthetic.make(64, seed=0, stream=0), 16, seed=0)
    framework_comparison.write_batches(path, batches, Augmentation(crop=24))
    return path


def command(program, data, *flags, batch_size=16):
    return [
        sys.executable,
        tf_import.script(f"peers/{program}"),
        f"--data={data}",
        f"--batch_size={batch_size}",
        *flags,
    ]


def test_all_get_the_same_batches(data):
    with np.load(data) as file:
        images, labels, raw = file["images"], file["labels"], file["raw"]
    assert images.shape == (48, 24, 24, 3) and images.dtype == np.float32 and abs(images.mean()) < 1
    assert raw.shape == (48, 32, 32, 3) and raw.dtype == np.uint8 and labels.shape == (48,)


@pytest.mark.parametrize("program", PEERS)
def test_a_peer_makes_as_many_steps_as_it_is_told(data, program):
    with processes.peer(command(program, data, *PEERS[program]), moved("cifarnet", crop=24)) as ask:
        found = [ask(steps) for steps in (3, 1)]
    assert [len(seconds) for seconds in found] == [3, 1]
    assert all(0 < seconds < 60 for seconds in (*found[0], *found[1]))


@pytest.mark.slow
def test_a_peer_by_hand(data):
    told = subprocess.run(
        command("keras_fit.py", data, "--model=cifarnet", "--steps=3"), capture_output=True, text=True, timeout=120
    )
    assert told.returncode == 0 and float(told.stdout.removesuffix(" images/s\n")) > 1, told.stderr


@pytest.mark.parametrize(
    ("program", "flags", "told"),
    [
        ("keras_fit.py", ["--model=cifarnet"], "--batch_size=64 is more than the 48 images"),
        ("tutorial_graph.py", ["--model=resnet20"], "the tutorial has one net in one precision"),
    ],
)
def test_what_a_peer_cannot_do_is_one_line(data, program, flags, told):
    with pytest.raises(RunError, match=told), processes.peer(command(program, data, *flags, batch_size=64), 7):
        pass


def test_without_pytorch_it_says_what_to_install(data):
    """Also where PyTorch is installed: it is hidden from the process."""
    hidden = (
        "import runpy, sys; sys.modules['torch'] = None; program = sys.argv.pop(1);"
        "sys.path.insert(0, program.rsplit('/', 1)[0]); runpy.run_path(program, run_name='__main__')"
    )
    _, *arguments = command("pytorch_step.py", data)
    with (
        pytest.raises(RunError, match="PyTorch is missing; type: pip install"),
        processes.peer([sys.executable, "-c", hidden, *arguments], 7),
    ):
        pass


def test_a_python_that_is_not_there():
    with pytest.raises(RunError, match="nowhere/python cannot be started"), processes.peer(["nowhere/python"], 7):
        pass


def test_a_peer_that_ends_between_two_visits():
    script = "print('ready 7', flush=True); input(); print([0.1], flush=True); raise SystemExit('out of memory')"
    with processes.peer([sys.executable, "-c", script], 7) as ask:
        assert ask(1) == [0.1]
        for _ in range(2):
            with pytest.raises(RunError, match="out of memory"):
                ask(1)


def test_a_peer_with_another_net_is_none():
    script = "print('ready 797962', flush=True); input()"
    with (
        pytest.raises(RunError, match="^it trains 797,962 numbers where ours trains 1,068,298: another net$"),
        processes.peer([sys.executable, "-c", script], 1068298),
    ):
        pass


def test_a_peer_that_is_lost_costs_the_others_nothing(tmp_path, monkeypatch):
    """It answers to the step that it is planned by and to the first round."""
    answers = "[print([0.5] * int(input()), flush=True) for _ in range({})]"
    script = f"print('ready 7', flush=True); {answers}; raise SystemExit('full')"
    config = SpeedrunConfig(
        dataset="synthetic", model="cifarnet", batch_size=16, num_gpus=2, rounds=3, peers="keras,tutorial", crop=24,
        shift=0, train_dir=str(tmp_path),
    )  # fmt: skip
    monkeypatch.setattr(framework_comparison, "_training", lambda config, precision: lambda steps: 100.0)
    visits = {"keras": 2, "tutorial": 4}
    monkeypatch.setattr(
        framework_comparison, "_command", lambda name, *_: [sys.executable, "-c", script.format(visits[name])]
    )
    batches = Batches(synthetic.make(64, seed=0, stream=0), 16, seed=0)
    rows, left_out = framework_comparison.run(config, 1, ["float32"], batches, Augmentation(crop=24), 7)
    assert {row.name: len(row.images_per_sec) for row in rows} == {"cifar_towers": 3, "tutorial": 3}
    assert left_out == {"keras, float32": "full"}


def test_on_several_devices_ours_is_measured_on_one_of_them_too(tmp_path, monkeypatch):
    """As Keras without a strategy is; mirrored, it has all."""
    config = SpeedrunConfig(
        dataset="synthetic", model="cifarnet", batch_size=16, num_gpus=4, rounds=1,
        peers="keras,keras-mirrored", crop=24, shift=0, train_dir=str(tmp_path),
    )  # fmt: skip
    monkeypatch.setattr(
        framework_comparison, "_training", lambda config, precision: lambda steps: 100.0 * config.num_gpus
    )
    script = "print('ready 7', flush=True); [print([0.5] * int(input()), flush=True) for _ in range(2)]"
    monkeypatch.setattr(framework_comparison, "_command", lambda *_: [sys.executable, "-c", script])
    batches = Batches(synthetic.make(64, seed=0, stream=0), 16, seed=0)
    rows, _ = framework_comparison.run(config, 4, ["float32"], batches, Augmentation(crop=24), 7)
    assert [(row.name, row.devices, row.median) for row in rows] == [
        ("cifar_towers", 1, 100.0), ("cifar_towers", 4, 400.0), ("keras", 1, 32.0), ("keras-mirrored", 4, 32.0),
    ]  # fmt: skip


def test_ours_takes_the_step_after_the_whitening_has_come_to_rest(tmp_path, monkeypatch):
    trained = []

    def train(config, quiet):
        trained.append(config)
        return {"images_per_sec": 5.0}

    monkeypatch.setattr(processes, "train", train)
    config = SpeedrunConfig(dataset="synthetic", num_gpus=2, train_dir=str(tmp_path))
    assert framework_comparison._training(config, "bfloat16")(8) == 5.0
    (given,) = trained
    assert (given.whitening_epochs, given.max_steps, given.precision) == (0, 9, "bfloat16")
    assert given.length(100).last == 9
    framework_comparison._training(config, "bfloat16")(2500)
    assert trained[-1].length(48).last == 2501  # also where that is more than the recipe has


def moved(model, **settings):
    """How many numbers a step of ours moves, in the side-by-side and in the middle of a recipe's run."""
    train = synthetic.make(200, seed=0, stream=0)
    found = set()
    for epochs in (0, 3):
        config = TrainConfig(
            model=model, batch_size=20, epochs=10, whitening_epochs=epochs, optimizer="momentum", **settings
        )
        length = config.run_length(10)
        optimizer = setup.make_state(config, "float32", train, length)[0].optimizer
        step = length.last // 2 if epochs else 0
        found.add(sum(variable.shape.num_elements() for variable in optimizer.moving(optimizer.rates(step))))
    (count,) = found
    return count


@pytest.mark.parametrize("model", ["speednet94", "resnet20"])
def test_keras_trains_as_many_numbers_as_ours(model):
    net = MODELS[model](side=32)
    numbers = [sum(v.shape.num_elements() for v in each.trainable_variables) for each in (stock(net), net)]
    assert count_trained(net) == numbers[0] == moved(model)
    assert numbers[1] - numbers[0] == (24 if model == "speednet94" else 0)  # the whitening's bias


def test_what_a_net_of_ones_own_trains_is_counted():
    images = keras.Input([8, 8, 3])
    x = keras.layers.Conv2D(3, 1)(images)
    assert count_trained(keras.Model(images, x + images)) == 12


@pytest.mark.parametrize(("strategy", "steps"), [("towers", 1), (NO_EXCHANGE, 2)])
def test_the_benchmark_measures_the_step_that_most_of_a_run_has(towers, monkeypatch, strategy, steps):
    """The whitening is trained for the first of ten epochs."""
    rates = []
    make = setup.make_training

    def make_training(*arguments):
        training = make(*arguments)
        return training._replace(train_step=lambda batch, given, side: rates.append(set(given)) or tf.constant(0.0))

    monkeypatch.setattr(setup, "make_training", make_training)
    config = BenchmarkConfig(model="speednet93", batch_size=20, epochs=10, whitening_epochs=1, optimizer="momentum")
    variation = BenchmarkCase(strategy, UNPLACED, 2, "float32")
    list(build(config, variation, towers(2), synthetic.make(200, seed=0, stream=0)).run(1))
    assert rates == [{"kernels", "biases", "head"}] * steps

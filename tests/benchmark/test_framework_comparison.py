"""The peers' programs, as the race and as a user starts them."""

import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from cifar_towers.benchmark import framework_comparison, processes
from cifar_towers.benchmark.baselines import make_arrays, num_trained_parameters, to_stock_model
from cifar_towers.benchmark.cases import NO_EXCHANGE, UNPLACED, BenchmarkCase
from cifar_towers.benchmark.settings import BenchmarkConfig, SpeedrunConfig
from cifar_towers.benchmark.worker import prepare_case
from cifar_towers.config import TrainConfig
from cifar_towers.data import synthetic
from cifar_towers.data.augment import Augmentation
from cifar_towers.data.batches import Batches
from cifar_towers.data.dataset import Dataset
from cifar_towers.errors import RunError
from cifar_towers.models import MODELS
from cifar_towers.training import build

TRAIN = synthetic.make(64, seed=0, stream=0)
PEERS = {
    "keras_fit.py": ("--model=cifarnet", "--precision=float32"),
    "keras_fit.py --untuned": ("--model=cifarnet", "--precision=float32"),
    "tutorial_graph.py": ("--model=cifarnet", "--towers=2"),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "batches.npz"
    np.savez(path, **make_arrays(Batches(TRAIN, 16, seed=0), Augmentation(crop=24)))
    return path


def make_command(program, data, *flags, batch_size=16):
    path = processes.script_path(f"peers/{program}")
    return [sys.executable, path, f"--data={data}", f"--batch_size={batch_size}", *flags]


def fake_peer(script, trained=7):
    return [sys.executable, "-c", f"print({trained}, flush=True); {script}"]


ANSWERS = "[print([0.5] * int(input()), flush=True) for _ in range({})]"


def test_all_peers_get_the_same_batches(data):
    with np.load(data) as file:
        images, labels, raw = file["images"], file["labels"], file["raw"]
    assert images.shape == (48, 24, 24, 3) and images.dtype == np.float32 and abs(images.mean()) < 1
    assert raw.shape == (48, 32, 32, 3) and raw.dtype == np.uint8 and labels.shape == (48,)


@pytest.mark.parametrize("peer", PEERS)
def test_peer_makes_the_requested_steps(data, peer):
    program, *flags = peer.split()
    trained = num_updated("cifarnet", crop=24)
    with framework_comparison.open_peer(make_command(program, data, *flags, *PEERS[peer]), trained) as time_steps:
        times = [time_steps(steps) for steps in (3, 1)]
    assert [len(seconds) for seconds in times] == [3, 1]
    assert all(0 < seconds < 60 for seconds in (*times[0], *times[1]))


@pytest.mark.slow
def test_peer_started_by_hand_prints_images_per_second(data):
    command = make_command("keras_fit.py", data, "--model=cifarnet", "--steps=3")
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and float(done.stdout.removesuffix(" images/s\n").replace(",", "")) > 1, done.stderr


HIDE_PYTORCH = (  # also where it is installed
    "import runpy, sys; sys.modules['torch'] = None; program = sys.argv.pop(1);"
    "sys.path.insert(0, program.rsplit('/', 1)[0]); runpy.run_path(program, run_name='__main__')"
)


@pytest.mark.parametrize(
    ("python", "program", "flags", "message"),
    [
        ([sys.executable], "keras_fit.py", ["--model=cifarnet"], "--batch_size=64 is more than the 48 images"),
        ([sys.executable], "tutorial_graph.py", ["--model=resnet20"], "the tutorial has one model in one precision"),
        ([sys.executable, "-c", HIDE_PYTORCH], "pytorch_step.py", [], "PyTorch is missing; type: pip install"),
        (["nowhere/python"], "pytorch_step.py", [], "nowhere/python cannot be started"),
        (fake_peer("", trained=797962), "", [], "^it trains 797,962 parameters where ours trains 7: another model$"),
        ([sys.executable, "-c", "exit(3)"], "", [], "its process has ended with exit code 3"),
    ],
)
def test_error_of_a_peer_is_one_line(data, python, program, flags, message):
    _, *arguments = make_command(program, data, *flags, batch_size=64) if program else [""]
    with pytest.raises(RunError, match=message), framework_comparison.open_peer([*python, *arguments], 7):
        pass


def test_peer_that_ends_between_rounds():
    command = fake_peer("input(); print([0.1], flush=True); raise SystemExit('out of memory')")
    with framework_comparison.open_peer(command, 7) as time_steps:
        assert time_steps(1) == [0.1]
        for _ in range(2):
            with pytest.raises(RunError, match="out of memory"):
                time_steps(1)


@pytest.fixture
def compare(tmp_path, monkeypatch):
    """compare(num_gpus, devices, peer_command, ..) with trainings of 100 images/s on every device."""

    def compare(num_gpus, devices, peer_command, **settings):
        monkeypatch.setattr(framework_comparison, "num_trained_parameters", lambda model: 7)
        monkeypatch.setattr(framework_comparison, "_peer_command", peer_command)
        monkeypatch.setattr(framework_comparison, "_training_rate", lambda recipe, *_: 100.0 * recipe.num_gpus)
        recipe = TrainConfig(model="cifarnet", batch_size=16, num_gpus=num_gpus, crop=24, shift=0)
        config = SpeedrunConfig(recipe=recipe, train_dir=str(tmp_path), **settings)
        return framework_comparison.compare_frameworks(
            config, ["float32"], Dataset("synthetic", TRAIN, TRAIN, TRAIN), devices
        )

    return compare


def test_failing_peer_leaves_the_others_measured(compare):
    """It answers the request from which its steps are planned, and that of the first round."""
    visits = {"keras": 2, "tutorial": 4}

    def peer_command(competitor, *_):
        return fake_peer(f"{ANSWERS.format(visits[competitor.name])}; raise SystemExit('full')")

    competitors, left_out = compare(2, 1, peer_command, rounds=3, peers="keras,tutorial")
    assert {each.name: len(each.images_per_sec) for each in competitors} == {"cifar_towers": 3, "tutorial": 3}
    assert left_out == {"keras, float32": "full"}


def test_ours_is_also_measured_on_one_of_several_devices(compare):
    """Keras without a strategy uses one; mirrored, it uses all."""
    competitors, _ = compare(4, 4, lambda *_: fake_peer(ANSWERS.format(2)), rounds=1, peers="keras,keras-mirrored")
    assert [(each.name, each.devices, each.median) for each in competitors] == [
        ("cifar_towers", 1, 100.0), ("cifar_towers", 4, 400.0), ("keras", 1, 32.0), ("keras-mirrored", 4, 32.0),
    ]  # fmt: skip


def test_ours_makes_the_step_with_frozen_whitening(tmp_path, monkeypatch):
    configs = []

    def run_training(config, quiet):
        configs.append(config)
        return {"images_per_sec": 5.0}

    monkeypatch.setattr(processes, "run_training", run_training)
    recipe = TrainConfig(dataset="synthetic", num_gpus=2)
    assert framework_comparison._training_rate(recipe, "bfloat16", tmp_path, 8) == 5.0
    (config,) = configs
    assert (config.whitening_epochs, config.max_steps, config.precision) == (0, 9, "bfloat16")
    assert config.run_length(100).last == 9
    framework_comparison._training_rate(recipe, "bfloat16", tmp_path, 2500)
    assert configs[-1].run_length(48).last == 2501  # also where that is more than the recipe has


def num_updated(model, **settings):
    """How many parameters a step of ours updates, in the comparison and in the middle of a recipe's run."""
    train = synthetic.make(200, seed=0, stream=0)
    numbers = set()
    for epochs in (0, 3):
        config = TrainConfig(
            model=model, batch_size=20, epochs=10, whitening_epochs=epochs, optimizer="momentum", **settings
        )
        length = config.run_length(10)
        optimizer = build.make_state(config, "float32", train, length)[0].optimizer
        step = length.last // 2 if epochs else 0
        active = optimizer.active_variables(optimizer.learning_rates(step))
        numbers.add(sum(variable.shape.num_elements() for variable in active))
    (number,) = numbers
    return number


@pytest.mark.parametrize("model", ["speednet94", "resnet20"])
def test_keras_trains_as_many_parameters_as_ours(model):
    net = MODELS[model](side=32)
    stock, ours = (sum(v.shape.num_elements() for v in each.trainable_variables) for each in (to_stock_model(net), net))
    assert num_trained_parameters(net) == stock == num_updated(model)
    assert ours - stock == (24 if model == "speednet94" else 0)  # the whitening's bias


def test_trained_parameters_of_a_user_model_are_counted():
    images = keras.Input([8, 8, 3])
    x = keras.layers.Conv2D(3, 1)(images)
    assert num_trained_parameters(keras.Model(images, x + images)) == 12


@pytest.mark.parametrize(("strategy", "steps"), [("towers", 1), (NO_EXCHANGE, 2)])
def test_benchmark_makes_the_step_with_frozen_whitening(towers, monkeypatch, strategy, steps):
    """The whitening is trained for the first of ten epochs."""
    rates = []
    make_training = build.make_training

    def record_rates(*arguments, **options):
        training = make_training(*arguments, **options)
        return training._replace(train_step=lambda batch, groups, size: rates.append({*groups}) or tf.constant(0.0))

    monkeypatch.setattr(build, "make_training", record_rates)
    recipe = TrainConfig(model="speednet93", batch_size=20, epochs=10, whitening_epochs=1, optimizer="momentum")
    case = BenchmarkCase(strategy, UNPLACED, 2, "float32")
    train = synthetic.make(200, seed=0, stream=0)
    list(prepare_case(BenchmarkConfig(recipe=recipe), case, towers(2), train).run_steps(1))
    assert rates == [{"kernels", "biases", "head"}] * steps

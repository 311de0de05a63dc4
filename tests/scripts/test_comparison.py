"""The comparison of frameworks: what is left out, ratios of rates, and the same parameters trained."""

import sys

import pytest

from cifar_towers.config import TrainConfig
from cifar_towers.data import synthetic
from cifar_towers.data.dataset import Dataset, Split
from cifar_towers.errors import RunError
from cifar_towers.models import MODELS
from cifar_towers.models.stock_layers import to_stock_model
from cifar_towers.training import build
from scripts.speedrun import comparison
from scripts.speedrun.settings import SpeedrunConfig

TRAIN = synthetic.make(64, seed=0, stream=0)


def fake_peer(script, trained=7):
    return [sys.executable, "-c", f"print({trained}, flush=True); {script}"]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["nowhere/python"], "nowhere/python"),
        (fake_peer("", trained=797962), "797,962 parameters .* 7"),
    ],
)
def test_error_of_a_peer_is_one_line(command, message):
    with pytest.raises(RunError, match=message), comparison.open_peer(command, 7):
        pass


@pytest.fixture
def compare(tmp_path, monkeypatch):
    """compare(num_gpus, devices, peer_command, ..) with trainings of 100 images/s on every device."""

    def compare(num_gpus, devices, peer_command, **settings):
        monkeypatch.setattr(comparison, "num_trained_parameters", lambda model: 7)
        monkeypatch.setattr(comparison, "_peer_command", peer_command)
        monkeypatch.setattr(comparison, "_training_rate", lambda recipe, *_: 100.0 * recipe.num_gpus)
        recipe = TrainConfig(model="cifarnet", batch_size=16, num_gpus=num_gpus, crop=24, shift=0)
        config = SpeedrunConfig(recipe=recipe, train_dir=str(tmp_path), **settings)
        return comparison.compare_frameworks(config, ["float32"], Dataset("synthetic", TRAIN, TRAIN, TRAIN), devices)

    return compare


ANSWERS = "[print([0.5] * int(input()), flush=True) for _ in range({})]"


def test_failing_peer_leaves_the_others_measured(compare):
    """Keras answers the request from which its steps are planned, and that of the first round."""
    visits = {"keras": 2, "tutorial": 4}

    def command(framework, *_):
        return fake_peer(f"{ANSWERS.format(visits[framework.name])}; raise SystemExit('full')")

    results, left_out = compare(2, 1, command, rounds=3, peers="keras,tutorial")
    assert {each.name: len(each.images_per_sec) for each in results} == {"cifar_towers": 3, "tutorial": 3}
    assert left_out == {"keras, float32": "full"}


@pytest.mark.parametrize("num_classes", [2, 100])
def test_peers_are_left_out_of_data_with_other_than_ten_classes(compare, monkeypatch, num_classes):
    names = tuple(map(str, range(num_classes)))
    train = Split(TRAIN.images, TRAIN.labels % 2, TRAIN.info._replace(class_names=names))
    monkeypatch.setattr(sys.modules[__name__], "TRAIN", train)
    results, left_out = compare(2, 1, lambda *_: fake_peer(ANSWERS.format(2)), rounds=1, peers="keras")
    assert [each.name for each in results] == ["cifar_towers"]
    assert left_out == {"keras, float32": f"it has 10 classes, and synthetic has {num_classes}"}


def test_ratios_are_of_equal_numbers_of_devices(compare, tmp_path, capsys):
    """Ours is measured on one device and on all four. Keras without a strategy uses one, and mirrored it uses all."""
    results, _ = compare(4, 4, lambda *_: fake_peer(ANSWERS.format(2)), rounds=1, peers="keras,keras-mirrored")
    rates = {(each.name, each.devices): each.median for each in results}
    assert rates == {
        ("cifar_towers", 1): 100, ("cifar_towers", 4): 400, ("keras", 1): 32, ("keras-mirrored", 4): 32,
    }  # fmt: skip
    metadata = {"recipe": "mine", "model": "speednet94", "batch_size": 16, "dataset": "cifar10", "processor": "Abacus"}
    metadata |= {"cores": 2, "date": "2026-01-01"}
    results.append(comparison.FrameworkRates(name="pytorch", precision="float32", images=16, devices=1))
    results[-1].images_per_sec = [155.0, 150.0, 200.0]
    comparison.publish(tmp_path, metadata, results, {"tutorial": "no net"})
    text = capsys.readouterr().out
    ratios = {
        tuple(line.split()[i] for i in (0, 2)): line.split()[-1] for line in text.splitlines() if " float32 " in line
    }
    assert ratios == {
        ("cifar_towers", "4"): "-", ("cifar_towers", "1"): "-", ("keras", "1"): "3.12",
        ("keras-mirrored", "4"): "12.50", ("pytorch", "1"): "0.65",
    }  # fmt: skip
    assert "243 steps of 1,536 at the 155 images/s of pytorch" in text and "2,408 s" in text and "no net" in text


def test_ours_on_one_device_has_no_shares_of_several(tmp_path):
    recipe = TrainConfig(batch_size=16, num_gpus=2, tower_shares="3,1")
    config = SpeedrunConfig(recipe=recipe, train_dir=str(tmp_path))
    recipes = [each.measure.args[0] for each in comparison._ours(config, 2, ["float32"])]
    assert [(recipe.num_gpus, recipe.tower_shares) for recipe in recipes] == [(1, ""), (2, "3,1")]


def test_ours_makes_the_step_with_frozen_whitening(tmp_path, monkeypatch):
    monkeypatch.setattr(comparison, "run_training", lambda config, quiet: {"images_per_sec": config})
    for steps, steps_per_epoch in ((8, 100), (2500, 48)):  # also if that is more than the recipe has
        config = comparison._training_rate(TrainConfig(dataset="synthetic"), "bfloat16", tmp_path, steps)
        assert (config.whitening_epochs, config.max_steps, config.precision) == (0, steps + 1, "bfloat16")
        assert config.run_length(steps_per_epoch).last == steps + 1


def num_updated(model):
    """Count the parameters that a step of ours updates, in the comparison and in the middle of a recipe's run."""
    train = synthetic.make(200, seed=0, stream=0)
    numbers = set()
    for epochs in (0, 3):
        config = TrainConfig(model=model, batch_size=20, epochs=10, whitening_epochs=epochs, optimizer="momentum")
        length = config.run_length(10)
        optimizer = build.make_state(config, "float32", train, length)[0].optimizer
        active = optimizer.active_variables(optimizer.learning_rates(length.last // 2 if epochs else 0))
        numbers.add(sum(variable.shape.num_elements() for variable in active))
    (number,) = numbers
    return number


@pytest.mark.parametrize("model", ["speednet94", "resnet20"])
def test_keras_trains_as_many_parameters_as_ours(model):
    net = MODELS[model](image_size=32)
    stock, ours = (sum(v.shape.num_elements() for v in each.trainable_variables) for each in (to_stock_model(net), net))
    assert comparison.num_trained_parameters(net) == stock == num_updated(model)
    assert ours - stock == (24 if model == "speednet94" else 0)  # the whitening's bias

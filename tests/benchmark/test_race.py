import dataclasses
import json

import pytest

from cifar_towers.benchmark import framework_comparison, peak_flops, processes
from cifar_towers.benchmark import race as speedrun
from cifar_towers.benchmark.race import Kind, Work
from cifar_towers.cli.flags import parse_command_line
from cifar_towers.cli.tool_configs import SpeedrunConfig
from cifar_towers.config import TrainConfig
from cifar_towers.data import sources, synthetic
from cifar_towers.errors import RunError, UsageError
from cifar_towers.files import run_files
from cifar_towers.training import build

TINY = {"dataset": "synthetic", "model": "cifarnet", "crop": 24, "shift": 0, "batch_size": 40, "precision": "float32"}
HERE = {"processor": "Abacus", "cores": 2, "gpus": ["A100"], "precision": "float32", "onednn": "1"}


def test_a_training_is_given_the_settings_it_should_have():
    config = SpeedrunConfig(
        **TINY, nesterov=True, soft_placement=False, recipe="mine", learning_rate=0.3
    ).replace_recipe(seeds="", seed=4, train_dir="runs/with spaces")
    command = processes.train_command(config)
    assert command[1].endswith("scripts/train.py")
    assert parse_command_line(TrainConfig, command[1:], "") == config


def test_the_work_of_a_run_is_that_of_its_steps():
    small, large = Kind(24, ("kernels",)), Kind(32, ("kernels",))
    operations = {small: {"Conv2D": 10, "MatMul": 1}, large: {"Conv2D": 20, "MatMul": 1}}
    work = Work({small: 3, large: 2}, operations)
    assert work.total() == 3 * 11 + 2 * 21 and work.total(less=1) == 2 * 11 + 21
    assert work.by_type() == {"Conv2D": 70, "MatMul": 5}


def test_work_is_counted_for_each_kind_of_step(towers):
    """Ten steps, 30 % of them on smaller images; the whitening is trained in the first two."""
    train = synthetic.make(80, seed=0, stream=0)
    config = SpeedrunConfig(
        model="speednet93", batch_size=8, epochs=1, image_size_schedule="0=20,30%=32", whitening_epochs=0.2
    )
    work = speedrun.count_work(config, towers(2), "float32", train)
    rest = ("kernels", "biases", "head")
    first, small, large = Kind(20, (*rest, "whitening")), Kind(20, rest), Kind(32, rest)
    assert work.steps == {first: 2, small: 1, large: 7}
    totals = {kind: sum(operations.values()) for kind, operations in work.operations.items()}
    assert 0.3 < totals[small] / totals[large] < (20 / 32) ** 2
    # the gradient to the images of the first convolution after the whitening: 19 x 19, 24 -> 64 channels
    assert totals[first] - totals[small] == 8 * 2 * 19 * 19 * 24 * 9 * 64


def test_the_work_of_picking_is_counted(towers):
    """Eight of sixteen: the net's work on eight and the proxy's on sixteen, though a step is one function."""
    train = synthetic.make(80, seed=0, stream=0)
    both = SpeedrunConfig(model="speednet93", batch_size=8, hard_example_pool=16, epochs=1, whitening_epochs=0)
    apart = both.replace_recipe(hard_example_pool=0), build.proxy_config(both)
    one, two, three = (speedrun.count_work(config, towers(1), "float32", train) for config in (both, *apart))
    assert one.steps == three.steps and sum(two.steps.values()) == 2 * sum(one.steps.values())
    assert one.total() == two.total() // 2 + three.total()


def test_a_net_whose_operations_cannot_be_counted(towers, tmp_path):
    (tmp_path / "loops.py").write_text(
        "import keras, tensorflow as tf\n"
        "class Loop(keras.layers.Dense):\n"
        "    def call(self, x):\n"
        "        turn = lambda x: [tf.matmul(x, tf.ones([10, 10]))]\n"
        "        return tf.while_loop(lambda x: x[0, 0] < 1, turn, [super().call(x)])[0]\n"
        "def net(side, num_classes):\n"
        "    return keras.Sequential([keras.Input((side, side, 3)), keras.layers.Flatten(), Loop(num_classes)])\n"
    )
    config = SpeedrunConfig(model=f"{tmp_path}/loops.py:net", optimizer="momentum", batch_size=8, epochs=1)
    with pytest.raises(UsageError, match=r"model=.*loops.py:net cannot be raced, .*how often the loop .*--seeds= runs"):
        speedrun.count_work(config, towers(1), "float32", synthetic.make(80, seed=0, stream=0))


def test_the_process_of_the_race_takes_a_gpus_memory_as_it_needs_it():
    assert SpeedrunConfig(**TINY, gpu_memory_growth=False).replace_recipe(**speedrun.ONE_TOWER).gpu_memory_growth


def test_a_run_of_other_settings_is_refused(tmp_path):
    config = SpeedrunConfig(**TINY, num_gpus=2).replace_recipe(seeds="", train_dir=str(tmp_path))
    run_files.write_json(
        tmp_path / "config.json", dataclasses.asdict(config) | {"num_gpus": 1, "data_dir": "elsewhere"}
    )
    with pytest.raises(UsageError, match=r"of other settings or another machine \(num_gpus 1 -> 2\); give those"):
        speedrun._check_settings(tmp_path, config, HERE)
    speedrun._check_settings(tmp_path, dataclasses.replace(config, num_gpus=1), HERE)
    speedrun._check_settings(tmp_path, dataclasses.replace(config, overwrite=True), HERE)


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"processor": "Difference Engine"}, "processor Difference Engine -> Abacus"),
        ({"cores": 64, "gpus": []}, r"cores 64 -> 2, gpus \[\] -> \['A100'\]"),
        ({"precision": "bfloat16"}, "precision bfloat16 -> float32"),
        ({"onednn": "0"}, "onednn 0 -> 1"),
    ],
)
def test_a_run_on_another_machine_is_refused(tmp_path, other, told):
    config = SpeedrunConfig(**TINY).replace_recipe(seeds="", train_dir=str(tmp_path))
    run_files.write_json(tmp_path / "config.json", dataclasses.asdict(config))
    same = HERE | {"git_revision": "another", "command": ["other"]}
    run_files.write_json(tmp_path / "environment.json", same)
    speedrun._check_settings(tmp_path, config, HERE)
    run_files.write_json(tmp_path / "environment.json", same | other)
    with pytest.raises(UsageError, match=rf"of other settings or another machine \({told}\); give those settings, "):
        speedrun._check_settings(tmp_path, config, HERE)
    speedrun._check_settings(tmp_path, dataclasses.replace(config, overwrite=True), HERE)


def test_a_training_that_fails_is_told_with_its_last_words(tmp_path, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    config = SpeedrunConfig(**TINY).replace_recipe(seeds="", train_dir=str(tmp_path))
    with pytest.raises(RunError, match="ended with 2 .*KERAS_BACKEND=jax is set"):
        processes.train(config, quiet=True)


@pytest.mark.slow
def test_a_race_from_start_to_standings(tmp_path, monkeypatch, capfd):
    """Two seeds of three steps and one round beside Keras; then the same again, which trains nothing."""
    monkeypatch.setattr(peak_flops, "CONVOLUTIONS", (((8, 8, 8, 32), (3, 3, 32, 64)),))
    monkeypatch.setattr(peak_flops, "SIDE", 256)
    monkeypatch.setattr(framework_comparison, "VISIT_SECONDS", 0.1)
    monkeypatch.setattr(framework_comparison, "LEAST_STEPS", 3)
    config = SpeedrunConfig(
        **TINY, num_gpus=2, max_steps=3, seeds="0,1", rounds=1, peers="keras,tutorial", target=0.01,
        train_dir=str(tmp_path), recipe="mine",
    )  # fmt: skip
    speedrun.run(config, sources.find("synthetic"))
    race, beside = (run_files.read_json(tmp_path / name) for name in ("race.json", "side_by_side.json"))
    assert [seed["reused"] for seed in race["seeds"]] == [False, False] and len(race["ceilings"]) == 4
    for seed in (0, 1):
        result = json.loads((tmp_path / f"seed{seed}" / "result.json").read_text())
        assert race["seeds"][seed]["accuracy"] == result["evaluations"][-1]["accuracy"] and result["step"] == 3
        assert race["seeds"][seed]["seconds"] == result["seconds"]
    assert 0 < race["seconds_to_target"] == pytest.approx(3 / 2 * race["training"]["mean"])
    assert 0 < race["fraction_of_ceiling"] < 1
    assert {row["name"]: len(row["images_per_sec"]) for row in beside["contestants"]} == {
        "cifar_towers": 1, "keras": 1, "tutorial": 1,
    }  # fmt: skip
    assert "ours/theirs" in (tmp_path / "side_by_side.txt").read_text()
    capfd.readouterr()

    speedrun.run(dataclasses.replace(config, rounds=0), sources.find("synthetic"))
    again = run_files.read_json(tmp_path / "race.json")
    assert run_files.read_json(tmp_path / "side_by_side.json") == beside
    assert [seed["reused"] for seed in again["seeds"]] == [True, True]
    assert again["ceilings"] == race["ceilings"] and again["training"] == race["training"]
    assert "is complete at step 3" in capfd.readouterr().out

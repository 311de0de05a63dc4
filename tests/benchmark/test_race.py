import dataclasses

import pytest

from cifar_towers import files
from cifar_towers.benchmark import framework_comparison, peak_flops, processes, race
from cifar_towers.benchmark.race import StepKind
from cifar_towers.benchmark.settings import SpeedrunConfig
from cifar_towers.cli.flags import parse_command_line
from cifar_towers.config import TrainConfig
from cifar_towers.data import sources, synthetic
from cifar_towers.errors import RunError, UsageError
from cifar_towers.training import build

TINY = {"dataset": "synthetic", "model": "cifarnet", "crop": 24, "shift": 0, "batch_size": 40, "precision": "float32"}
TRAIN = synthetic.make(80, seed=0, stream=0)
FACTS = {"processor": "Abacus", "cores": 2, "gpus": ["A100"], "precision": "float32", "onednn": "1"}


def test_command_of_a_training_has_its_settings_and_its_name(tmp_path):
    """The name is none of `configs/`; that of one of them would load its settings."""
    changed = {"nesterov": True, "soft_placement": False, "recipe": "mine", "learning_rate": 0.3}
    config = TrainConfig(**TINY, **changed, seed=4, train_dir=str(tmp_path / "with spaces"))
    command = processes.train_command(config)
    assert command[1].endswith("scripts/train.py")
    assert parse_command_line(TrainConfig, command[1:], "") == config
    config = dataclasses.replace(config, recipe="speed94")
    assert parse_command_line(TrainConfig, processes.train_command(config)[1:], "") == config


def test_race_process_allocates_gpu_memory_as_needed():
    assert race.ONE_TOWER["gpu_memory_growth"]


def test_work_is_counted_for_each_kind_of_step(towers):
    """Ten steps, 30 % of them on smaller images; the whitening is trained in the first two."""
    recipe = TrainConfig(
        model="speednet93", batch_size=8, epochs=1, image_size_schedule="0=20,30%=32", whitening_epochs=0.2
    )
    work = race.count_work(recipe, towers(2), "float32", TRAIN)
    others = ("kernels", "biases", "head")
    first, small, large = StepKind(20, (*others, "whitening")), StepKind(20, others), StepKind(32, others)
    assert {kind: steps for kind, (steps, _) in work.items()} == {first: 2, small: 1, large: 7}
    totals = {kind: sum(operations.values()) for kind, (_, operations) in work.items()}
    assert 0.3 < totals[small] / totals[large] < (20 / 32) ** 2
    # the gradient to the images of the first convolution after the whitening: 19 x 19, 24 -> 64 channels
    assert totals[first] - totals[small] == 8 * 2 * 19 * 19 * 24 * 9 * 64


def test_work_includes_selecting_hard_examples(towers):
    """Eight of sixteen: the model's work on eight and the proxy's on sixteen, though a step is one function."""
    both = TrainConfig(model="speednet93", batch_size=8, hard_example_pool=16, epochs=1, whitening_epochs=0)
    configs = both, dataclasses.replace(both, hard_example_pool=0), build.proxy_config(both)
    works = [race.count_work(config, towers(1), "float32", TRAIN).items() for config in configs]
    ((kind, both),), ((_, model),), ((proxy_kind, proxy),) = works
    assert (kind, both.steps) == (proxy_kind, proxy.steps) and model.steps == 2 * both.steps
    assert sum(both.operations.values()) == sum(model.operations.values()) + sum(proxy.operations.values())


def test_uncountable_model_is_a_usage_error(towers, tmp_path):
    (tmp_path / "loops.py").write_text(
        "import keras, tensorflow as tf\n"
        "class Loop(keras.layers.Dense):\n"
        "    def call(self, x):\n"
        "        turn = lambda x: [tf.matmul(x, tf.ones([10, 10]))]\n"
        "        return tf.while_loop(lambda x: x[0, 0] < 1, turn, [super().call(x)], maximum_iterations=3)[0]\n"
        "def net(side, num_classes):\n"
        "    return keras.Sequential([keras.Input((side, side, 3)), keras.layers.Flatten(), Loop(num_classes)])\n"
    )
    recipe = TrainConfig(model=f"{tmp_path}/loops.py:net", optimizer="momentum", batch_size=8, epochs=1)
    with pytest.raises(UsageError, match=r"model=.*loops.py:net cannot be raced, .*of the loop .*--seeds= runs"):
        race.count_work(recipe, towers(1), "float32", TRAIN)


@pytest.mark.parametrize(
    ("settings", "machine", "message"),
    [
        ({"num_gpus": 1, "data_dir": "elsewhere"}, {}, "num_gpus 1 -> 2"),
        ({}, {"processor": "Difference Engine"}, "processor Difference Engine -> Abacus"),
        ({}, {"cores": 64, "gpus": []}, r"cores 64 -> 2, gpus \[\] -> \['A100'\]"),
        ({}, {"precision": "bfloat16"}, "precision bfloat16 -> float32"),
        ({}, {"onednn": "0"}, "onednn 0 -> 1"),
    ],
)
def test_earlier_run_under_other_conditions_is_refused(tmp_path, settings, machine, message):
    recipe = TrainConfig(**TINY, num_gpus=2, train_dir=str(tmp_path))
    environment = FACTS | {"git_revision": "another", "command": ["other"]}
    files.write_json(tmp_path / "config.json", dataclasses.asdict(recipe) | {"data_dir": "elsewhere"})
    files.write_json(tmp_path / "environment.json", environment)
    race._check_same_conditions(tmp_path, recipe, FACTS)
    files.write_json(tmp_path / "config.json", dataclasses.asdict(recipe) | settings)
    files.write_json(tmp_path / "environment.json", environment | machine)
    with pytest.raises(UsageError, match=rf"has other settings or another machine \({message}\); give those set"):
        race._check_same_conditions(tmp_path, recipe, FACTS)
    race._check_same_conditions(tmp_path, dataclasses.replace(recipe, overwrite=True), FACTS)


def test_error_of_a_failed_training_has_its_last_line(tmp_path, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    with pytest.raises(RunError, match="ended with exit code 2 .*KERAS_BACKEND=jax is set"):
        processes.run_training(TrainConfig(**TINY, train_dir=str(tmp_path)), quiet=True)


@pytest.mark.slow
def test_race_writes_results_and_reuses_trained_seeds(tmp_path, monkeypatch, capfd):
    """Two seeds of three steps and one round beside Keras; then the same again, which trains nothing."""
    monkeypatch.setattr(peak_flops, "CONVOLUTIONS", (((8, 8, 8, 32), (3, 3, 32, 64)),))
    monkeypatch.setattr(peak_flops, "MATRIX_SIZE", 256)
    monkeypatch.setattr(framework_comparison, "VISIT_SECONDS", 0.1)
    monkeypatch.setattr(framework_comparison, "MIN_TIMED_STEPS", 3)
    config = SpeedrunConfig(
        recipe=TrainConfig(**TINY, num_gpus=2, max_steps=3, recipe="mine"),
        seeds="0,1", rounds=1, peers="keras,tutorial", target=0.01, train_dir=str(tmp_path),
    )  # fmt: skip
    race.run_race(config, sources.find("synthetic"))
    first, comparison = (files.read_json(tmp_path / name) for name in ("race.json", "side_by_side.json"))
    assert [seed["reused"] for seed in first["seeds"]] == [False, False] and len(first["ceilings"]) == 4
    for seed in (0, 1):
        result = files.read_json(tmp_path / f"seed{seed}" / "result.json")
        assert first["seeds"][seed]["accuracy"] == result["evaluations"][-1]["accuracy"] and result["step"] == 3
        assert first["seeds"][seed]["seconds"] == result["seconds"]
    assert 0 < first["seconds_to_target"] == pytest.approx(3 / 2 * first["training"]["mean"])
    rate = first["work"] * 2 / 3 / first["training"]["mean"]  # may exceed that of a small convolution
    assert first["fraction_of_ceiling"] == pytest.approx(rate / first["ceiling"] / 1e9) and first["ceiling"] > 0
    assert {row["name"]: len(row["images_per_sec"]) for row in comparison["contestants"]} == {
        "cifar_towers": 1, "keras": 1, "tutorial": 1,
    }  # fmt: skip
    assert "ours/theirs" in (tmp_path / "side_by_side.txt").read_text()
    capfd.readouterr()

    race.run_race(dataclasses.replace(config, rounds=0), sources.find("synthetic"))
    again = files.read_json(tmp_path / "race.json")
    assert files.read_json(tmp_path / "side_by_side.json") == comparison
    assert [seed["reused"] for seed in again["seeds"]] == [True, True]
    assert again["ceilings"] == first["ceilings"] and again["training"] == first["training"]
    assert "is complete at step 3" in capfd.readouterr().out

import dataclasses
import os
import re
from pathlib import Path

import pytest

from cifar_towers.config import TrainConfig, flags
from cifar_towers.config.flags import make_config, parse_command_line
from cifar_towers.config.programs import EvaluateConfig, ExportConfig
from cifar_towers.config.train_config import (
    PER_RUN,
    AugmentationSettings,
    DataSettings,
    ModelSettings,
    OptimizerSettings,
    recipe_fields,
    shared_settings,
)
from cifar_towers.errors import UsageError
from cifar_towers.runs.directory import describe_differences

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.cfg"))


def parse(*arguments, config_class=TrainConfig):
    return parse_command_line(config_class, arguments)


REFUSALS = {  # what a program's message must mention
    TrainConfig: [
        (["stray"], "'stray'"),
        (["--batch_sise=8"], "batch_size ?"),
        (["--batch_size=0"], "batch_size=0"),
        (["--target_accuracy=94"], "target_accuracy=94"),
        (["--learning_rate=nan"], "learning_rate=nan"),
        (["--model=vgg"], "model=vgg"),
        (["--strategy=magic"], "strategy=magic"),
        (["--recipe=nonsense"], "recipe=nonsense"),
        (["--dataset=folder"], "dataset=folder is"),
        (["--flagfile=nowhere.cfg"], "nowhere.cfg"),
        (["--seeds=1,x"], "seeds=1,x"),
        (["--seeds=1,1"], "seeds=1,1"),
        (["--profile_steps=9:9"], "'9:9'"),
        (["--learning_rate_schedule=0=1"], "learning_rate_schedule=0=1"),
        (
            ["--batch_size=100", "--num_gpus=8"],
            "batch_size=100 cannot be divided evenly by 8 towers; 96 and 104",
        ),
        (["--batch_size=3", "--num_gpus=8"], "8 towers; 8 can"),
        (["--batch_size=100", "--num_gpus=2", "--micro_batches=3"], "96 and 102"),
        (["--batch_size=98", "--micro_batches=4"], "1 tower in 4 micro-batches each; 96 and 100"),
        # combinations that would silently train something else
        (["--image_size_schedule=0=8"], "image_size_schedule=0=8"),
        (["--recipe=speed94", "--image_size=64"], "image_size=64"),
        (["--image_size_schedule=0=nan"], "'0=nan'"),
        (["--recipe=", "--crop=40"], "crop=40"),
        (["--recipe=", "--crop=24", "--cutout=24"], "cutout=24 blanks"),
        (["--crop=24", "--image_size_schedule=0=24,1=32"], "image_size_schedule"),
        (["--target_accuracy=0.9", "--eval_every_epochs=0"], "eval_every_epochs"),
        (["--jit_compile", "--batch_statistics=synchronized"], "jit_compile"),
        (["--jit_compile", "--variable_placement=cpu"], "variable_placement"),
        (["--seed=1", "--seeds=2,3"], "seeds=2,3"),
        (["--strategy=multi_worker", "--seeds=0,1"], "strategy=multi_worker"),
        (["--overwrite", "--seeds=2,3"], "seeds=2,3"),
        (["--epochs=0"], "epochs=0.0 is too small"),
        (["--loss=tests.helpers.nets:loss", "--label_smoothing=0.2"], "label_smoothing=0"),
        (["--batch_statistics=synchronized", "--micro_batches=2"], "micro_batches"),
        (
            ["--strategy=mirrored", "--variable_placement=round_robin"],
            "variable_placement=round_robin",
        ),
    ],
    EvaluateConfig: [
        ([], "--train_dir"),
        (["--train_dir=runs/one", "--model=mynets.py"], "model=mynets.py"),
        (["--train_dir=runs/one", "--log_device_placement"], "log_device_placement"),
    ],
    ExportConfig: [(["--train_dir=x", "--format=tensorrt"], "format=tensorrt")],
}
REFUSED = []
for program, cases in REFUSALS.items():
    REFUSED += [(program, arguments, mention) for arguments, mention in cases]


@pytest.mark.parametrize(("config_class", "arguments", "mention"), REFUSED)
def test_refused_flags_are_named_in_one_line(config_class, arguments, mention):
    with pytest.raises(UsageError) as caught:
        parse(*arguments, config_class=config_class)
    assert mention in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"lr": 1}, TypeError, "'lr'"),
        ({"lookahead": "perhaps"}, UsageError, "lookahead=perhaps"),
        ({"num_gpus": 2.0}, UsageError, "num_gpus=2.0"),
        ({"seed": True}, UsageError, "seed=True"),
        ({"recipe": "sped94"}, UsageError, "recipe=sped94"),
        ({"loss": "nowhere.py:f", "label_smoothing": 0.0}, UsageError, "/nowhere.py"),
    ],
)
def test_settings_from_python_are_checked(settings, error, message):
    with pytest.raises(error, match=message):
        make_config(TrainConfig, settings)


def test_settings_from_python_are_those_of_the_command_line(tmp_path):
    config = make_config(
        TrainConfig, {"recipe": "smoke", "epochs": 3, "train_dir": tmp_path, "seed": None}
    )
    assert config == parse("--recipe=smoke", "--epochs=3", f"--train_dir={tmp_path}")
    assert make_config(TrainConfig, {"recipe": "speed95", "lookahead": "False"}).lookahead is False


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("--nesterov=false", "nesterov", False),
        ("--nosoft_placement", "soft_placement", False),
        ("--nesterov", "nesterov", True),
        ("--epochs=3", "epochs", 3.0),
    ],
)
def test_recipes_are_read_as_flagfiles_are(tmp_path, monkeypatch, line, name, value):
    recipe = tmp_path / "mine.cfg"
    recipe.write_text(f"# a recipe\n{line}\n")
    monkeypatch.setattr(flags, "RECIPES", tmp_path)
    for config in (parse("--recipe=mine"), make_config(TrainConfig, {"recipe": "mine"})):
        assert (getattr(config, name), config.recipe) == (value, "mine")


def test_help_lists_settings_by_section():
    text = flags.help_text(TrainConfig, "", is_full=True)
    titles = re.findall(r"^(\w+):$", text, re.M)
    assert titles == ["Data", "Model", "Optimizer", "Reporting", "Run", "Towers"]
    assert "--cutout" in text.partition("\nModel:")[0]  # one title for data and augmentation


def test_short_help_has_what_the_program_is_used_with():
    evaluation = flags.help_text(EvaluateConfig, "", is_full=False)
    for flag in ("--[no]tta", "--data_dir", "--dataset", "--precision", "--num_gpus"):
        assert flag in evaluation

    assert "cluster" not in evaluation
    assert "--[no]deterministic" not in evaluation

    training = flags.help_text(TrainConfig, "", is_full=False)
    shown = re.search(r"--batch_size:.*?default: '(\d+)'", training, re.S)[1]
    assert int(shown) == parse("--recipe=speed94").batch_size
    assert "--data_dir" not in training
    assert "in a cluster, per worker" in " ".join(training.split())


def test_flagfile_may_be_a_pipe():
    """A shell's <(...) can be read only once."""
    reader, writer = os.pipe()
    os.write(writer, b"--batch_size=96\n")
    os.close(writer)
    assert parse(f"--flagfile=/dev/fd/{reader}").batch_size == 96
    os.close(reader)


def test_later_flags_and_flagfiles_override_earlier_ones(tmp_path):
    mine = tmp_path / "mine.cfg"
    mine.write_text("# settings\n--batch_size=96\n--seed=4\n")
    config = parse("--seed=1", f"--flagfile={mine}", "--batch_size=48", "--nosoft_placement")

    assert (config.batch_size, config.seed, config.soft_placement) == (48, 4, False)

    mine.write_text("--model=cifarnet\n--epochs=3\n")
    assert parse("--flagfile", str(mine)) == TrainConfig(model="cifarnet", epochs=3.0)

    mine.write_text("--recipe=smoke\n--epochs=3\n")
    assert parse("--flagfile", str(mine)) == parse("--recipe=smoke", "--epochs=3")


def test_flags_override_the_recipe_wherever_they_stand(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expected = parse(f"--flagfile={ROOT / 'configs' / 'smoke.cfg'}", "--epochs=3", "--nonesterov")
    expected = dataclasses.replace(expected, recipe="smoke")
    assert expected.learning_rate == 1.5
    assert parse("--epochs=3", "--recipe=smoke", "--nonesterov") == expected
    assert parse("--epochs=3", "--nonesterov", "--recipe=speed94", "--recipe", "smoke") == expected


def test_recipe_is_speed94_unless_a_recipe_or_a_model_is_given():
    expected = parse("--recipe=speed94", "--num_gpus=2")
    assert (expected.optimizer, expected.recipe, expected.name) == ("muon", "speed94", "speed94")
    assert parse("--num_gpus=2") == expected
    assert parse("--model=speednet94") == parse("--recipe=") == TrainConfig()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_recipe_parses_and_states_its_command_and_claim(path):
    config = parse(f"--recipe={path.stem}")
    # read as a flagfile is
    assert dataclasses.replace(config, recipe="") == parse(f"--flagfile={path}")
    assert config.name == path.stem
    header = re.match(r"(#.*\n)+", path.read_text()).group()
    assert f"--recipe={path.stem}" in header
    assert re.search(r"not yet measured|n=\d+|seed", header)


def test_epochs_are_the_length_which_max_steps_only_cuts_short():
    assert TrainConfig(epochs=2).run_length(10) == (10, 20, 20)
    assert TrainConfig(epochs=2, max_steps=5).run_length(10) == (10, 20, 5)
    assert TrainConfig(epochs=2, max_steps=50).run_length(10) == (10, 20, 20)
    assert "max_steps" not in recipe_fields(TrainConfig())


def test_cifarnet_trains_100_000_steps_as_the_tutorial_does():
    config = parse("--recipe=cifarnet")
    assert config.run_length(50_000 // config.batch_size).last == 100_000


@pytest.mark.parametrize(
    ("settings", "devices", "towers"),
    [
        ({"batch_size": 1024}, 7, 4),
        ({"batch_size": 1024}, 8, 8),
        ({"batch_size": 1000}, 7, 5),
        ({"batch_size": 1002, "micro_batches": 2}, 2, 1),
    ],
)
def test_default_number_of_towers_divides_the_batch(settings, devices, towers):
    assert TrainConfig(**settings).default_num_towers(devices) == towers


def test_home_directory_is_expanded_as_a_shell_does_not_after_an_equals_sign(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    config = parse("--train_dir=~/runs/one", "--init_from=~/runs/other")
    assert config.directory == tmp_path / "runs/one"
    assert config.init_from == f"{tmp_path}/runs/other"


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"recipe": "speed94", "seed": 11}, "speed94-seed11"),
        ({"dataset": "folder:/data/photos/"}, "speednet94-photos-seed0"),
        ({"dataset": "folder:."}, "speednet94-new-seed0"),
        ({"dataset": "csv:photos/labels.csv"}, "speednet94-labels-csv-seed0"),
        ({"init_from": "runs/one"}, "speednet94-from-one-seed0"),
    ],
)
def test_default_directory_names_recipe_data_and_seed(tmp_path, monkeypatch, settings, name):
    (tmp_path / "new").mkdir()
    monkeypatch.chdir(tmp_path / "new")
    assert TrainConfig(**settings).directory == Path("runs") / name


def names_in(section):
    return {field.name for field in dataclasses.fields(section)}


def test_settings_of_the_recipe_may_not_differ_on_resume():
    saved = recipe_fields(TrainConfig())
    changed = TrainConfig(micro_batches=2, momentum=0.5, num_gpus=2, strategy="mirrored", tta=True)

    assert describe_differences(saved, recipe_fields(changed)) == [
        "micro_batches 1 -> 2",
        "momentum 0.9 -> 0.5",
    ]
    assert describe_differences(saved, recipe_fields(TrainConfig())) == []
    assert {"seed", "epochs"} | names_in(OptimizerSettings) <= saved.keys()

    of_data = names_in(DataSettings) | names_in(AugmentationSettings)

    # the data's digests are compared
    assert (of_data | names_in(ModelSettings)) - saved.keys() == {"dataset", "data_dir"}
    # runs that are averaged differ in the seed
    assert saved.keys() & set(PER_RUN) == {"seed"}


def test_workers_share_the_recipe_but_not_their_own_paths():
    shared = shared_settings(TrainConfig(train_dir="here", seed=3))
    assert shared["seed"] == 3
    assert shared.keys() >= recipe_fields(TrainConfig()).keys()
    assert not shared.keys() & {"train_dir", "data_dir"}

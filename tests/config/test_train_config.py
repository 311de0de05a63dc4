import dataclasses
import re
from pathlib import Path

import pytest

from cifar_towers.checkpointing.run_directory import describe_differences
from cifar_towers.cli.main import flag_settings, parse_command_line
from cifar_towers.config import TrainConfig
from cifar_towers.config.programs import BenchmarkConfig, CompareConfig, EvaluateConfig, ExportConfig, ReportConfig
from cifar_towers.config.train_config import make_config, names_with, recipe_fields, shared_settings
from cifar_towers.errors import UsageError

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.cfg"))


def parse(*arguments, config_class=TrainConfig):
    return parse_command_line(config_class, arguments)


USAGE_ERRORS = {
    TrainConfig: [
        (["stray"], "'stray' is not a flag; settings are given as --name=value"),
        (["--batch_sise=8"], "Did you mean: batch_size ?"),
        (["--batch_size=many"], "--batch_size=many"),
        (["--batch_size"], "Missing value for flag --batch_size"),
        (["--batch_size=0"], "batch_size=0 is too small; the minimum is 1"),
        (["--momentum=1.5"], "momentum=1.5 is too large; the maximum is 0.9999"),
        (["--learning_rate=nan"], "learning_rate=nan is not a finite number"),
        (["--model=vgg"], "model=vgg is not one of cifarnet, resnet20"),
        (["--strategy=magic"], "strategy=magic is not one of towers, mirrored"),
        (["--batch_size=100", "--num_gpus=8"], "batch_size=100 cannot be shared by 8 towers; 96 and 104 can"),
        (["--batch_size=3", "--num_gpus=8"], "batch_size=3 cannot be shared by 8 towers; 8 can"),
        (["--batch_size=100", "--num_gpus=2", "--micro_batches=3"], " in 3 micro-batches each; 96 and 102 can"),
        (["--flagfile=nowhere.cfg"], "Unable to open flagfile"),
        (["--recipe=nonsense"], "recipe=nonsense is not one of cifarnet, resnet20, "),
        (["--seeds=1,x"], "seeds=1,x is not a list of different whole numbers"),
        (["--seeds=1,1"], "seeds=1,1 is not a list of different whole numbers"),
        (["--profile_steps=9:9"], "profile_steps='9:9' is not a first and a later last step"),
        (["--learning_rate_schedule=0=1"], "must begin with linear: or step:"),
        # combinations that would silently train something else
        (["--image_size_schedule=0=8"], "image_size_schedule=0=8: sizes are whole numbers from 18 to image_size=32"),
        (["--recipe=speed94", "--image_size=64"], "to image_size=64, which is the last"),
        (["--image_size_schedule=0=nan"], "image_size_schedule: '0=nan' is not a list of place=value, none negative"),
        (["--recipe=", "--crop=40"], "crop=40 is larger than image_size=32"),
        (["--crop=24", "--image_size_schedule=0=24,1=32"], "both set the image size"),
        (["--dataset=folder"], "dataset=folder is not cifar10, synthetic, auto, folder:<folder>, csv:<table>"),
        (["--dataset=csv:"], "npz:<file> or the name of a TensorFlow Datasets builder, e.g. svhn_cropped"),
        (["--target_accuracy=0.9", "--eval_every_epochs=0"], "checked at evaluations"),
        (["--seed=1", "--seeds=2,3"], "are both given"),
        (["--epochs=0"], "leave nothing to do"),
        (
            ["--loss=tests.nets:loss", "--label_smoothing=0.2"],
            "replaces the loss that smooths labels; give --label",
        ),
        (["--target_accuracy=94"], "target_accuracy=94.0 is too large; the maximum is 1"),
        (["--strategy=multi_worker", "--seeds=0,1"], "strategy=multi_worker trains one run; give one seed at a time"),
        (["--worker_index=1"], "settings of a cluster need --strategy=multi_worker"),
        (["--batch_statistics=synchronized", "--micro_batches=2"], "needs the whole batch at once"),
        (["--batch_statistics=synchronized", "--strategy=stages"], "needs the whole batch at once"),
        (["--strategy=mirrored", "--variable_placement=round_robin"], "is for strategy=towers"),
        (["--strategy=stages", "--hard_example_pool=4096"], "is for strategy=towers"),
    ],
    BenchmarkConfig: [
        (["--towers=1,two"], "towers=1,two is not a list of different whole numbers"),
        (["--batch_size=1536", "--towers=1,5"], "batch_size=1536 cannot be shared by 5 towers; 1535 and 1540 can"),
        (["--num_gpus=2"], "Unknown command line flag 'num_gpus'"),
    ],
    EvaluateConfig: [
        ([], "which run"),
        (["--train_dir=runs/one", "--model=mynets.py"], "model=mynets.py is not one of cifarnet, "),
        (["--train_dir=runs/one", "--log_device_placement"], "Unknown command line flag 'log_device_placement'"),
    ],
    ExportConfig: [
        (["--train_dir=x", "--format=tensorrt"], "format=tensorrt is not one of saved_model, keras"),
    ],
    CompareConfig: [(runs, "which two runs") for runs in ([], ["one"], ["one", "other", "third"])],
}


@pytest.mark.parametrize(
    ("config_class", "arguments", "message"),
    [(config_class, *case) for config_class, cases in USAGE_ERRORS.items() for case in cases],
)
def test_usage_error_is_one_line_with_exit_code_2(config_class, arguments, message):
    with pytest.raises(UsageError) as caught:
        parse(*arguments, config_class=config_class)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_benchmark_takes_its_recipe_from_the_flags():
    flagfile = f"--flagfile={ROOT / 'configs' / 'speed94.cfg'}"
    config = parse(flagfile, "--recipe=speed94", "--towers=1,2", config_class=BenchmarkConfig)
    assert config.tower_counts == (1, 2) and str(config.directory) == "runs/benchmark-speed94"
    assert config.recipe == parse("--recipe=speed94")
    assert parse(flagfile, config_class=BenchmarkConfig).recipe == parse(flagfile)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"lr": 1}, TypeError, "unexpected keyword argument 'lr'"),
        ({"lookahead": "False"}, UsageError, "lookahead='False' is not of the type bool"),
        ({"num_gpus": 2.0}, UsageError, "num_gpus=2.0 is not of the type int"),
        ({"seed": True}, UsageError, "seed=True is not of the type int"),
        ({"recipe": "sped94"}, UsageError, "recipe=sped94 is not one of cifarnet, "),
        ({"loss": "nowhere.py:f", "label_smoothing": 0.0}, UsageError, "there is no file"),
    ],
)
def test_settings_from_python_are_checked(settings, error, message):
    with pytest.raises(error, match=message):
        make_config(TrainConfig, settings)


def test_settings_from_python_are_those_of_the_command_line(tmp_path):
    config = make_config(TrainConfig, {"recipe": "speed93", "epochs": 3, "train_dir": tmp_path, "seed": None})
    assert config == parse("--recipe=speed93", "--epochs=3", f"--train_dir={tmp_path}")


def test_later_flags_and_flagfiles_override_earlier_ones(tmp_path):
    mine = tmp_path / "mine.cfg"
    mine.write_text("# settings\n--batch_size=96\n--seed=4\n")
    config = parse("--seed=1", f"--flagfile={mine}", "--batch_size=48", "--nosoft_placement")
    assert (config.batch_size, config.seed, config.soft_placement) == (48, 4, False)
    assert config.name == "speed94" and str(config.directory) == "runs/speed94-seed4"
    mine.write_text("--model=cifarnet\n--epochs=3\n")
    assert parse("--flagfile", str(mine)) == TrainConfig(model="cifarnet", epochs=3.0)
    mine.write_text("--recipe=smoke\n--epochs=3\n")
    assert parse("--flagfile", str(mine)) == parse("--recipe=smoke", "--epochs=3")
    assert str(parse("--train_dir=here").directory) == "here"


def test_recipe_is_loaded_and_flags_override_it_wherever_they_stand(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expected = parse(f"--flagfile={ROOT / 'configs' / 'speed93.cfg'}", "--epochs=3", "--nolookahead")
    expected = dataclasses.replace(expected, recipe="speed93")
    assert expected.whitening_epochs == 3 and expected.learning_rate == 1.5
    assert parse("--epochs=3", "--recipe=speed93", "--nolookahead") == expected
    assert parse("--recipe", "speed93", "--nolookahead", "--epochs=3") == expected
    assert parse("--epochs=3", "--nolookahead", "--recipe=smoke", "--recipe=speed93") == expected
    assert str(parse("--recipe=speed93", "--seed=11").directory) == "runs/speed93-seed11"


def test_recipe_is_speed94_unless_a_recipe_or_a_model_is_given():
    expected = parse("--recipe=speed94", "--num_gpus=2")
    assert (expected.optimizer, expected.recipe) == ("muon", "speed94")
    assert parse("--num_gpus=2") == expected
    assert parse(config_class=BenchmarkConfig).recipe == dataclasses.replace(expected, num_gpus=0)
    assert parse("--model=speednet94") == parse("--recipe=") == TrainConfig()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_recipe_parses_and_states_its_command_and_claim(path):
    config = parse(f"--recipe={path.stem}")
    assert dataclasses.replace(config, recipe="") == parse(f"--flagfile={path}")  # read as a flagfile is
    assert config.name == path.stem
    header = re.match(r"(#.*\n)+", path.read_text()).group()
    assert f"--recipe={path.stem}" in header
    assert re.search(r"not yet measured|n=\d+|seed", header)


@pytest.mark.parametrize("config_class", [TrainConfig, BenchmarkConfig, EvaluateConfig, ReportConfig])
def test_help_has_a_programs_own_flags_and_helpfull_all(capsys, config_class):
    text = []
    for flag in ("--help", "--helpfull"):
        with pytest.raises(SystemExit, match="^0$"):
            parse(flag, config_class=config_class)
        text.append(capsys.readouterr().out)
    short, full = ({*re.findall(r"^  --(?:\[no\])?(\w+)", page, re.M)} for page in text)
    own = {field.name for field in flag_settings(config_class)}
    assert full == own
    assert own - {field.name for field in dataclasses.fields(TrainConfig)} <= short <= full
    assert all(len(line) <= 100 for line in text[1].splitlines() if not line.startswith("Recipes"))
    if config_class is TrainConfig:
        assert len(short) == 11 and f"{len(own) - 11} more flags" in text[0]


@pytest.mark.parametrize("flag", [["--out=page.html"], ["--out", "page.html"]])
def test_flags_may_precede_or_follow_the_runs(flag):
    runs = ["runs/one", "runs/other"]
    for arguments in ([*flag, *runs], [*runs, *flag]):
        assert parse(*arguments, config_class=ReportConfig) == ReportConfig("page.html", tuple(runs))
    assert parse("one", "one", config_class=CompareConfig).runs == ("one", "one")


def test_max_steps_belongs_to_the_recipe_where_schedules_depend_on_it():
    by_length = TrainConfig(epochs=0, max_steps=100)
    by_epochs = dataclasses.replace(by_length, learning_rate_schedule="step:350=0.1")
    assert "max_steps" in recipe_fields(by_length)
    assert "max_steps" in recipe_fields(dataclasses.replace(by_epochs, lookahead=True))
    assert "max_steps" not in recipe_fields(by_epochs)
    assert "max_steps" not in recipe_fields(TrainConfig(epochs=8, max_steps=100))


def test_default_number_of_towers_divides_the_batch():
    why = "batch_size=1024 cannot be shared by 7 towers; 1022 and 1029 can"
    assert TrainConfig(batch_size=1024).default_num_towers(7) == (4, why)
    assert TrainConfig(batch_size=1024).default_num_towers(8) == (8, "")
    assert TrainConfig(batch_size=1000, hard_example_pool=1500).default_num_towers(8)[0] == 5
    assert TrainConfig(batch_size=1001, micro_batches=2).default_num_towers(2) == (2, "")  # no number divides it
    assert TrainConfig(batch_size=1024, strategy="stages").default_num_towers(7) == (7, "")
    with pytest.raises(UsageError, match=f"{why}$"):
        TrainConfig(batch_size=1024, num_gpus=7)


def test_home_directory_is_expanded_as_a_shell_does_not_after_an_equals_sign(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    config = parse("--train_dir=~/runs/one", "--init_from=~/runs/other")
    assert config.directory == tmp_path / "runs/one" and config.init_from == f"{tmp_path}/runs/other"
    export = parse("--train_dir=~/one", "--out=~/net", config_class=ExportConfig)
    assert (export.train_dir, export.out) == (f"{tmp_path}/one", f"{tmp_path}/net")


def test_default_directory_names_the_image_folder(tmp_path, monkeypatch):
    (tmp_path / "photos" / "new").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "photos" / "new")
    for dataset in ("folder:photos", "folder:/data/photos/", "folder:.."):
        assert TrainConfig(dataset=dataset).directory == Path("runs/speednet94-photos-seed0")
    assert TrainConfig(dataset="folder:.").directory == Path("runs/speednet94-new-seed0")
    assert TrainConfig(dataset="csv:photos/labels.csv").directory == Path("runs/speednet94-labels-csv-seed0")
    assert TrainConfig(dataset="npz:photos.npz").directory == Path("runs/speednet94-photos-npz-seed0")
    assert TrainConfig(dataset="svhn_cropped").directory == Path("runs/speednet94-svhn_cropped-seed0")


def test_settings_of_the_recipe_may_not_differ_on_resume():
    saved = recipe_fields(TrainConfig())
    changed = TrainConfig(micro_batches=2, momentum=0.5, num_gpus=2, strategy="mirrored", tta=2)
    assert describe_differences(saved, recipe_fields(changed)) == ["micro_batches 1 -> 2", "momentum 0.9 -> 0.5"]
    assert describe_differences(saved, recipe_fields(TrainConfig())) == []


def test_settings_of_data_model_and_optimizer_belong_to_the_recipe():
    recipe = set(names_with(TrainConfig, on_resume="refuse"))
    assert {"seed", "epochs"} | set(names_with(TrainConfig, group="Optimizer")) <= recipe
    for group in ("Data", "Model"):
        assert set(names_with(TrainConfig, group=group)) - recipe <= {"dataset", "data_dir"}


def test_workers_share_the_recipe_but_not_their_own_paths_and_addresses():
    shared = shared_settings(TrainConfig(train_dir="here", seed=3))
    assert shared["seed"] == 3 and shared.keys() >= set(names_with(TrainConfig, on_resume="refuse"))
    assert not shared.keys() & {"train_dir", "data_dir", "workers", "worker_index"}


def test_repetitions_of_an_experiment_differ_in_seed_and_reporting_only():
    per_run = set(names_with(TrainConfig, per_run=True))
    assert {"seed", "train_dir", "keep_checkpoints"} <= per_run
    assert not per_run & set(names_with(TrainConfig, group="Optimizer"))

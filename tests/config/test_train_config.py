import contextlib
import dataclasses
import re
from pathlib import Path

import pytest

from cifar_towers.cli.flags import flag_settings, help_text, parse_command_line, short_help
from cifar_towers.config import TrainConfig
from cifar_towers.config.programs import BenchmarkConfig, CompareConfig, EvaluateConfig, ExportConfig, ReportConfig
from cifar_towers.config.train_config import (
    check_training,
    differing_settings,
    names_with,
    recipe_fields,
    recipe_names,
    shared_settings,
)
from cifar_towers.errors import UsageError

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.cfg"))


def parse(*arguments, config_class=TrainConfig):
    return parse_command_line(config_class, ["program.py", *arguments], "")


USAGE_ERRORS = {
    TrainConfig: [
        (["stray"], "'stray' is not a flag"),
        (
            ["--batch_size=8", "more", "--seed=1"],
            "'more' is not a flag; settings are given as --name=value, with quotes",
        ),
        (["smoke"], "'smoke' is not a flag; perhaps --recipe=smoke is meant"),
        ([str(ROOT)], f"perhaps --train_dir={ROOT} is meant"),
        (["--batch_sise=8"], "did you mean --batch_size?"),
        (["--batch_size=many"], "--batch_size=many"),
        (["--batch_size"], "Missing value for flag --batch_size"),
        (["--batch_size=0"], "batch_size=0 is too small; the minimum is 1"),
        (["--momentum=1.5"], "momentum=1.5 is too large; the maximum is 0.9999"),
        (["--learning_rate=nan"], "learning_rate=nan is not a finite number"),
        (["--model=vgg"], "model=vgg is not one of cifarnet, resnet20"),
        (["--precision=int8"], "precision=int8 is not one of auto, float32, bfloat16, float16"),
        (["--batch_size=100", "--num_gpus=8"], "batch_size=100 cannot be shared by 8 towers; 96 and 104 can"),
        (["--batch_size=3", "--num_gpus=8"], "batch_size=3 cannot be shared by 8 towers; 8 can"),
        (["--flagfile=nowhere.cfg"], "Unable to open flagfile"),
        (["--recipe=sped94"], "there is no recipe sped94; did you mean speed94? the recipes are cifarnet, resnet20, "),
        (["--recipe=nonsense"], "there is no recipe nonsense; the recipes are cifarnet, resnet20, "),
        (["--recipe=../configs/speed94"], "there is no recipe ../configs/speed94; the recipes are"),
        ([f"--recipe={CONFIGS[0]}"], f"is a file, and no name of a recipe; write --flagfile={CONFIGS[0]}"),
        (["--recipe=smoke", f"--flagfile={CONFIGS[0]}"], "both say what to train; give one"),
        (["--seeds=1,x"], "seeds=1,x is not a list of whole numbers"),
        (["--seeds=1,1"], "must be different"),
        (["--seed=-1"], "seed=-1 is too small"),
        (["--profile_steps=100"], "profile_steps='100' is not a first and a later last step"),
        (["--profile_steps=9:9"], "profile_steps='9:9' is not a first and a later last step"),
        (["--profile_steps=0:500"], "a profile takes up to 50 MB of memory a step; give at most 100"),
        (["--learning_rate_schedule=0=1"], "must begin with linear: or step:"),
        (["--image_size_schedule=0=8"], "sizes must be whole numbers from 18 to 32"),
        (["--crop=40"], "crop=40 is not a size from 18 to 32"),
        (["--model=cifarnet", "--image_size_schedule=0=24"], "model=cifarnet takes images of one size"),
        (["--model=resnet20", "--optimizer=muon"], "optimizer=muon is for speednet93, speednet94"),
        (["--crop=24", "--image_size_schedule=0=24"], "both set the image size"),
        (["--recipe=speed94", "--image_size=64"], "schedule=0=20,55%=32 ends with 32 pixels, and the net is "),
        (["--recipe=speed94", "--image_size=28"], "from 18 to 28; let it end with 28"),
        (
            ["--optimizer=adamw", "--learning_rate=0.001"],
            "has bias_learning_rate=58.7 and head_learning_rate=554.0 for",
        ),
        (["--optimizer=momentum"], "for optimizer=muon; with optimizer=momentum give --learning_rate=... too"),
        (["--recipe=smoke", "--model=speednet95"], "has bias_learning_rate=96.0 and whitening_learning_rate=1.5 for"),
        (["--recipe=speed96", "--batch_size=256"], "with batch_size=256 give --hard_example_pool=... too (0: all"),
        (["--recipe=cifarnet", "--image_size=64"], "has crop=24 for image_size=32; with image_size=64 give --crop=..."),
        (["--image_size_schedule=0=nan"], "image_size_schedule: '0=nan' is not a list of place=value, none negative"),
        (["--dataset=folder"], "dataset=folder is not cifar10, synthetic, auto, folder:<path> or the name of a"),
        (["--dataset=csv:"], "svhn_cropped, nor csv:<table> or npy:<folder or file of arrays>"),
        (["--flagfile=configs/resnet21.cfg"], "configs/ has the recipes"),
        (["--recipe=", "--crop=24", "--cutout=28"], "cutout=28 is larger than the 24 pixels"),
        (["--target_accuracy=0.9", "--eval_every_epochs=0"], "checked at evaluations"),
        (["--seed=1", "--seeds=2,3"], "are both given"),
        (["--seeds=0,99999999999"], "must be different numbers from 0"),
        (["--epochs=0"], "leave nothing to do"),
        (["--loss=mine.py:loss", "--label_smoothing=0.2"], "replaces the loss that smooths labels; give --label_smo"),
        (["--target_accuracy=94"], "target_accuracy=94.0 is too large; the maximum is 1"),
        (["--dataset=Image Net"], "dataset=Image Net is not cifar10"),
        (["--strategy=magic"], "strategy=magic is not one of towers, mirrored"),
        (["--variable_placement=gpu"], "variable_placement=gpu is not one of cpu, round_robin, least_loaded, auto"),
        (["--strategy=mirrored", "--variable_placement=round_robin"], "keeps every variable on every device"),
        (["--strategy=mirrored", "--gradient_device=cpu"], "keeps every variable on every device"),
        (["--all_reduce=nccl"], "all_reduce=nccl is for strategy=mirrored"),
        (["--worker_index=1"], "worker_index: only with --strategy=multi_worker; give it too"),
        (["--workers=a:1,b:1", "--allow_public_cluster"], "workers and allow_public_cluster: only with --strategy"),
        (["--worker_wait_seconds=60"], "worker_wait_seconds: only with --strategy=multi_worker"),
        (["--strategy=multi_worker", "--seeds=0,1"], "strategy=multi_worker trains one run; give one seed at a time"),
        (["--batch_statistics=synchronized", "--micro_batches=2"], "needs the whole batch at once"),
        (["--batch_statistics=synchronized", "--parallelism=model"], "leave parallelism=model"),
        (["--batch_statistics=synchronized", "--verify_every_steps=9"], ", synchronized statistics"),
        (["--hard_example_pool=4096", "--verify_every_steps=9"], "repeats one tower alone; leave hard_example_pool"),
        (["--verify_every_steps=-1"], "verify_every_steps=-1 is too small"),
        (["--strategy=mirrored", "--verify_every_steps=9"], "verify_every_steps=9 is for towers that share the batch"),
        (["--parallelism=model", "--verify_every_steps=9"], "leave it, or parallelism=model"),
        (["--parallelism=model", "--strategy=mirrored"], "leave strategy=mirrored"),
        (["--parallelism=model", "--variable_placement=auto"], "keeps each variable and its gradient on"),
        (["--parallelism=model", "--gradient_device=cpu"], "keeps each variable and its gradient on"),
        (
            ["--batch_size=100", "--num_gpus=2", "--micro_batches=3"],
            " 2 towers in 3 micro-batches each; 96 and 102 can",
        ),
        (["--num_gpus=2", "--tower_shares=auto", "--micro_batches=3"], "1024 examples cannot be shared in multiples"),
        (
            ["--num_gpus=2", "--tower_shares=auto", "--hard_example_pool=1041", "--micro_batches=2"],
            "tower_shares=auto: 1041 examples cannot be shared in multiples of 2",
        ),
        (["--num_gpus=8", "--tower_shares=auto", "--batch_size=7"], "tower_shares=auto: 7 examples cannot be shared"),
    ],
    BenchmarkConfig: [
        (["--towers=1,two"], "towers=1,two is not a list of whole numbers"),
        (["--towers=0"], "a number of towers is 1 or more"),
        (["--batch_size=1536", "--towers=1,5"], "batch_size=1536 cannot be shared by 5 towers; 1535 and 1540 can"),
        (["--recipe=speed9"], "did you mean speed96?"),
        (["--precisions=float32,int8"], "'int8' is not one of float32, bfloat16, float16"),
        (["--strategy=mirrored"], "strategy is not a flag of this program: the benchmark varies strategy, variable_"),
        (["--workers=a:1"], "workers is not a flag of this program: the benchmark measures one machine"),
        (["--batchsize=2"], "did you mean --batch_size?"),
        (["--num_gpus=2"], "num_gpus is not a flag of this program: the benchmark varies"),
        (["--nogpu_memory_growth"], "gpu_memory_growth is not a flag of this program: the processes of the benchmark"),
        (["--log_device_placement"], "log_device_placement is not a flag of this program: the benchmark trains no run"),
        (["--overwrite"], "overwrite is not a flag of this program: the benchmark trains no run"),
    ],
    EvaluateConfig: [
        ([], "which run"),
        (["--train_dir=runs/one", "--model=mynets.py"], "model=mynets.py is not one of cifarnet, "),
        (["--train_dir=runs/one", "--model=mynets.py"], " path/to/file.py:function"),
        (["--train_dir=runs/one", "--dataset=../photos"], "dataset=../photos is not cifar10"),
        (["--train_dir=runs/one", "--split=vall"], "split=vall is not one of test, validation, train"),
        ([str(ROOT)], f"perhaps --train_dir={ROOT} is meant"),
        (["smoke"], "'smoke' is not a flag; settings are given as --name=value"),
        (["--train_dir=runs/one", "--log_device_placement"], "--log_device_placement is not a flag"),
    ],
    ExportConfig: [
        (["--train_dir=x", "--format=tensorrt"], "format=tensorrt is not one of saved_model, keras"),
        (["--train_dir=x", "--quantize=int8"], "saved_model cannot be quantized; write --format=litert"),
    ],
    ReportConfig: [(["--train_dir=x"], "train_dir is not a flag of this program: directories of runs are given as")],
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


def test_benchmark_takes_its_recipe_from_the_flagfile():
    flagfile = f"--flagfile={ROOT / 'configs' / 'speed94.cfg'}"
    config = parse(flagfile, "--towers=2,1,2", config_class=BenchmarkConfig)
    assert config.tower_counts == (1, 2) and str(config.directory) == "runs/benchmark-speed94"
    assert config.recipe == parse(flagfile)


@pytest.mark.parametrize(
    ("unknown", "meant"),
    [
        *{"lr": "learning_rate", "bs": "batch_size", "batch": "batch_size", "wd": "weight_decay"}.items(),
        *{"gpus": "num_gpus", "ngpu": "num_gpus", "device": "num_gpus", "optim": "optimizer"}.items(),
        *{"num_epochs": "epochs", "lr_schedule": "learning_rate_schedule", "ema": "ema_decay"}.items(),
        *{
            "augmentation": "augment",
            "quux": "",
            "steps": "max_steps",
            "output_dir": "train_dir",
            "data": "dataset",
            "x": "",
        }.items(),
        ("amp", "precision"),
    ],
)
def test_unknown_flag_gets_the_name_of_the_setting_that_is_meant(unknown, meant):
    with pytest.raises(UsageError) as caught:
        parse(f"--{unknown}=1")
    assert f"--{unknown} is not a flag" in str(caught.value)
    assert re.findall(r"did you mean --(\w+)\?", str(caught.value)) == [meant] * bool(meant)


def test_later_flags_and_flagfiles_override_earlier_ones(tmp_path):
    recipe = tmp_path / "mine.cfg"
    recipe.write_text("# a recipe\n--batch_size=96\n--seed=4\n")
    config = parse("--seed=1", f"--flagfile={recipe}", "--batch_size=48", "--nosoft_placement")
    assert (config.batch_size, config.seed, config.soft_placement) == (48, 4, False)
    assert config.name == "mine" and str(config.directory) == "runs/mine-seed4"
    assert parse("--flagfile", str(recipe)).recipe == "mine"
    assert str(parse("--train_dir=here").directory) == "here"


def test_recipe_is_loaded_and_flags_override_it_wherever_they_stand(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expected = parse(f"--flagfile={ROOT / 'configs' / 'speed93.cfg'}", "--epochs=3", "--nolookahead")
    assert expected.whitening_epochs == 3 and expected.learning_rate == 1.5
    assert parse("--epochs=3", "--recipe=speed93", "--nolookahead") == expected
    assert parse("--recipe", "speed93", "--nolookahead", "--epochs=3") == expected
    assert parse("--epochs=3", "--nolookahead", "--recipe=smoke", "--recipe=speed93") == expected
    assert str(parse("--recipe=speed93", "--seed=11").directory) == "runs/speed93-seed11"


def test_recipe_is_speed94_unless_a_recipe_a_flagfile_or_a_model_is_given(tmp_path):
    expected = parse(f"--flagfile={ROOT / 'configs' / 'speed94.cfg'}", "--num_gpus=2")
    assert (expected.optimizer, expected.recipe) == ("muon", "speed94")
    assert parse("--num_gpus=2") == expected == parse("--recipe=speed94", "--num_gpus=2")
    assert parse(config_class=BenchmarkConfig).recipe == dataclasses.replace(expected, num_gpus=0)
    empty = tmp_path / "mine.cfg"
    empty.write_text("")
    assert parse(f"--flagfile={empty}") == TrainConfig(recipe="mine")
    assert parse("--model=speednet94") == parse("--recipe=") == TrainConfig()


def test_what_a_recipe_chose_for_a_replaced_setting_may_be_given_again():
    rates = "--bias_learning_rate=0", "--head_learning_rate=554", "--whitening_learning_rate=0"
    assert parse("--optimizer=adamw", "--learning_rate=0.001", *rates).head_learning_rate == 554
    assert parse("--recipe=speed96", "--batch_size=256", "--hard_example_pool=1024").hard_example_pool == 1024
    assert parse("--recipe=resnet20", "--model=resnet32").learning_rate == 0.1  # the recipe has no other rates
    assert parse("--recipe=smoke", "--model=speednet95", config_class=BenchmarkConfig).recipe.bias_learning_rate == 96


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": "adamw"}, "learning_rate=0.1 is too large for that; give one as --learning_rate=0.001"),
        ({"optimizer": "adamw", "learning_rate": 0.01}, ""),
        ({"optimizer": "adamw", "learning_rate": 0.01, "head_learning_rate": 0.5}, "and head_learning_rate=0.5 is too"),
        ({"flip": "none", "tta": 2}, "tta=2 averages over mirrored images.* give --tta=0"),
        ({"flip": "none"}, ""),
        ({"hard_example_pool": 2048, "head_learning_rate": 554.0}, "and head_learning_rate=554 is far too high"),
        ({"hard_example_pool": 2048, "head_learning_rate": 1.3}, ""),
        ({"hard_example_pool": 2048, "model": "speednet95"}, ""),
    ],
)
def test_settings_that_train_badly_together_are_refused_before_a_training(settings, message):
    config = TrainConfig(**settings)  # a run of before may have them, and be evaluated
    with pytest.raises(UsageError, match=message) if message else contextlib.nullcontext():
        check_training(config)


def test_flagfile_may_name_no_recipe(tmp_path):
    """Two recipes would leave open which settings hold, and which name the run has."""
    mine = tmp_path / "mine.cfg"
    mine.write_text("--recipe=speed94\n--epochs=3\n")
    with pytest.raises(UsageError, match="recipe=speed94 and flagfile=.*mine.cfg both say what to train"):
        parse(f"--flagfile={mine}")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_recipe_parses_and_states_its_command_and_claim(path):
    config = parse(f"--flagfile={path}")
    assert config.name == path.stem
    header = re.match(r"(#.*\n)+", path.read_text()).group()
    assert f"--recipe={path.stem}" in header
    assert re.search(r"not yet measured|n=\d+|seed", header)


def test_recipe_names():
    names = {"smoke", "cifarnet", "resnet20", "resnet56", "speed93", "speed94", "speed95", "speed96"}
    assert {path.stem for path in CONFIGS} == names == {*recipe_names()}


def test_help_has_every_flag_under_a_group():
    for config_class in (TrainConfig, EvaluateConfig, BenchmarkConfig):
        text = help_text(config_class, "What it does.")
        for field in flag_settings(config_class):
            assert re.search(rf"^  --(\[no\])?{field.name}\b", text, re.M), field.name
            assert f"{field.metadata['group']}:" in text
    assert "Exit codes: 0 done, 2 usage" in text and text.endswith("or what it started failed.")
    assert "--image_size (18 to 256)\n" in help_text(TrainConfig, "What it does.")
    exporting = help_text(ExportConfig, "What it does.")
    assert "diverged" not in help_text(BenchmarkConfig, "What it does.")
    assert exporting.endswith("1 a bug, a failed check, or nothing could be written.") and "diverged" not in exporting


def test_help_of_training_lists_twelve_flags_and_helpfull_all(capsys):
    text = []
    for flag in ("--help", "--helpfull"):
        with pytest.raises(SystemExit) as left:
            parse(flag)
        assert left.value.code == 0
        text.append(capsys.readouterr().out)
    listed = [re.findall(r"^  --(?:\[no\])?(\w+)", page, re.M) for page in text]
    assert len(listed[0]) == 12 and {"recipe", "num_gpus", "dataset", "model", "flagfile"} <= {*listed[0]}
    assert f"[{TrainConfig.epochs}; speed94: {parse().epochs}]" in text[0]  # the second holds where no recipe is named
    assert {*listed[1]} == {"flagfile", *(field.name for field in flag_settings(TrainConfig))}


@pytest.mark.parametrize(
    ("part", "listed"),
    [("batch_size", ["batch_size"]), ("rollback", ["rollback_on_divergence"]), ("--crop", ["crop"]), ("quux", [])],
)
def test_help_with_a_value_lists_the_flags_that_have_it_in_their_name(capsys, part, listed):
    with pytest.raises(SystemExit):
        parse(f"--help={part}")
    text = capsys.readouterr().out
    assert re.findall(r"^  --(?:\[no\])?(\w+)", text, re.M) == [*listed, "flagfile"]
    assert ("No flag has quux in its name." in text) == (not listed)


@pytest.mark.parametrize(("split", "meant"), [("val", "validation"), ("dev", "validation"), ("training", "train")])
def test_splits_have_the_names_that_folders_and_tables_have(split, meant):
    assert parse("--train_dir=runs/one", f"--split={split}", config_class=EvaluateConfig).split == meant


@pytest.mark.parametrize("config_class", [TrainConfig, BenchmarkConfig, EvaluateConfig, ReportConfig])
def test_short_help_has_every_flag_that_only_this_program_has(config_class):
    text, all_flags = short_help(config_class, "What it does."), help_text(config_class, "What it does.")
    own = {field.name for field in flag_settings(config_class)} - {f.name for f in dataclasses.fields(TrainConfig)}
    assert {name for name in own if not re.search(rf"^  --(\[no\])?{name}\b", text, re.M)} == set()
    assert ("more flags: --helpfull" in text) == (text.count("\n  --") < all_flags.count("\n  --"))
    assert all(len(line) <= 100 for line in all_flags.splitlines() if not line.startswith("Exit codes"))


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
    assert TrainConfig(batch_size=1024, parallelism="model").default_num_towers(7) == (7, "")
    with pytest.raises(UsageError, match=f"{why}$"):
        TrainConfig(batch_size=1024, num_gpus=7)


def test_shares_of_towers_that_are_not_known_before_are_checked_before_they_are_measured():
    config = TrainConfig(batch_size=1024, tower_shares="auto", micro_batches=3)
    for num_towers in (1, 2):
        with pytest.raises(UsageError, match="tower_shares=auto: 1024 examples cannot be shared in multiples of 3"):
            config.check_shares(num_towers)
    dataclasses.replace(config, batch_size=1023).check_shares(2)


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
    assert TrainConfig(dataset="npy:photos").directory == Path("runs/speednet94-photos-seed0")
    assert TrainConfig(dataset="svhn_cropped").directory == Path("runs/speednet94-svhn_cropped-seed0")


@pytest.mark.parametrize(
    ("name", "value", "refused"),
    [("batch_statistics", "synchronized", True), ("micro_batches", 2, True)]
    + [(name, value, False) for name, value in (("num_gpus", 2), ("strategy", "mirrored"), ("seed", 0), ("tta", 2))],
)
def test_settings_that_change_the_function_only_with_batch_norm_are_refused_only_there(name, value, refused):
    config, saved = TrainConfig(**{name: value}), recipe_fields(TrainConfig())
    assert differing_settings(config, saved, has_batch_norm=False) == []
    expected = [f"{name} {saved[name]} -> {value}"] if refused else []
    assert differing_settings(config, saved, has_batch_norm=True) == expected
    saved.pop(name, None)  # a run from before it was recorded
    assert differing_settings(config, saved, has_batch_norm=True) == []


def test_a_setting_that_no_longer_exists_is_named():
    saved = {**recipe_fields(TrainConfig()), "hardest_of": 2048}
    (difference,) = differing_settings(TrainConfig(), saved, has_batch_norm=True)
    assert "hardest_of 2048" in difference


def test_settings_of_data_model_and_optimizer_belong_to_the_recipe():
    recipe = set(names_with(TrainConfig, on_resume="refuse"))
    assert {"seed", "epochs"} | set(names_with(TrainConfig, group="Optimizer")) <= recipe
    for group in ("Data", "Model"):
        assert set(names_with(TrainConfig, group=group)) - recipe <= {"dataset", "data_dir"}


def test_workers_share_the_recipe_but_not_their_own_paths_and_addresses():
    shared = shared_settings(TrainConfig(train_dir="here", seed=3))
    assert shared["seed"] == 3 and shared.keys() >= set(names_with(TrainConfig, on_resume="refuse"))
    assert not shared.keys() & {"train_dir", "data_dir", "workers", "worker_index", "intra_op_threads"}


def test_repetitions_of_an_experiment_differ_in_seed_and_reporting_only():
    per_run = set(names_with(TrainConfig, per_run=True))
    assert {"seed", "train_dir", "keep_checkpoints"} <= per_run
    assert not per_run & set(names_with(TrainConfig, group="Optimizer"))

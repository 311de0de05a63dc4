"""The directory of a run: who may write it, what is cleared, refusals without TensorFlow, and what a resume changes."""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from cifar_towers import files
from cifar_towers.checkpointing import checkpoint, workdir
from cifar_towers.cli import main
from cifar_towers.config import TrainConfig
from cifar_towers.config.train_config import recipe_fields
from cifar_towers.errors import DataError, UsageError
from cifar_towers.shutdown import ShutdownHandler

PROGRAM = Path(__file__).parents[2] / "scripts/train.py"
FLAGS = ("--dataset=synthetic", "--model=cifarnet", "--crop=24", "--max_steps=2")
CONFIG = TrainConfig(dataset="synthetic", model="cifarnet", crop=24, max_steps=2)


@pytest.fixture
def config(tmp_path):
    """Make the config of a run with a checkpoint of step 1."""
    config = dataclasses.replace(CONFIG, train_dir=str(tmp_path / "run"))
    save(config)
    return config


def save(config, step=1, name=checkpoint.METADATA):
    metadata = {"step": step, "recipe": recipe_fields(config), "dataset": "synthetic"}
    path = checkpoint.checkpoint_path(config.directory, step)
    files.commit(path, lambda directory: (directory / name).write_text(json.dumps(metadata)))
    return path


def test_other_settings_are_refused_before_tensorflow_is_imported(config, tmp_path):
    (tmp_path / "tensorflow.py").write_text("raise RuntimeError('TensorFlow was imported')")
    command = [sys.executable, PROGRAM, *FLAGS, f"--train_dir={config.train_dir}"]
    options = {"capture_output": True, "text": True, "env": os.environ | {"PYTHONPATH": str(tmp_path)}}
    refused = subprocess.run([*command, "--momentum=0.5"], **options)
    assert refused.returncode == 2 and "momentum 0.9 -> 0.5" in refused.stderr, refused.stderr
    assert "TensorFlow was imported" in subprocess.run(command, **options).stderr


@pytest.mark.parametrize("settings", [{}, {"overwrite": True}, {"seeds": "0,7"}])
def test_a_directory_in_use_is_refused_before_tensorflow_is_imported(tmp_path, monkeypatch, settings):
    monkeypatch.setattr(main, "import_tensorflow", Mock(side_effect=ImportError))
    config = dataclasses.replace(CONFIG, train_dir=str(tmp_path), **settings)
    directory = tmp_path / "seed7" if config.seeds else tmp_path
    files.make(directory)
    refused = pytest.raises(UsageError, match=f"^another process trains in {directory}; end it, or give .*--train_dir$")
    with files.locked(directory / ".lock"), refused:
        main.start_training(config, ShutdownHandler())
    with pytest.raises(ImportError):
        main.start_training(config, ShutdownHandler())


def test_settings_are_compared_with_the_newest_checkpoint(config):
    workdir.check_settings(config)
    other = dataclasses.replace(config, batch_size=512, momentum=0.5)
    different = f"batch_size {config.batch_size} -> 512.*momentum 0.9 -> 0.5"
    with pytest.raises(UsageError, match=f"step-00000001 .*{different}.* --overwrite"):
        workdir.check_settings(other)
    workdir.check_settings(dataclasses.replace(other, overwrite=True))
    workdir.check_settings(dataclasses.replace(config, num_gpus=2))
    newest = save(config, 2)
    (newest / checkpoint.METADATA).write_text("damaged")
    workdir.check_settings(other)  # the start sets it aside, and then compares with the one before


@pytest.mark.parametrize(
    "resumed",
    [
        CONFIG,
        dataclasses.replace(CONFIG, seeds="0,1").of_seed(0),
        dataclasses.replace(CONFIG, train_dir="runs/cifarnet-seed0", init_from="./runs/other/"),
    ],
)
def test_a_resumed_run_keeps_its_directory_and_the_run_it_began_with(tmp_path, monkeypatch, resumed):
    monkeypatch.chdir(tmp_path)
    begun = dataclasses.replace(CONFIG, train_dir="runs/cifarnet-seed0", init_from="runs/other")
    save(begun)
    chosen = workdir.choose_directory(resumed, "")
    assert chosen.directory == begun.directory and chosen.init_from == "runs/other"
    workdir.check_settings(chosen)
    assert workdir.choose_directory(chosen, "") == chosen
    again = workdir.choose_directory(dataclasses.replace(resumed, overwrite=True), "")
    assert again.directory == begun.directory and again.init_from == resumed.init_from


def test_choices_are_those_of_the_newest_checkpoint_that_can_be_read(config):
    for step, parts in ((2, 2), (3, 4)):
        newest = checkpoint.checkpoint_path(config.directory, step)
        metadata = json.dumps({"towers": 2, "micro_batches": parts})
        files.commit(newest, lambda path, text=metadata: (path / checkpoint.METADATA).write_text(text))
    assert workdir.previous_choices(config, 2) == {"micro_batches": 4} and workdir.previous_choices(config, 1) == {}
    (newest / checkpoint.METADATA).write_text("damaged")
    assert workdir.previous_choices(config, 2) == {"micro_batches": 2}
    assert workdir.previous_choices(dataclasses.replace(config, overwrite=True), 2) == {}


def test_run_of_an_earlier_version_is_refused_in_one_line(config):
    save(config, 2, "facts.json")
    for read in (workdir.check_settings, lambda config: checkpoint.latest_checkpoint(config.directory)):
        with pytest.raises(UsageError, match="step-00000002 .*earlier version.* --overwrite") as caught:
            read(config)
        assert "\n" not in str(caught.value)


def test_clearing_leaves_projectors_that_no_run_wrote(config):
    directory = config.directory
    files.write_json(directory / files.CONFIG, dataclasses.asdict(config))
    for name in ("projector_00000020/features.tsv", "projector_00000020/projector_config.pbtxt"):
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text("of the run")
    mine = [directory / name for name in ("projector_mine/slides.pdf", "projector_00000007/notes.txt")]
    for path in mine:
        path.parent.mkdir()
        path.write_text("mine")
    workdir.clear(directory)
    assert sorted(path for path in directory.rglob("*") if path.is_file()) == sorted(mine)


@pytest.mark.parametrize(
    ("left", "is_refused"),
    [((), True), (("step-00000001.bak", ".tmp-step-00000002"), True), (("damaged-step-00000001",), False)],
)
def test_a_result_without_a_checkpoint_is_refused(config, left, is_refused):
    """If only damaged checkpoints are left, the start names them."""
    directory = config.directory
    files.write_json(directory / files.CONFIG, dataclasses.asdict(config))
    files.write_json(directory / files.RESULT, {"step": 1})
    workdir.check_settings(config)
    (directory / "checkpoints").rename(directory / "elsewhere")
    for name in left:
        (directory / "checkpoints" / name).mkdir(parents=True)
    refused = pytest.raises(UsageError, match="holds the result of a run, and no checkpoint .*runs.py --delete ")
    with refused if is_refused else contextlib.nullcontext():
        workdir.check_settings(config)
    workdir.check_settings(dataclasses.replace(config, overwrite=True))


def test_damaged_result_is_an_error_of_one_line(config):
    (config.directory / files.RESULT).write_text("{")
    with pytest.raises(DataError, match="result.json cannot be read"):
        workdir.completed_result(config, 1, 1)


@pytest.mark.parametrize(("beside", "expected"), [("", False), ("metrics.jsonl", True)])
def test_a_damaged_config_is_a_runs_if_records_are_beside_it(tmp_path, beside, expected):
    (tmp_path / files.CONFIG).write_text("{")
    if beside:
        (tmp_path / beside).write_text("")
    assert workdir.is_run(tmp_path) == expected


SAVED = {
    "precision": "float32", "parallelism": "data", "towers": 2, "micro_batches": 1, "tower_shares": "",
    "recipe": {"batch_statistics": "mean"},
}  # fmt: skip
SYNCHRONIZED = {"recipe": {"batch_statistics": "synchronized"}}


@pytest.mark.parametrize(
    ("now", "has_batch_norm", "parts"),
    [
        ({}, True, ()),
        ({"towers": 4}, False, ()),
        ({"towers": 4}, True, ("1/4", "1/2", "--num_gpus=2")),
        ({"towers": 4} | SYNCHRONIZED, True, ()),
        ({"towers": 1, "micro_batches": 2}, True, ()),  # parts of the same size
        ({"micro_batches": 3}, True, ("1/6", "1/2", "--micro_batches=1")),
        ({"tower_shares": "3,1"}, True, ("3,1", "--tower_shares=")),
        ({"towers": 1, "parallelism": "model"}, True, ("1/1", "1/2", "--parallelism=data --num_gpus=2")),
        ({"precision": "bfloat16"}, False, ("bfloat16", "float32", "--precision=float32")),
        ({"precision": "bfloat16", "towers": 1}, True, ("bfloat16", "1/1", "--precision=float32 --num_gpus=2")),
    ],
)
def test_resuming_says_what_is_computed_otherwise(now, has_batch_norm, parts):
    line = workdir.describe_changes(SAVED, SAVED | now, has_batch_norm)
    assert bool(line) == bool(parts) and all(part in line for part in parts) and "\n" not in line


@pytest.mark.parametrize(
    ("chosen", "given", "is_refused"),
    [
        ({"precision": "bfloat16"}, {"precision": "bfloat16"}, False),
        ({"precision": "bfloat16"}, {"precision": "float32"}, True),
        ({"precision": "bfloat16"}, {}, False),
        ({"micro_batches": 2}, {"micro_batches": 2}, False),
        ({"micro_batches": 2}, {"micro_batches": 4}, True),
    ],
)
def test_what_was_chosen_for_auto_may_be_given_on_resume(chosen, given, is_refused):
    """The log of a resumed run says to give it, to train one function throughout."""
    config = TrainConfig(micro_batches=0)
    metadata = {"recipe": recipe_fields(config), "dataset": "cifar10"} | chosen
    with pytest.raises(UsageError, match=" -> ") if is_refused else contextlib.nullcontext():
        workdir._check_recipe(Path("step-1"), metadata, dataclasses.replace(config, **given))


def test_code_may_be_at_another_path_on_resume(tmp_path):
    config = TrainConfig(loss=f"{tmp_path}/mine.py:loss")
    (tmp_path / "mine.py").write_text("def loss(labels, logits):\n    return 1\n")
    metadata = {"recipe": recipe_fields(config), "own_code": workdir.own_code(config), "dataset": "cifar10"}
    moved = dataclasses.replace(config, loss=f"{tmp_path}/moved.py:loss")
    (tmp_path / "mine.py").rename(tmp_path / "moved.py")
    workdir._check_recipe(Path("step-1"), metadata, moved)
    (tmp_path / "moved.py").write_text("def loss(labels, logits):\n    return 2\n")
    with pytest.raises(UsageError, match="loss .*mine.py:loss -> .*moved.py:loss"):
        workdir._check_recipe(Path("step-1"), metadata, moved)


@pytest.mark.parametrize(
    ("saved", "now", "parts"),
    [
        ({"threads": 2}, {"threads": 1}, ("1 thread instead of 2", "--intra_op_threads=2")),
        ({"threads": 1}, {"threads": 1}, ()),
        ({"threads": 2}, {"threads": 1, "towers": 4}, ()),  # other towers round differently in any case
        ({}, {"threads": 1}, ()),  # of an earlier version
        ({"threads": 1}, {"threads": 0}, ()),  # on GPUs now
    ],
)
def test_resuming_says_that_operations_have_another_number_of_threads(saved, now, parts):
    line = workdir.describe_changed_threads(SAVED | saved, SAVED | now)
    assert bool(line) == bool(parts) and all(part in line for part in parts)


@pytest.mark.parametrize(
    ("saved", "named"),
    [
        ({}, []),  # of an earlier version
        ({"own_code": {"model": "1", "loss": "2"}}, []),
        ({"own_code": {"model": "1", "loss": "3"}}, ["loss=mine.py:loss"]),
        ({"own_code": {"model": "0", "loss": "3"}}, ["model=nets.py:net", "loss=mine.py:loss"]),
    ],
)
def test_resuming_names_files_that_have_changed(saved, named):
    now = {"own_code": {"model": "1", "loss": "2"}, "recipe": {"model": "nets.py:net", "loss": "mine.py:loss"}}
    line = workdir.describe_changed_code(saved | {"step": 7}, now)
    assert line.startswith(f"{', '.join(named)}: the file has changed since step 7, so") if named else line == ""


def test_the_code_that_decides_what_is_trained_is_digested_wherever_it_is_named(tmp_path, monkeypatch):
    """A built-in model has no file of the user's, and a callback decides nothing."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "digested.py").write_text("def f():\n    pass\n")
    digest = files.sha256(tmp_path / "digested.py")
    config = dataclasses.replace(CONFIG, loss=f"{tmp_path}/digested.py:f", augment="digested:f", callback="digested:f")
    assert workdir.own_code(config) == {"loss": digest, "augment": digest}
    assert workdir.own_code(dataclasses.replace(config, model="digested:f"))["model"] == digest

"""The table of runs, in all states that a run can be in."""

import dataclasses
import json
import subprocess

import pytest

from cifar_towers import files
from cifar_towers.config import TrainConfig
from cifar_towers.config.programs import RUN_FIELDS
from cifar_towers.errors import UsageError
from cifar_towers.inference import runs as trained
from tests.programs import COMMAND
from tests.reporting.example_runs import change, make_run, read_records, read_result, write_records

SETTINGS = {
    name: value for name, value in dataclasses.asdict(TrainConfig()).items() if name not in ("recipe", "seed", "towers")
}


def make(directory, recipe="speed94", seed=0, **options):
    return make_run(directory / f"{recipe}-seed{seed}", recipe, seed, **options, **SETTINGS)


@pytest.fixture
def runs(tmp_path):
    """Make runs that are finished, stopped, at work, damaged, without a step; and directories that are none."""
    for recipe in ("speed94", "resnet20"):
        for seed in range(3):
            make(tmp_path, recipe, seed, towers=1 + seed)
    make(tmp_path, seed=3, finished=False, last_step=132)
    make(tmp_path, seed=4)
    (make(tmp_path, seed=5) / "environment.json").write_text("{")
    begun = tmp_path / "speed94-seed6"
    begun.mkdir()
    (begun / "config.json").write_text(json.dumps(SETTINGS | {"recipe": "speed94", "seed": 6}))
    make(tmp_path / "elsewhere", "speed94", 9, finished=False, last_step=11)
    for name in ("benchmark-speed94", "speed94-seeds/train"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text("{}")
    with files.locked(tmp_path / "speed94-seed4/.lock"):
        yield tmp_path


def start(*arguments):
    return subprocess.run([*COMMAND, "runs", *map(str, arguments)], capture_output=True, text=True)


def test_table_has_every_run_and_its_state(runs, caplog):
    table = trained.format_table(trained.find_runs(runs)).splitlines()
    lines = {line.split()[0]: line for line in table[1 : table.index("")]}
    assert len(lines) == 10 and max(map(len, table)) <= 120
    assert f"{runs}/speed94-seed5 is left out: " in caplog.text
    for seed, state in ((0, "done"), (3, "stopped at 132"), (4, "running"), (6, "stopped at 0")):
        assert f"  {state}  " in lines[f"speed94-seed{seed}"]
    assert "elsewhere/speed94-seed9" in lines
    accuracies = {score["tta"]: score["accuracy"] for score in read_result(runs / "speed94-seed1")["evaluations"]}
    plain, augmented = (f"{100 * accuracies[tta]:.2f}" for tta in (0, 2))
    assert lines["speed94-seed1"].split() == [
        "speed94-seed1", "speed94", "cifar10", "2", "done", plain, augmented, "1,876", "9.7", "abc1231",
    ]  # fmt: skip


def test_accuracies_are_of_averaged_weights_and_not_of_the_better_ones(tmp_path):
    run = make(tmp_path, ema=True)
    evaluations = read_result(run)["evaluations"]
    for evaluation in evaluations:
        evaluation["accuracy"] = 0.99 if evaluation["weights"] == "raw" else (0.94 if evaluation["tta"] else 0.93)
    raw = [evaluation for evaluation in evaluations if evaluation["weights"] == "raw"]
    for shown, expected in ((evaluations, ("ema", 0.93, 0.94)), (raw, ("raw", 0.99, 0.99))):
        write_evaluations(run, shown)
        (found,) = map(trained.describe, trained.find_runs(tmp_path))
        assert (found["weights"], found["accuracy"], found["tta_accuracy"]) == expected


def test_accuracies_on_validation_images_are_marked(tmp_path):
    records = read_records(make(tmp_path, finished=False, last_step=121))
    held_out = [record | {"split": "validation"} if record["kind"] == "eval" else record for record in records]
    write_records(tmp_path / "speed94-seed0", held_out)
    make(tmp_path, seed=1)
    stopped, done = trained.format_table(trained.find_runs(tmp_path)).splitlines()[1:3]
    assert " val  " in stopped and " val" not in done


def write_evaluations(run, evaluations):
    """Leave these evaluations alone in a run's result."""
    change(run, "result.json", evaluations=evaluations)
    write_records(run, [record for record in read_records(run) if record["kind"] == "train"])


def test_runs_are_found_by_pattern_sorted_and_printed_as_json(runs):
    found = start(f"--runs_dir={runs}", "resnet20*", "--sort=accuracy", "--json")
    records = [json.loads(line) for line in found.stdout.splitlines()]
    assert [record["recipe"] for record in records] == 3 * ["resnet20"], found.stderr
    assert [record["accuracy"] for record in records] == sorted(record["accuracy"] for record in records)
    assert tuple(records[0]) == RUN_FIELDS
    for key in RUN_FIELDS:
        values = [trained.describe(run)[key] for run in trained.sort_runs(trained.find_runs(runs), key)]
        known = [value for value in values if value is not None]
        assert known == sorted(known) and values[len(values) - len(known) :] == known
    assert start(f"--runs_dir={runs}", "nothing*").stdout == "no runs\n"
    missing = start("--runs_dir=/nowhere")
    assert missing.returncode == 2 and missing.stderr.startswith("usage: there is no directory /nowhere; ")


def test_best_run_is_the_finished_one_with_the_highest_accuracy(runs):
    finished = [read_result(runs / f"speed94-seed{seed}")["evaluations"] for seed in range(3)]
    best = max(range(3), key=lambda seed: finished[seed][1]["accuracy"])
    assert start(f"--runs_dir={runs}", "--best=speed94").stdout == f"{runs}/speed94-seed{best}\n"
    with pytest.raises(UsageError, match="no run of speed95 is finished"):
        trained.best_run(trained.find_runs(runs), "speed95")
    change(runs / "speed94-seed1", "environment.json", data_sha256={"train": "c50e2d9aebe4fd88", "test": "other"})
    with pytest.raises(UsageError, match="finished runs of speed94 have different test images; give a pattern of name"):
        trained.best_run(trained.find_runs(runs), "speed94")


def test_best_run_is_chosen_by_validation_images_if_all_runs_have_some(tmp_path):
    for seed, (validation, test) in enumerate(((0.91, 0.92), (0.93, 0.90), (None, 0.94))):
        scores = [{"split": "test", "accuracy": test}, {"split": "validation", "accuracy": validation}]
        kind = {"weights": "raw", "tta": 0, "count": 100}
        write_evaluations(make(tmp_path, seed=seed), [kind | score for score in scores[: 2 if validation else 1]])
    found = trained.find_runs(tmp_path)
    assert trained.best_run(found[:2], "speed94") == found[1]
    assert trained.best_run(found, "speed94") == found[2]

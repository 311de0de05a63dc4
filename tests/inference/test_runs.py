"""The table of runs, in all states that a run can be in; groups of runs and their differences."""

import dataclasses
import doctest
import json
import subprocess

import numpy as np
import pytest

from cifar_towers import files
from cifar_towers.config import TrainConfig
from cifar_towers.config.programs import RUN_FIELDS
from cifar_towers.errors import UsageError
from cifar_towers.inference import runs as trained
from cifar_towers.inference.runs import STUDENT_T, Sample, describe_difference
from tests.inference.example_runs import change, make_run, read_records, read_result, write_records
from tests.programs import COMMAND

SETTINGS = {
    name: value for name, value in dataclasses.asdict(TrainConfig()).items() if name not in ("recipe", "seed", "towers")
}


def make(directory, recipe="speed94", seed=0, **options):
    return make_run(directory / f"{recipe}-seed{seed}", recipe, seed, **options, **SETTINGS)


@pytest.fixture
def runs(tmp_path):
    """Make runs that are finished, stopped, at work, without a step; and a directory that is none."""
    for recipe in ("speed94", "resnet20"):
        for seed in range(3):
            make(tmp_path, recipe, seed, towers=1 + seed)
    make(tmp_path, seed=3, finished=False, last_step=132)
    make(tmp_path, seed=4)
    begun = tmp_path / "speed94-seed6"
    begun.mkdir()
    (begun / "config.json").write_text(json.dumps(SETTINGS | {"recipe": "speed94", "seed": 6}))
    make(tmp_path / "elsewhere", "speed94", 9, finished=False, last_step=11)
    (tmp_path / "no-run").mkdir()
    (tmp_path / "no-run/config.json").write_text("{}")
    with files.locked(tmp_path / "speed94-seed4/.lock"):
        yield tmp_path


def start(*arguments):
    return subprocess.run([*COMMAND, "runs", *map(str, arguments)], capture_output=True, text=True)


def test_table_has_every_run_and_its_state(runs):
    table = trained.format_table(trained.find_runs(runs)).splitlines()
    lines = {line.split()[0]: line for line in table[1 : table.index("")]}
    assert len(lines) == 10 and max(map(len, table)) <= 120
    for seed, state, step in ((0, "done", "264"), (3, "stopped", "132"), (4, "running", "264"), (6, "stopped", "0")):
        assert lines[f"speed94-seed{seed}"].split()[3:5] == [state, step]
    assert "elsewhere/speed94-seed9" in lines
    accuracies = {score["tta"]: score["accuracy"] for score in read_result(runs / "speed94-seed1")["evaluations"]}
    plain, augmented = (f"{accuracies[tta]:.4f}" for tta in (0, 2))
    assert lines["speed94-seed1"].split() == [
        *("speed94-seed1", "speed94", "cifar10", "done", "264", "test", plain, augmented, "1,876.4", "9.7"),
    ]


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


def test_table_names_the_split_of_the_accuracies(tmp_path):
    records = read_records(make(tmp_path, finished=False, last_step=121))
    held_out = [record | {"split": "validation"} if record["kind"] == "eval" else record for record in records]
    write_records(tmp_path / "speed94-seed0", held_out)
    make(tmp_path, seed=1)
    stopped, done = trained.format_table(trained.find_runs(tmp_path)).splitlines()[1:3]
    assert " validation  " in stopped and " test  " in done


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


# Groups and their differences -----------------------------------------------------------------------------------------


def grouped(*directories):
    return trained.group_by_recipe(trained.read_runs(directories))


def group_names(directories):
    return {group.name: [run.name for run in group.runs] for group in grouped(*directories)}


def score(run, accuracy):
    """Leave one score alone in a run's result."""
    kind = {"split": "test", "weights": "raw", "tta": 0, "count": 100}
    write_evaluations(run, [kind | {"accuracy": accuracy, "loss": 1.0}])


def make_pairs(directory, **settings):
    """Make two runs of each learning rate, whose means differ by 4.40 points."""
    accuracies = {("lr0.3", 0): 0.89, ("lr0.3", 1): 0.91, ("lr1.5", 0): 0.943, ("lr1.5", 1): 0.945}
    for (recipe, seed), accuracy in accuracies.items():
        score(make_run(directory / f"{recipe}-seed{seed}", recipe, seed, **settings), accuracy)
    return sorted(directory.iterdir())


def test_examples_of_docstrings():
    assert doctest.testmod(trained).failed == 0


def test_difference_has_students_interval():
    one, other = Sample.of([0.94, 0.95, 0.96]), Sample.of([0.91, 0.93, 0.95])
    assert np.allclose(one, (0.95, 0.01, 3)) and np.allclose(other, (0.93, 0.02, 3))
    half = 100 * STUDENT_T[3] * np.sqrt((0.01**2 + 0.02**2) / 3)  # groups of one size: pooled as by each
    assert describe_difference(one, other) == f"+2.00 points (95 % {2 - half:+.2f} to {2 + half:+.2f}), n=3 and 3"
    assert describe_difference(other, one).startswith("-2.00 points")


def test_runs_of_one_recipe_with_other_settings_are_groups_of_their_own(tmp_path):
    settings = [(0, 1536, 2), (1, 512, 2), (2, 512, 2), (0, 512, 4), (3, 512, 2)]
    for name, (seed, batch_size, towers) in zip("abcde", settings, strict=True):
        make_run(tmp_path / name, seed=seed, batch_size=batch_size, towers=towers)
    make_run(tmp_path / "f", seed=4, batch_size=512, data_dir="/elsewhere", dataset="auto", overwrite=True)
    change(tmp_path / "f", "config.json", workers="127.0.0.1:5000,127.0.0.1:5001", profile_steps="1:2")
    groups = group_names([tmp_path / name for name in "abcdef"])
    assert list(groups.values()) == [["a"], ["b", "c", "e", "f"], ["d"]]
    assert all(name.startswith("speed94, batch_size=") for name in groups)


def test_runs_on_other_images_of_any_split_are_a_group_of_their_own(tmp_path):
    digests = [("a", "b"), ("a", "b"), ("a", "c"), ("a", "c"), ("d", "b")]
    paths = [make_run(tmp_path / str(seed), seed=seed, dataset="folder:/photos") for seed in range(6)]
    for path, (train, test) in zip(paths, digests, strict=False):
        change(path, "environment.json", data_sha256={"train": train, "test": test})
    change(paths[5], "environment.json", data_sha256={"train": "a", "validation": "e", "test": "b"})
    groups = group_names(paths)
    assert list(groups.values()) == [["0", "1"], ["2", "3"], ["4"], ["5"]]
    assert "speed94, train_data=a, test_data=c" in groups


def test_difference_reads_in_the_order_of_its_names(tmp_path):
    low, high = (paths := make_pairs(tmp_path))[:2], paths[2:]
    for order, text in (
        ([*high, *low], "lr1.5 - lr0.3: +4.40 points (95 % +0.08 to +8.72), n=2 and 2; test/raw"),
        ([*low, *high], "lr0.3 - lr1.5: -4.40 points (95 % -8.72 to -0.08), n=2 and 2; test/raw"),
    ):
        assert trained.compare_groups(grouped(*order)) == [text]


def test_a_seed_counts_once_and_the_line_names_what_is_left_out(tmp_path):
    paths = make_pairs(tmp_path / "all")
    for name, finished in (("again", True), ("begun", False)):
        repeated = make_run(tmp_path / name, "lr1.5", 0, finished=finished)
        if finished:
            score(repeated, 0.5)
    high, low = grouped(tmp_path / "begun", *paths, tmp_path / "again")
    assert [run.name for run in high.runs] == ["all/lr1.5-seed0", "all/lr1.5-seed1"]
    assert high.left_out == ["begun", "again"] and not low.left_out
    (line,) = trained.compare_groups([high, low])
    assert "+4.40 points" in line and "n=2 and 2; test/raw; lr1.5 is seeds 0, 1 without begun, again, whose" in line


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("result.json", {"step": 500}),
        ("environment.json", {"data_sha256": {"train": "other", "test": "4b43d2e153a74d46"}}),
        ("environment.json", {"data_sha256": {"train": "c50e2d9aebe4fd88", "test": "other"}}),
    ],
)
def test_groups_of_other_lengths_or_data_are_not_subtracted(tmp_path, name, changes):
    paths = make_pairs(tmp_path)
    for path in paths[2:]:
        change(path, name, **changes)
        if name == "result.json":
            write_records(path, [{"kind": "train", "step": 500, "epoch": 8}])
    (line,) = trained.compare_groups(grouped(*paths))
    assert line == "lr0.3 - lr1.5: not subtracted, as their numbers of steps or their data differ"


def test_groups_are_compared_by_a_score_that_all_have(tmp_path):
    seeds = [*((recipe, seed) for recipe in ("one", "other") for seed in range(3))]
    paths = [make_run(tmp_path / f"{recipe}{seed}", recipe, seed, ema=True) for recipe, seed in seeds]
    for path, accuracy in zip(paths, (0.94, 0.95, 0.96, 0.91, 0.93, 0.95), strict=True):
        scores = read_result(path)["evaluations"]
        for each in scores:
            each["accuracy"] = accuracy if (each["weights"], each["tta"]) == ("ema", 2) else 0.5
        write_evaluations(path, scores)
    text = "one - other: +2.00 points (95 % -1.58 to +5.58), n=3 and 3; test/ema_tta2"
    assert trained.compare_groups(grouped(*paths)) == [text]
    raw = [make_run(tmp_path / f"raw{seed}", "raw", seed) for seed in range(2)]
    unfinished = [make_run(tmp_path / f"third{seed}", "third", seed, finished=False) for seed in range(2)]
    (line,) = trained.compare_groups(grouped(*paths[:3], *raw, *unfinished))
    assert line.endswith("; test/raw_tta2") and line.startswith("one - raw")


def test_long_group_names_are_shortened_and_distinct(tmp_path):
    runs = [make_run(tmp_path / f"r{i}", "n" * 100 + str(i), last_step=66) for i in range(2)]
    assert [len(name) for name in group_names(runs)] == [44, 47]


def test_a_directory_stands_for_the_runs_in_it_each_once(tmp_path):
    paths = [make_run(tmp_path / name / "seed0", last_step=66) for name in ("one", "other")]
    for given, names in (
        (paths[:1], ["seed0"]),
        (paths, ["one/seed0", "other/seed0"]),
        ([tmp_path], ["one/seed0", "other/seed0"]),
        ([paths[1], tmp_path / "one/../other"], ["seed0"]),
    ):
        assert [run.name for run in trained.read_runs(given)] == names
    (tmp_path / "empty").mkdir()
    for name, message in (("none", "there is no directory"), ("empty", "empty holds no run")):
        with pytest.raises(UsageError, match=message):
            trained.read_runs([paths[0], tmp_path / name])

"""The table of runs, in all states that a run can be in, and deleting them."""

import dataclasses
import itertools
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cifar_towers import files
from cifar_towers.config import TrainConfig
from cifar_towers.config.programs import RUN_FIELDS
from cifar_towers.errors import UsageError
from cifar_towers.inference import runs as trained
from cifar_towers.inference.runs import delete_runs
from tests.reporting.example_runs import change, make_run, read_records, read_result, write_records

PROGRAM = Path(__file__).parents[2] / "scripts/runs.py"
SETTINGS = {
    name: value for name, value in dataclasses.asdict(TrainConfig()).items() if name not in ("recipe", "seed", "towers")
}


def make(directory, recipe="speed94", seed=0, metadata=None, **options):
    run = make_run(directory / f"{recipe}-seed{seed}", recipe, seed, **options, **SETTINGS)

    def write(checkpoint):
        (checkpoint / "state").write_bytes(bytes(1_000_000))
        if metadata:
            (checkpoint / "metadata.json").write_text(json.dumps(metadata))

    files.commit(run / f"checkpoints/step-{options.get('last_step', 264):08}", write)
    return run


@pytest.fixture
def runs(tmp_path):
    """Twenty runs: finished, stopped, at work, damaged, without a step; and directories that are none."""
    for recipe in ("speed94", "resnet20", "a-recipe-with-a-name-that-is-long"):
        for seed in range(5):
            make(tmp_path, recipe, seed, towers=1 + seed)
    make(tmp_path, seed=5, finished=False, last_step=132)
    damaged = make(tmp_path, seed=6)
    (damaged / "checkpoints/step-00000264/state").write_bytes(b"short")
    make(tmp_path, seed=7)
    begun = tmp_path / "speed94-seed8"
    begun.mkdir()
    (begun / "config.json").write_text(json.dumps(SETTINGS | {"recipe": "speed94", "seed": 8}))
    make(tmp_path / "elsewhere", "speed94", 9, finished=False, last_step=11)
    for name in ("benchmark-speed94", "speed94-seeds/train"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text("{}")
    with files.locked(tmp_path / "speed94-seed7/.lock"):
        yield tmp_path


def start(*arguments, answer=""):
    command = [sys.executable, PROGRAM, *map(str, arguments)]
    return subprocess.run(command, input=answer, capture_output=True, text=True)


def test_table_has_every_run_and_its_state_in_120_columns(runs):
    table = trained.format_table(trained.find_runs(runs), runs).splitlines()
    lines = table[: table.index("")]
    assert len(lines) == 21 and max(map(len, table)) <= 120
    states = {line.split()[0]: line for line in lines}
    for seed, state in ((0, "done"), (5, "stopped at 132"), (6, "damaged"), (7, "running at 264"), (8, "no step yet")):
        assert f"  {state}  " in states[f"speed94-seed{seed}"]
    accuracies = {score["tta"]: score["accuracy"] for score in read_result(runs / "speed94-seed1")["evaluations"]}
    plain, augmented = (f"{100 * accuracies[tta]:.2f}" for tta in (0, 2))
    assert states["speed94-seed1"].split() == [
        "speed94-seed1", "cifar10", "2", "done", plain, augmented, "1,876", "9.7", "-", "abc1231", "2",
    ]  # fmt: skip


def test_goodput_of_runs_in_all_states(tmp_path):
    """A run is sorted before the others if it is of a version without goodput; time until now counts if it stopped."""
    now = time.time()
    parts = {"start": 10.0, "train": 60.0, "lost": 10.0, "not_running": 20.0}
    make(tmp_path, seed=0)
    done = make(tmp_path, seed=1)
    change(done, "result.json", seconds=parts, goodput=0.6, lost_steps=3)
    times = {"images": 300, "step": 140, "lost_steps": 3, "first_start": now - 200, "seconds": parts}
    stopped = make(tmp_path, seed=2, finished=False, last_step=132, metadata=times | {"step": 132})
    (stopped / "times.json").write_text(json.dumps(times | {"seconds": parts | {"train": 90.0}}))
    make(tmp_path, seed=3, finished=False, last_step=132, metadata=times | {"first_start": now - 240})
    unsaved = make_run(tmp_path / "unsaved", "speed94", 4, finished=False, last_step=11, **SETTINGS)
    (unsaved / "times.json").write_text(json.dumps(times))
    damaged = make_run(tmp_path / "damaged", "speed94", 5, finished=False, last_step=11, **SETTINGS)
    (damaged / "times.json").write_text(json.dumps(times)[:50])
    found = {run.record.config["seed"]: run for run in trained.sort_runs(trained.find_runs(tmp_path), "goodput")}
    assert list(found) in ([5, 0, 4, 3, 2, 1], [0, 5, 4, 3, 2, 1])
    shares = [found[seed].goodput for seed in range(6)]
    assert shares == [None, 0.6, pytest.approx(0.3, abs=0.01), pytest.approx(0.25, abs=0.01), 0.0, None]
    assert found[2].seconds["lost"] == 40 and found[2].seconds["not_running"] == pytest.approx(90, abs=2)
    assert found[4].seconds["lost"] == 70 and found[1].minutes == 80 / 60
    table = trained.format_table(list(found.values()), tmp_path)
    assert " 60.0  abc1231" in table and max(map(len, table.splitlines())) <= 120
    printed = [json.loads(line) for line in trained.format_json([found[1], found[5]]).splitlines()]
    assert printed[0]["goodput"] == 0.6 and printed[0]["seconds"] == parts and printed[1]["goodput"] is None


def test_running_run_has_lost_no_step_since_its_checkpoint(tmp_path):
    now, parts = time.time(), {"start": 10.0, "train": 60.0, "lost": 10.0}
    times = {"images": 300, "step": 140, "lost_steps": 3, "first_start": now - 100, "seconds": parts}
    run = make(tmp_path, finished=False, last_step=132, metadata=times | {"seconds": parts | {"train": 20.0}})
    (run / "times.json").write_text(json.dumps(times))
    (stopped,) = trained.find_runs(tmp_path)
    assert stopped.seconds["lost"] == 50 and stopped.goodput == pytest.approx(0.2, abs=0.01)
    with files.locked(run / ".lock"):
        (running,) = trained.find_runs(tmp_path)
    assert running.seconds["lost"] == 10 and running.goodput == pytest.approx(0.6, abs=0.01)


def test_scores_of_an_earlier_step_have_their_step(tmp_path):
    """Evaluations are due every 66 steps, and this run stopped at step 121."""
    make(tmp_path, finished=False, last_step=121)
    (run,) = trained.find_runs(tmp_path)
    assert (run.step, run.scored_step) == (121, 66)
    line = trained.format_table([run], tmp_path).splitlines()[1]
    assert f"stopped at 121  {100 * run.accuracy:.2f} at 66  " in line
    make(tmp_path, seed=1)
    assert " at " not in trained.format_table(trained.find_runs(tmp_path, "*seed1"), tmp_path).splitlines()[1]


def test_runs_are_told_apart_by_their_paths(runs):
    """Recipe and seed follow where the path does not say them, and the end of a long path is what is kept."""
    (run,) = trained.find_runs(runs, "speed94-seed0")
    for path, shown in (
        ("speed94-seed0", "speed94-seed0  "),
        ("high/seed0", "high/seed0 (speed94, seed 0)"),
        ("a-folder-with-a-long-name/low/seed0", "…er-with-a-long-name/low/seed0"),
        ("a-folder-with-a-name-in-\udce9-and\n-/seed0", r"…a-name-in-\udce9-and\n-/seed0"),
    ):
        table = trained.format_table([run._replace(run=f"{runs}/{path}")], runs)
        assert table.splitlines()[1].startswith(shown), table
    one, other = (run._replace(run=f"{runs}/a-name-that-is-long-in-both-{name}/seed0") for name in ("high", "low"))
    names = [line[: trained.NAME_WIDTH] for line in trained.format_table([one, other], runs).splitlines()[1:3]]
    assert names[0] != names[1]


def test_accuracies_are_of_averaged_weights_and_not_of_the_better_ones(tmp_path):
    run = make(tmp_path, ema=True)
    evaluations = read_result(run)["evaluations"]
    for evaluation in evaluations:
        evaluation["accuracy"] = 0.99 if evaluation["weights"] == "raw" else (0.94 if evaluation["tta"] else 0.93)
    raw = [evaluation for evaluation in evaluations if evaluation["weights"] == "raw"]
    for shown, expected in ((evaluations, ("ema", 0.93, 0.94)), (raw, ("raw", 0.99, 0.99))):
        write_evaluations(run, shown)
        (found,) = trained.find_runs(tmp_path)
        assert (found.weights, found.accuracy, found.tta_accuracy) == expected


def test_accuracies_on_validation_images_are_marked(tmp_path):
    """A run that has them is scored on the test images at its end."""
    records = read_records(make(tmp_path, finished=False, last_step=121))
    held_out = [record | {"split": "validation"} if record["kind"] == "eval" else record for record in records]
    write_records(tmp_path / "speed94-seed0", held_out)
    make(tmp_path, seed=1)
    stopped, done = trained.find_runs(tmp_path)
    lines = trained.format_table([stopped, done], tmp_path).splitlines()
    assert f"{100 * stopped.accuracy:.2f} val at 66  " in lines[1] and " val" not in lines[2]
    printed = [json.loads(line)["split"] for line in trained.format_json([stopped, done]).splitlines()]
    assert printed == ["validation", "test"]


def write_evaluations(run, evaluations):
    """Leave these evaluations alone in a run's result."""
    change(run, "result.json", evaluations=evaluations)
    write_records(run, [record for record in read_records(run) if record["kind"] == "train"])


def test_contents_of_checkpoints_are_compared_only_when_asked(runs):
    state = runs / "speed94-seed0/checkpoints/step-00000264/state"
    state.write_bytes(b"x" * state.stat().st_size)
    for flags, expected in (([], "done"), (["--verify"], "damaged")):
        line = start(f"--runs_dir={runs}", "speed94-seed0", "--json", *flags).stdout
        assert json.loads(line)["state"] == expected


@pytest.mark.parametrize("name", ["config.json", "result.json", "environment.json"])
def test_run_with_a_damaged_file_is_shown_as_damaged(runs, name):
    (runs / "speed94-seed0" / name).write_text("{")
    (run,) = trained.find_runs(runs, "speed94-seed0")
    assert run.state == "damaged" and run.seed == (None if name == "config.json" else 0)


def test_runs_are_found_by_pattern_sorted_and_printed_as_json(runs):
    found = start(f"--runs_dir={runs}", "resnet20*", "--sort=accuracy", "--json")
    records = [json.loads(line) for line in found.stdout.splitlines()]
    assert [record["recipe"] for record in records] == 5 * ["resnet20"], found.stderr
    assert [record["accuracy"] for record in records] == sorted(record["accuracy"] for record in records)
    assert tuple(records[0]) == (*RUN_FIELDS, "seconds") == trained.RunSummary._fields[:-1]
    for key in RUN_FIELDS:
        trained.sort_runs(trained.find_runs(runs), key)
    assert start(f"--runs_dir={runs}", "nothing*").stdout == "no runs\n"
    missing = start("--runs_dir=/nowhere")
    assert missing.returncode == 2 and missing.stderr.startswith("usage: there is no directory /nowhere; ")
    wrong = start(f"--runs_dir={runs}", "--sort=speed")
    assert wrong.returncode == 2 and "accuracy" in wrong.stderr


def test_best_run_is_the_finished_one_with_the_highest_accuracy(runs):
    finished = [read_result(runs / f"speed94-seed{seed}")["evaluations"] for seed in range(5)]
    best = max(range(5), key=lambda seed: finished[seed][1]["accuracy"])
    assert start(f"--runs_dir={runs}", "--best=speed94").stdout == f"{runs}/speed94-seed{best}\n"
    with pytest.raises(UsageError, match="no run of speed95 is finished; finished recipes: a-recipe.*, speed94"):
        trained.best_run(trained.find_runs(runs), "speed95")


def test_best_run_is_chosen_by_validation_images_if_all_runs_have_some(tmp_path, caplog):
    caplog.set_level("INFO")
    said = "chosen by its test accuracy, which is therefore too high; train runs with --validation_examples"
    for seed, (validation, test) in enumerate(((0.91, 0.92), (0.93, 0.90), (None, 0.94))):
        scores = [{"split": "test", "accuracy": test}, {"split": "validation", "accuracy": validation}]
        kind = {"weights": "raw", "tta": 0, "count": 100}
        write_evaluations(make(tmp_path, seed=seed), [kind | score for score in scores[: 2 if validation else 1]])
    found = trained.find_runs(tmp_path)
    assert trained.best_run(found[:2], "speed94") == found[1] and not caplog.messages
    assert trained.best_run(found[2:], "speed94") == found[2] and not caplog.messages  # there was no choice
    assert trained.best_run(found, "speed94") == found[2] and caplog.messages == [said]


def test_best_run_is_of_one_data_set(runs, caplog):
    """A run on forty pictures of its own does not beat those on the recipe's data."""
    for seed in range(4):
        evaluations = [score | {"accuracy": 1.0} for score in read_result(runs / f"speed94-seed{seed}")["evaluations"]]
        write_evaluations(runs / f"speed94-seed{seed}", evaluations)
        change(runs / f"speed94-seed{seed}", "result.json", dataset="folder:/pictures")
    assert start(f"--runs_dir={runs}", "--best=speed94").stdout == f"{runs}/speed94-seed4\n"
    found = trained.find_runs(runs, "speed94-seed[0-4]")
    with pytest.raises(UsageError, match="several data sets.*: cifar10, folder:/pictures; .*pattern"):
        trained.best_run(found, "speed94")
    with caplog.at_level("INFO"):
        assert trained.best_run(found[:4], "speed94", "cifar10").data == "folder:/pictures"
    assert "no run of speed94 on cifar10" in caplog.text and "folder:/pictures" in caplog.text
    assert start(f"--runs_dir={runs}", "--best=speed94", "speed94-seed1").stdout == f"{runs}/speed94-seed1\n"


def test_best_run_is_of_one_test_set(tmp_path):
    """The data set of the second run has kept its name, and its test images have changed."""
    for seed in range(2):
        make(tmp_path, seed=seed)
    found = trained.find_runs(tmp_path)
    assert trained.best_run(found, "speed94", "cifar10") in found
    change(tmp_path / "speed94-seed1", "environment.json", data_sha256={"train": "c50e2d9aebe4fd88", "test": "other"})
    for data in ("", "cifar10"):
        with pytest.raises(UsageError, match="whose test images changed, .* compare: cifar10; give a pattern"):
            trained.best_run(trained.find_runs(tmp_path), "speed94", data)


def test_groups_of_seeds_on_the_same_data_are_compared(tmp_path):
    for recipe, seed in itertools.product(("speed94", "resnet20"), range(2)):
        make(tmp_path, recipe, seed)
    two = trained.find_runs(tmp_path)
    lines = trained.format_table(two, tmp_path).splitlines()
    assert len([line for line in lines if re.match("resnet20 - speed94: .* points .95 % ", line)]) == 1
    for others in ([run._replace(data=run.recipe) for run in two], two[:1]):  # on other data; a single run
        assert " points " not in trained.format_table(others, tmp_path)


def test_deleting_asks_and_takes_what_the_run_wrote(runs):
    one, other = runs / "speed94-seed0", runs / "speed94-seed1"
    (other / "notes.txt").write_text("mine")
    for answer in ("", "no\n"):
        refused = start("--delete", one, other, answer=answer)
        assert refused.returncode == 0 and f"delete {one}, {other}, 3 MB? [y/N] " in refused.stdout
        assert "nothing was deleted" in refused.stdout and one.exists(), refused.stderr
    assert start("--delete", one, other, answer="y\n").stdout.endswith(f"deleted {one}, {other}\n")
    assert not one.exists() and [path.name for path in other.iterdir()] == ["notes.txt"]


def test_deleting_takes_what_killed_writes_left_and_links_without_their_targets(tmp_path):
    run, elsewhere = make(tmp_path / "runs"), tmp_path / "elsewhere"
    for name in (".tmp-config.json", ".tmp-result.json"):
        (run / name).write_text("{")
    (run / "checkpoints").rename(elsewhere)
    (run / "checkpoints").mkdir()
    (run / "checkpoints/step-00000264").symlink_to(elsewhere / "step-00000264")
    assert delete_runs([run], lambda question: True) == f"deleted {run}"
    assert not run.exists() and (elsewhere / "step-00000264/state").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("speed94-seed7", "is being written, so nothing was deleted; end its training first"),
        ("benchmark-speed94", "is no run, so nothing was deleted"),
        ("nowhere", "is no run, so nothing was deleted"),
    ],
)
def test_deleting_is_refused_without_a_question(runs, name, message):
    with pytest.raises(UsageError, match=message):
        delete_runs([runs / "speed94-seed0", runs / name], confirm=None)
    assert (runs / "speed94-seed0/result.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--delete"], "delete which runs? write: runs.py --delete runs/one"),
        (["one", "other"], "one other: give one pattern, in quotes"),
        (["--best=speed94", "--json"], "best prints one directory; leave the other flags"),
    ],
)
def test_usage(arguments, message):
    done = start(*arguments)
    assert done.returncode == 2 and done.stderr.startswith(f"usage: {message}")

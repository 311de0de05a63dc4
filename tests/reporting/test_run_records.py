import json
from pathlib import Path

import numpy as np
import pytest

from cifar_towers import files
from cifar_towers.errors import DataError, UsageError
from cifar_towers.reporting import run_records
from tests.reporting.example_runs import change, make_run, read_records, write_records


def group_names(directories):
    groups = run_records.group_by_recipe(run_records.read_runs(directories))
    return {name: [run.name for run in group] for name, group in groups.items()}


def test_runs_of_one_recipe_with_other_settings_are_groups_of_their_own(tmp_path):
    settings = [(0, 1536, 2), (1, 512, 2), (2, 512, 2), (0, 512, 4), (3, 512, 2)]
    for name, (seed, batch_size, towers) in zip("abcde", settings, strict=True):
        make_run(tmp_path / name, seed=seed, batch_size=batch_size, towers=towers)
    change(tmp_path / "e", "environment.json", synthetic_data="SYNTHETIC DATA, NOT CIFAR-10")
    make_run(tmp_path / "f", seed=4, batch_size=512, data_dir="/elsewhere", dataset="auto", overwrite=True)
    change(tmp_path / "f", "config.json", workers="127.0.0.1:5000,127.0.0.1:5001", profile_steps="1:2")
    groups = group_names([tmp_path / name for name in "abcdef"])
    assert sorted(groups.values()) == [["a"], ["b", "c", "f"], ["d"], ["e"]]
    assert all(name.startswith("speed94, batch_size=") for name in groups)


def test_long_group_names_are_shortened_and_distinct(tmp_path):
    runs = [make_run(tmp_path / f"r{i}", "n" * 100 + str(i), last_step=66) for i in range(2)]
    assert [len(name) for name in group_names(runs)] == [44, 47]


def test_run_names_are_the_shortest_ends_of_paths_that_differ(tmp_path):
    paths = [make_run(tmp_path / name / "seed0", last_step=66) for name in ("one", "other")]
    assert [run.name for run in run_records.read_runs(paths[:1])] == ["seed0"]
    assert [run.name for run in run_records.read_runs(paths)] == ["one/seed0", "other/seed0"]


@pytest.mark.parametrize("name", ["config.json", "result.json"])
def test_banner_of_requested_synthetic_data(tmp_path, name):
    path = make_run(tmp_path / "run")
    assert not run_records.read_runs([path])[0].banner
    change(path, name, dataset="synthetic")
    banner = "SYNTHETIC DATA, NOT CIFAR-10: these accuracies say nothing about CIFAR-10."
    assert run_records.read_runs([path])[0].banner == banner


@pytest.mark.parametrize(
    ("directories", "message"),
    [
        (["none"], "there is no directory"),
        (["run", "run/../run"], "given twice"),
        (["run", "empty"], "holds no records of a run in metrics.jsonl"),
    ],
)
def test_directories_that_are_no_runs(tmp_path, directories, message):
    make_run(tmp_path / "run", last_step=66)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=message) as error:
        run_records.read_runs([tmp_path / directory for directory in directories])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["config.json", "environment.json", "result.json"])
@pytest.mark.parametrize("content", ['{"step": 26', "[]", "\xff"])
def test_damaged_file_is_one_error(tmp_path, name, content):
    path = make_run(tmp_path / "run", last_step=66)
    (path / name).write_bytes(content.encode("latin1"))
    with pytest.raises(DataError, match=f"{path / name} cannot be read"):
        run_records.read_runs([path])


def test_groups_with_two_finished_runs_are_compared_by_the_accuracies_they_report(tmp_path):
    """The accuracies are those of the averaged weights with TTA, and the interval is Welch's."""
    paths = [make_run(tmp_path / f"{recipe}{seed}", recipe, seed, ema=True) for recipe in "ab" for seed in range(3)]
    paths.append(make_run(tmp_path / "single", "single"))
    for path, accuracy in zip(paths[:6], (0.94, 0.95, 0.96, 0.91, 0.93, 0.95), strict=True):
        result = json.loads((path / "result.json").read_text())
        for score in result["evaluations"]:
            score["accuracy"] = accuracy if (score["weights"], score["tta"]) == ("ema", 2) else 0.5
        change(path, "result.json", evaluations=result["evaluations"])
        write_records(path, read_records(path, "train"))
    groups = run_records.group_by_recipe(run_records.read_runs(paths))
    ((one, other, text),) = run_records.compare_groups(groups)
    assert (one, other) == ("a", "b") and text.startswith("+2.00 points (95 % interval -2.16 to +6.16)")


def test_resuming_removes_later_records_and_incomplete_lines(tmp_path):
    metrics = run_records.JsonlWriter(tmp_path)
    for step in (5, 10, 15):
        metrics.write(kind="train", step=step)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "tr')  # a crash in the middle of a line
    metrics = run_records.JsonlWriter(tmp_path)
    metrics.keep(lambda record: record["step"] <= 10)
    metrics.write(kind="train", step=11)
    metrics.write(kind="eval", step=11, accuracy=np.float32(np.nan))
    assert [record["step"] for record in run_records.read_records(tmp_path / "metrics.jsonl")] == [5, 10, 11, 11]
    assert metrics.records("eval") == [{"kind": "eval", "step": 11, "accuracy": None}]


def test_incomplete_line_damages_no_other_record(tmp_path, monkeypatch):
    metrics = run_records.JsonlWriter(tmp_path)
    metrics.write(kind="train", step=1)
    path = tmp_path / "metrics.jsonl"

    def open_on_full_disk(self, mode="r"):
        with open(path, "a") as file:
            file.write('{"kind": "tra')
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", open_on_full_disk)
        metrics.write(kind="train", step=2)
    metrics.write(kind="train", step=3)
    path.write_bytes(path.read_bytes() + b'\xff\xfe\n{"step": 4}\n[]\n')
    assert [record["step"] for record in run_records.read_records(path)] == [1, 3]


def test_nonfinite_numbers_become_null(tmp_path):
    value = {"a": [np.nan, (1, -np.inf)], "b": {"c": np.float32(np.inf), "d": np.int64(3), "e": Path("x")}, "f": True}
    expected = {"a": [None, [1, None]], "b": {"c": None, "d": 3, "e": "x"}, "f": True}
    assert json.loads(files.to_json(value)) == expected
    for content in ({"x": 1}, value):
        files.write_json(tmp_path / "a.json", content)  # replaced atomically
    assert files.read_json(tmp_path / "a.json") == expected and len(list(tmp_path.iterdir())) == 1
    run_records.JsonlWriter(tmp_path).write(kind="train", step=1, towers={"loss": [np.nan, 1.0]})
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()

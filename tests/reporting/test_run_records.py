from pathlib import Path

import numpy as np
import pytest

from cifar_towers.errors import UsageError
from cifar_towers.reporting import run_records
from tests.reporting.example_runs import change, make_run


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


def test_runs_on_other_images_of_any_split_are_a_group_of_their_own(tmp_path):
    """Runs without digests, as those of before digests were recorded, are grouped by the name of their data."""
    digests = [("a", "b"), ("a", "b"), ("a", "c"), ("a", "c"), ("d", "b")]
    paths = [make_run(tmp_path / str(seed), seed=seed, dataset="folder:/photos") for seed in range(9)]
    for path, (train, test) in zip(paths, digests, strict=False):
        change(path, "environment.json", data_sha256={"train": train, "test": test})
    change(paths[5], "environment.json", data_sha256={"train": "a", "validation": "e", "test": "b"})
    for path in paths[6:]:
        change(path, "environment.json", data_sha256={})
    change(paths[8], "config.json", dataset="npz:/photos")
    groups = group_names(paths)
    assert list(groups.values()) == [["0", "1"], ["2", "3"], ["4"], ["5"], ["6", "7"], ["8"]]
    assert "speed94, train_data=a, test_data=c" in groups


def test_accuracies_on_other_test_images_are_not_compared(tmp_path):
    """A data set that has kept its name may have grown. Digests of images of other sizes tell nothing."""
    runs = [*((recipe, seed) for recipe in ("speed94", "other") for seed in range(2))]
    paths = [make_run(tmp_path / f"{recipe}{seed}", recipe, seed, image_size=32) for recipe, seed in runs]

    def num_differences():
        return len(run_records.compare_groups(run_records.group_by_recipe(run_records.read_runs(paths))))

    assert num_differences() == 1
    for path in paths[2:]:
        change(path, "environment.json", data_sha256={"train": "other", "test": "other"})
    assert num_differences() == 0
    for path in paths[2:]:
        change(path, "config.json", image_size=64)
    assert num_differences() == 1
    for path in paths[2:]:
        change(path, "config.json", image_size=32)
        change(path, "environment.json", data_sha256={})
    assert num_differences() == 1
    for path in paths[2:]:
        change(path, "result.json", dataset="svhn_cropped")
    assert num_differences() == 0


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


def test_resuming_removes_later_records_and_incomplete_lines(tmp_path):
    metrics = run_records.JsonlWriter(tmp_path)
    for step in (5, 10, 15):
        metrics.write(kind="train", step=step)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "tr')  # a crash in the middle of a line
    metrics = run_records.JsonlWriter(tmp_path)
    metrics.keep(lambda record: record["step"] <= 10)
    metrics.write(kind="train", step=11)
    metrics.write(kind="eval", step=11, accuracy=0.5)
    assert [record["step"] for record in run_records.read_records(tmp_path / "metrics.jsonl")] == [5, 10, 11, 11]
    assert metrics.records("eval") == [{"kind": "eval", "step": 11, "accuracy": 0.5}]


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
    run_records.JsonlWriter(tmp_path).write(kind="train", step=1, **value)
    expected = {"a": [None, [1, None]], "b": {"c": None, "d": 3, "e": "x"}, "f": True}
    assert run_records.JsonlWriter(tmp_path).records("train") == [{"kind": "train", "step": 1} | expected]
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()

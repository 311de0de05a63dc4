"""The table of runs, in all states that a run can be in; groups of runs and their differences."""

import json
import math

import numpy as np
import pytest

from cifar_towers.errors import UsageError
from cifar_towers.runs import table
from cifar_towers.runs.table import Sample, describe_difference, student_t
from tests.helpers.example_runs import (
    change,
    make_run,
    make_runs,
    read_result,
    write_records,
    write_scores,
)
from tests.helpers.programs import call

KEYS = """run recipe data seed towers state step split weights accuracy tta_accuracy images_per_sec
    minutes revision"""  # of `runs --json`


@pytest.fixture
def runs(tmp_path):
    """Make runs that are finished, unfinished, without a step; and a directory that is none."""
    make_runs(tmp_path)
    make_runs(tmp_path, recipe="resnet20")
    for name, seed, settings in (
        ("speed94-seed3", 3, {"finished": False, "last_step": 5}),
        ("elsewhere/speed94-seed9", 9, {"finished": False, "last_step": 1}),
        ("speed94-seed6", 6, {"finished": False, "last_step": 0}),
    ):
        make_run(tmp_path / name, seed=seed, **settings)
    for name in ("environment.json", "metrics.jsonl"):
        (tmp_path / "speed94-seed6" / name).unlink()
    (tmp_path / "no-run").mkdir()
    (tmp_path / "no-run/config.json").write_text("{}")
    return tmp_path


@pytest.fixture
def listed(monkeypatch, capsys):
    """listed(directory, ...): what the program prints."""

    def run(directory, *arguments):
        assert call(monkeypatch, "runs", f"--runs_dir={directory}", *arguments) == 0
        return capsys.readouterr().out

    return run


def test_table_has_every_run_and_its_state(runs, listed):
    rows = {}
    for line in listed(runs).splitlines():
        cells = line.split()
        if cells and "seed" in cells[0]:
            rows[cells[0]] = cells[1:]

    assert len(rows) == 9
    assert "elsewhere/speed94-seed9" in rows

    for seed, state, step in ((0, "done", "8"), (3, "unfinished", "5"), (6, "unfinished", "0")):
        assert {state, step} <= {*rows[f"speed94-seed{seed}"]}
    scores = read_result(runs / "speed94-seed1")["evaluations"]
    accuracies = [f"{score['accuracy']:.4f}" for score in scores]  # without and with TTA
    minutes = f"{(4.2 + 21.5 + 541.25 + 2.5 + 11) / 60:.1f}"
    row = ["speed94", "cifar10", "done", "8", "test", *accuracies, "1,876.4", minutes]

    assert rows["speed94-seed1"] == row


PLAIN = {"accuracy": 0.93}
AUGMENTED = {"tta": True, "accuracy": 0.94}
HELD_OUT = {"split": "validation", "accuracy": 0.99}


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([HELD_OUT, HELD_OUT | AUGMENTED, PLAIN, PLAIN | AUGMENTED], ("test", "raw", 0.93, 0.94)),
        ([PLAIN | {"weights": "ema"}], ("test", "ema", 0.93, None)),
        ([HELD_OUT], ("validation", "raw", 0.99, None)),
    ],
)
def test_accuracies_are_of_the_test_split_and_not_of_the_better_one(tmp_path, scores, expected):
    write_scores(make_run(tmp_path / "run"), *scores)
    found = table.describe(*table.find_runs(tmp_path))
    names = ("split", "weights", "accuracy", "tta_accuracy")
    assert tuple(found[name] for name in names) == expected


def test_runs_are_found_by_pattern_and_are_objects_for_other_programs(runs, listed):
    records = [json.loads(line) for line in listed(runs, "resnet20*", "--json").splitlines()]

    assert [record["seed"] for record in records] == [0, 1, 2]
    assert {record["recipe"] for record in records} == {"resnet20"}
    assert [*records[0]] == KEYS.split()

    plain = read_result(runs / "resnet20-seed0")["evaluations"][0]
    assert records[0]["accuracy"] == plain["accuracy"]
    assert listed(runs, "nothing*") == f"no runs in {runs} match nothing*\n"

    (record,) = listed(runs, "else*", "--json").splitlines()  # of the directory that it is in
    assert json.loads(record)["run"].endswith("elsewhere/speed94-seed9")


@pytest.mark.parametrize(
    ("use", "named"),
    [
        (lambda runs: table.find_runs(runs / "nowhere"), "nowhere; .*--runs_dir"),
        (lambda runs: table.read_runs([runs / "speed94-seed0", runs / "nowhere"]), "nowhere"),
        (lambda runs: table.read_runs([runs / "speed94-seed0", runs / "no-run"]), "no-run"),
    ],
)
def test_what_has_no_runs_is_refused_by_name(runs, use, named):
    with pytest.raises(UsageError, match=named):
        use(runs)


# Groups and their differences ---------------------------------------------------------------------


def grouped(*directories):
    return table.group_by_recipe(table.read_runs(directories))


def group_names(directories):
    names = {}
    for group in grouped(*directories):
        names[group.name] = [run.name for run in group.runs]
    return names


@pytest.fixture
def pairs(tmp_path):
    """Make two runs of each learning rate, whose means differ by 4.40 points."""
    for name, accuracies in (("lr0.3", (0.89, 0.91)), ("lr1.5", (0.943, 0.945))):
        for path, accuracy in zip(make_runs(tmp_path / "all", 2, name), accuracies, strict=True):
            write_scores(path, {"accuracy": accuracy})
    return sorted((tmp_path / "all").iterdir())


def test_difference_has_welchs_interval():
    """Degrees of freedom by hand: 50 / 17 = 2.9 for deviations of 1 and 2, and 4 for equal ones.
    Pooled variances would give 4 for both, and narrower intervals.
    """
    one = Sample.of([0.94, 0.95, 0.96])
    other = Sample.of([0.91, 0.93, 0.95])

    assert np.allclose(one, (0.95, 0.01, 3))
    assert np.allclose(other, (0.93, 0.02, 3))

    half = 100 * student_t(50 / 17) * np.sqrt((0.01**2 + 0.02**2) / 3)
    interval = f"(Welch, 95 % {2 - half:+.2f} to {2 + half:+.2f}), n=3 and 3"

    assert describe_difference(one, other) == f"+2.00 points {interval}"
    assert describe_difference(other, one).startswith("-2.00 points")

    half = 100 * 2.776 * np.sqrt(2 * 0.01**2 / 3)
    interval = f"{2 - half:+.2f} to {2 + half:+.2f}"

    assert interval in describe_difference(one, one._replace(mean=0.93))
    assert describe_difference(Sample(0.9, 0, 2), Sample(0.8, 0, 2)) == "+10.00 points, n=2 and 2"


@pytest.mark.parametrize("degrees", [1, 1.2, 1.5, 1.98, 2, 2.9, 3.5, 10, 30, 45.5, 1000])
def test_quantiles_of_students_t_are_those_of_its_density(degrees):
    x = np.linspace(0, 30, 100_001)
    density = (1 + x**2 / degrees) ** (-(degrees + 1) / 2) / np.sqrt(degrees * np.pi)
    density *= np.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2))
    below = 0.5 + np.cumsum(density) * (x[1] - x[0])
    assert student_t(degrees) == pytest.approx(np.interp(0.975, below, x), rel=0.03)


def test_runs_of_one_recipe_with_other_settings_are_groups_of_their_own(tmp_path):
    settings = [(0, 1536, 2), (1, 512, 2), (2, 512, 2), (0, 512, 4), (3, 512, 2)]
    for name, (seed, batch_size, towers) in zip("abcde", settings, strict=True):
        make_run(tmp_path / name, seed=seed, batch_size=batch_size, towers=towers)
    make_run(
        tmp_path / "f",
        seed=4,
        batch_size=512,
        data_dir="/elsewhere",
        dataset="auto",
        overwrite=True,
    )
    change(tmp_path / "f", "config.json", profile_steps="1:2")
    groups = group_names([tmp_path / name for name in "abcdef"])

    assert list(groups.values()) == [["a"], ["b", "c", "e", "f"], ["d"]]
    assert all(name.startswith("speed94, batch_size=") for name in groups)


def test_runs_on_other_images_or_with_other_code_or_lineage_are_a_group_of_their_own(tmp_path):
    digests = [("a", "b"), ("a", "b"), ("a", "c"), ("a", "c"), ("d", "b")]
    paths = [
        make_run(tmp_path / str(seed), seed=seed, dataset="folder:/photos") for seed in range(8)
    ]
    for path, (train, test) in zip(paths, digests, strict=False):
        change(path, "environment.json", data_sha256={"train": train, "test": test})
    change(paths[5], "environment.json", data_sha256={"train": "a", "validation": "e", "test": "b"})
    change(
        paths[6],
        "environment.json",
        data_sha256={"train": "a", "test": "b"},
        code_sha256={"model": "edited"},
    )
    change(
        paths[7],
        "environment.json",
        data_sha256={"train": "a", "test": "b"},
        lineage=["from step 10: towers 1 -> 2"],
    )
    groups = group_names(paths)

    assert list(groups.values()) == [["0", "1"], ["2", "3"], ["4"], ["5"], ["6"], ["7"]]
    assert "speed94, train_data=a, test_data=c" in groups


def test_difference_reads_in_the_order_of_its_names(pairs):
    assert table.compare_groups(grouped(*pairs[2:], *pairs[:2])) == [
        "lr1.5 - lr0.3: +4.40 points (Welch, 95 % -7.84 to +16.64), n=2 and 2; test"
    ]
    line = table.compare_groups(grouped(*pairs))[0]
    assert line.startswith("lr0.3 - lr1.5: -4.40 points (Welch, 95 % -16.64 to +7.84)")


def test_table_is_followed_by_the_means_of_groups_and_the_difference_of_two(pairs, listed):
    place = pairs[0].parent
    means = ["lr0.3: test 90.00 ± 1.41 % (n=2)", "lr1.5: test 94.40 ± 0.14 % (n=2)"]
    difference = "lr0.3 - lr1.5: -4.40 points (Welch, 95 % -16.64 to +7.84), n=2 and 2; test"
    make_runs(place, 2, "single")
    (place / "single-seed1/result.json").unlink()

    assert listed(place).split("\n\n")[-1].splitlines() == [*means, difference]

    make_runs(place, 2, "third")
    third = "third: test 85.60 ± 0.85 % (n=2), test_tta 86.20 ± 0.85 % (n=2)"

    assert listed(place).split("\n\n")[-1].splitlines() == [*means, third]


def test_runs_without_repetitions_have_no_line_below_the_table(tmp_path, listed):
    make_run(tmp_path / "one")
    make_run(tmp_path / "other", seed=1, batch_size=2)
    assert listed(tmp_path).endswith(f"{table.NOTE}\n")


def test_a_seed_counts_once_and_the_line_names_what_is_left_out(tmp_path, pairs):
    write_scores(make_run(tmp_path / "again", "lr1.5", 0), {"accuracy": 0.5})
    make_run(tmp_path / "begun", "lr1.5", 0, finished=False)
    high, low = grouped(tmp_path / "begun", *pairs, tmp_path / "again")

    assert [run.name for run in high.runs] == ["all/lr1.5-seed0", "all/lr1.5-seed1"]
    assert high.left_out == ["begun", "again"]
    assert not low.left_out

    (line,) = table.compare_groups([high, low])
    assert "+4.40 points" in line
    assert "n=2 and 2; " in line
    assert "left out: begun, again" in line


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("result.json", {"step": 500}),
        ("environment.json", {"data_sha256": {"train": "other", "test": "4b43d2e153a74d46"}}),
        ("environment.json", {"data_sha256": {"train": "c50e2d9aebe4fd88", "test": "other"}}),
    ],
)
def test_groups_of_other_lengths_or_data_are_not_subtracted(pairs, name, changes):
    for path in pairs[2:]:
        change(path, name, **changes)
        if name == "result.json":
            write_records(path, [{"kind": "train", "step": 500, "epoch": 8}])
    (line,) = table.compare_groups(grouped(*pairs))
    assert line.startswith("lr0.3 - lr1.5: ")
    assert "points" not in line


def test_groups_are_compared_by_a_score_that_all_have(tmp_path):
    paths = [
        *make_runs(tmp_path, recipe="one", ema=True),
        *make_runs(tmp_path, recipe="other", ema=True),
    ]
    for path, accuracy in zip(paths, (0.94, 0.95, 0.96, 0.91, 0.93, 0.95), strict=True):
        scores = read_result(path)["evaluations"]
        for score in scores:
            score["accuracy"] = accuracy if score["tta"] else 0.5
        write_scores(path, *scores)
    text = "one - other: +2.00 points (Welch, 95 % -2.16 to +6.16), n=3 and 3; test_tta"

    assert table.compare_groups(grouped(*paths)) == [text]

    others = [*make_runs(tmp_path, 2, "no-ema"), *make_runs(tmp_path, 2, "third", finished=False)]
    (line,) = table.compare_groups(grouped(*paths[:3], *others))

    assert line.startswith("one - no-ema: +")
    assert line.endswith("; test_tta")


def test_groups_are_compared_on_held_out_images_if_all_have_some(pairs):
    for path, accuracy in zip(pairs, (0.80, 0.82, 0.79, 0.81), strict=True):
        write_scores(path, *read_result(path)["evaluations"], HELD_OUT | {"accuracy": accuracy})
    (line,) = table.compare_groups(grouped(*pairs))

    assert line.startswith("lr0.3 - lr1.5: +1.00 points (Welch, ")
    assert line.endswith("; validation")

    write_scores(pairs[0], *read_result(pairs[0])["evaluations"][:1])
    (line,) = table.compare_groups(grouped(*pairs))

    assert line.endswith("; test")


def test_a_group_is_called_by_the_directory_that_holds_only_its_runs(tmp_path):
    """Otherwise by its recipe, and by the setting that differs from others of this recipe."""
    for folder, batch_size in (("plain", 512), ("large/all", 1024), ("large/rest", 1024)):
        make_runs(tmp_path / folder, 2, batch_size=batch_size)
    for folder, batch_size in (("mixed", 128), ("mixed/small", 64)):
        make_runs(tmp_path / folder, 2, batch_size=batch_size)
    make_runs(tmp_path, 2, "resnet20")
    make_runs(tmp_path, 2, batch_size=256)

    assert list(group_names([tmp_path])) == [
        "large",
        "mixed/small",
        "speed94, batch_size=128",
        "plain",
        "resnet20",
        "speed94, batch_size=256",
    ]
    assert list(group_names([tmp_path / "plain"])) == ["speed94"]
    assert list(group_names([tmp_path / "large", tmp_path / "plain"])) == ["large", "plain"]


def test_a_directory_stands_for_the_runs_in_it_each_once(tmp_path):
    paths = [make_run(tmp_path / name / "seed0", last_step=2) for name in ("one", "other")]
    for given, names in (
        (paths[:1], ["seed0"]),
        (paths, ["one/seed0", "other/seed0"]),
        ([tmp_path], ["one/seed0", "other/seed0"]),
        ([paths[1], tmp_path / "one/../other"], ["seed0"]),
    ):
        assert [run.name for run in table.read_runs(given)] == names

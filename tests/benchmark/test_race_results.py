import pytest

from cifar_towers.benchmark import race_results
from cifar_towers.benchmark.framework_comparison import Competitor
from cifar_towers.benchmark.peak_flops import Ceilings
from cifar_towers.benchmark.race_results import SeedResult
from cifar_towers.files import run_files

FACTS = {
    "recipe": "mine", "model": "speednet94", "batch_size": 1536, "hard_example_pool": 0, "dataset": "cifar10",
    "precision": "float32", "processor": "Abacus", "cores": 2, "tta": 2, "target": 0.94, "date": "2026-01-01",
}  # fmt: skip


def finish(seed, accuracy, train, convolution, reused=False):
    seconds = {"train": train, "input": 4.0, "report": 1.0, "compile": 20.0, "start": 10.0, "evaluate": 30.0}
    return SeedResult(seed, reused, "abc", seconds, 200.0, accuracy, accuracy - 0.01, [Ceilings(convolution, 90.0)] * 2)


FINISHES = [finish(0, 0.939, 95.0, 100.0), finish(1, 0.941, 195.0, 120.0), finish(2, 0.943, 145.0, 140.0, reused=True)]
ROWS = [
    Competitor("cifar_towers", "float32", 1536, 1, 8, [300.0, 320.0, 310.0]),
    Competitor("pytorch", "float32", 1536, 1, 9, [155.0, 150.0, 200.0]),
    Competitor("keras", "float32", 1536, 1, 8, [310.0] * 3),
]


def told(finishes, target=0.94):
    return race_results.tally(finishes, work=18_000_000_000_000, timed_work=9_000_000_000_000, target=target)


def test_the_seconds_to_the_target_are_those_of_all_steps():
    """Of 200 operations 160 are of timed steps, which take 150 s."""
    race = race_results.tally(FINISHES, work=200, timed_work=160, target=0.94)
    assert race["training"]["mean"] == 150 and race["seconds_to_target"] == race["whole_training"] == 187.5
    assert race_results.tally(FINISHES, work=200, timed_work=0, target=0.94)["seconds_to_target"] == 150


def test_means_deviations_and_the_share_of_the_ceiling():
    race = told(FINISHES)
    assert [seed["step_seconds"] for seed in race["seeds"]] == [100, 200, 150]
    assert race["accuracy"] == {"mean": pytest.approx(0.941), "std": pytest.approx(0.002), "n": 3}
    assert race["training"] == {"mean": 150, "std": 50, "n": 3}
    assert race["seconds_to_target"] == 300 and race["compile"]["mean"] == 20 and race["save"]["mean"] == 0
    assert race["ceiling"] == 120 and race["limit_seconds"] == pytest.approx(150)
    assert race["fraction_of_ceiling"] == pytest.approx(9e12 / 150 / 120e9)


def test_a_target_that_is_not_reached_and_one_seed_alone():
    race = told(FINISHES, target=0.9411)
    assert race["seconds_to_target"] is None
    text = race_results.race_text(
        FACTS | {"target": 0.9411}, race | {"operations": {"Conv2D": race["work"]}, "steps": 9}
    )
    assert "Seconds to 94.11 %: not reached: mean 94.10 %, std 0.20, n=3, after 300.0 s of training" in text
    alone = told(FINISHES[:1])
    assert alone["accuracy"]["std"] is None
    text = race_results.race_text(FACTS, alone | {"operations": {"Conv2D": alone["work"]}, "steps": 9})
    assert "mean 93.90 %, n=1" in text and "\nstd" not in text


def test_without_a_target_there_is_no_verdict():
    race = told(FINISHES, target=0.0)
    assert race["seconds_to_target"] is None
    text = race_results.race_text(FACTS | {"target": 0.0}, race | {"operations": {"Conv2D": race["work"]}, "steps": 9})
    assert "Accuracy: mean 94.10 %, std 0.20, n=3, after 300.0 s of training: of its timed steps" in text
    assert "which is in the 20.0 s of compilation too" in text
    assert "reached" not in text and "Seconds to" not in text


def test_a_race_whose_ceilings_were_lost_says_nothing_of_them():
    lost = [SeedResult(**{**vars(each), "ceilings": []}) for each in FINISHES]
    race = told(lost) | {"operations": {}, "steps": 1}
    assert race["fraction_of_ceiling"] is None and "ceiling" not in race_results.race_text(FACTS, race)


def test_the_accuracy_is_of_the_averaged_weights_on_test():
    evaluations = [
        {"split": split, "weights": weights, "tta": tta, "accuracy": score}
        for split, weights, tta, score in [
            ("validation", "raw", 0, 0.1), ("test", "raw", 0, 0.2), ("test", "raw", 2, 0.3), ("test", "ema", 2, 0.4),
        ]
    ]  # fmt: skip
    assert race_results.accuracy(evaluations, 0) == 0.2 and race_results.accuracy(evaluations, 2) == 0.4


def test_what_is_published(tmp_path, capsys):
    race = told(FINISHES) | {"operations": {"MatMul": 6_000_000_000_000, "Conv2D": 12_000_000_000_000}, "steps": 256}
    race_results.publish_race(tmp_path, FACTS | {"hard_example_pool": 3072}, race)
    first = capsys.readouterr().out
    assert "speednet94, batches of 1,536, the hardest of 3,072, cifar10, float32; Abacus" in first
    assert "Seconds to 94.00 %: 300.0 s of training (mean 94.10 %, std 0.20, n=3)" in first
    assert "18,000 GFLOP in 256 steps (Conv2D 66.7 %, MatMul 33.3 %)" in first
    assert "A run at it takes 150.0 s; training ran at 50.0 % of it." in first
    assert "* run by an earlier command: seed 2 (revision abc)" in first and "\n2*  " in first
    race_results.publish_side_by_side(tmp_path, FACTS, ROWS, {"tutorial, float32": "no net"})
    second = capsys.readouterr().out
    assert "batches of 1,536, cifar10" in second
    lines = {line.split()[0]: line.split() for line in second.splitlines() if " float32 " in line and "-" in line}
    assert lines["cifar_towers"][1:] == ["float32", "1", "310", "300-320", "3", "x", "8", "-"]
    assert lines["pytorch"][1:] == ["float32", "1", "155", "150-200", "3", "x", "9", "2.00"]
    assert lines["keras"][1:] == ["float32", "1", "310", "310-310", "3", "x", "8", "1.00"]
    assert "243 steps of 1,536 at the 155 images/s of pytorch, float32, take 2,408 s" in second
    heads = next(line.split() for line in second.splitlines() if line.startswith("contestant"))
    assert heads[3:6] == ["images/s", "min-max", "n"]
    assert "Left out: tutorial, float32: no net" in second and "Seconds to" not in second
    assert "Seconds to 94.00 %" in (tmp_path / "race.txt").read_text()
    assert "take 2,408 s" in (tmp_path / "side_by_side.txt").read_text()
    assert run_files.read_json(tmp_path / "race.json")["training"]["mean"] == 150
    assert run_files.read_json(tmp_path / "side_by_side.json")["contestants"][1]["median"] == 155


def test_from_five_rounds_on_quartiles_are_told(tmp_path):
    row = Competitor("cifar_towers", "float32", 1536, 1, 8, [100.0, 500.0, 300.0, 200.0, 400.0])
    heads, line, *_ = (line.split() for line in race_results.rows_text(FACTS, [row], {}).splitlines())
    assert heads[4] == "quartiles" and line[4:8] == ["200-400", "5", "x", "8"]
    race_results.publish_side_by_side(tmp_path, FACTS, [row], {})
    (told,) = run_files.read_json(tmp_path / "side_by_side.json")["contestants"]
    assert told["quartiles"] == [200, 400] and told["steps"] == 8


def test_only_equal_numbers_of_devices_are_compared():
    rows = [
        Competitor("cifar_towers", "float32", 1536, 4, 8, [1000.0]),
        Competitor("cifar_towers", "float32", 1536, 1, 8, [300.0]),
        Competitor("keras-mirrored", "float32", 1536, 4, 8, [500.0]),
        Competitor("pytorch", "float32", 1536, 1, 8, [600.0]),
    ]
    lines = [line.split() for line in race_results.rows_text(FACTS, rows, {}).splitlines()[:5]]
    assert lines[0][2] == "devices"
    assert [(line[0], line[2], line[-1]) for line in lines[1:]] == [
        ("cifar_towers", "4", "-"),
        ("pytorch", "1", "0.50"),
        ("keras-mirrored", "4", "2.00"),
        ("cifar_towers", "1", "-"),
    ]

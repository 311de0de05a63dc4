import dataclasses

import pytest

from cifar_towers.benchmark import race_results
from cifar_towers.benchmark.framework_comparison import Comparison, Competitor
from cifar_towers.benchmark.peak_flops import PeakFlops
from cifar_towers.benchmark.race_results import SeedResult
from cifar_towers.files import run_files

FACTS = {
    "recipe": "mine", "model": "speednet94", "batch_size": 1536, "hard_example_pool": 0, "dataset": "cifar10",
    "precision": "float32", "processor": "Abacus", "cores": 2, "tta": 2, "target": 0.94, "date": "2026-01-01",
}  # fmt: skip


def make_result(seed, accuracy, train, convolution, reused=False):
    seconds = {"train": train, "input": 4.0, "report": 1.0, "compile": 20.0, "start": 10.0, "evaluate": 30.0}
    peaks = [PeakFlops(convolution, 90.0)] * 2
    return SeedResult(seed, reused, "abc", seconds, 200.0, accuracy, accuracy - 0.01, peaks)


RESULTS = [
    make_result(0, 0.939, 95.0, 100.0),
    make_result(1, 0.941, 195.0, 120.0),
    make_result(2, 0.943, 145.0, 140.0, reused=True),
]
COMPETITORS = [
    Competitor("cifar_towers", "float32", 1536, 1, 8, [300.0, 320.0, 310.0]),
    Competitor("pytorch", "float32", 1536, 1, 9, [155.0, 150.0, 200.0]),
    Competitor("keras", "float32", 1536, 1, 8, [310.0] * 3),
]


def summarize(results, target=0.94):
    race = race_results.summarize_race(results, work=18 * 10**12, timed_work=9 * 10**12, target=target)
    return race | {"operations": {"MatMul": 6 * 10**12, "Conv2D": 12 * 10**12}, "steps": 256}


def test_seconds_to_target_include_untimed_first_steps():
    """Of 200 operations 160 are of timed steps, which take 150 s."""
    race = race_results.summarize_race(RESULTS, work=200, timed_work=160, target=0.94)
    assert race["training"]["mean"] == 150 and race["seconds_to_target"] == race["whole_training"] == 187.5
    assert race_results.summarize_race(RESULTS, work=200, timed_work=0, target=0.94)["seconds_to_target"] == 150


def test_statistics_over_seeds_and_fraction_of_the_peak():
    race = summarize(RESULTS)
    assert [seed["step_seconds"] for seed in race["seeds"]] == [100, 200, 150]
    assert race["accuracy"] == {"mean": pytest.approx(0.941), "std": pytest.approx(0.002), "n": 3}
    assert race["training"] == {"mean": 150, "std": 50, "n": 3}
    assert race["seconds_to_target"] == 300 and race["compile"]["mean"] == 20 and race["save"]["mean"] == 0
    assert race["ceiling"] == 120 and race["limit_seconds"] == pytest.approx(150)
    assert race["fraction_of_ceiling"] == pytest.approx(9e12 / 150 / 120e9)


@pytest.mark.parametrize(
    ("results", "target", "expected", "absent"),
    [
        (RESULTS, 0.9411, "Seconds to 94.11 %: not reached: mean 94.10 %, std 0.20, n=3, after 300.0 s of", "?"),
        (RESULTS[:1], 0.94, "mean 93.90 %, n=1", "\nstd"),
        (RESULTS, 0.0, "Accuracy: mean 94.10 %, std 0.20, n=3, after 300.0 s of training: timed steps", "reached"),
        (RESULTS, 0.0, "which is also in the 20.0 s of compilation", "Seconds to"),
        ([dataclasses.replace(each, ceilings=[]) for each in RESULTS], 0.94, "Seconds to", "peak"),
    ],
)
def test_conclusion_of_a_race(results, target, expected, absent):
    race = summarize(results, target)
    assert race["seconds_to_target"] == (300 if target == 0.94 and len(results) > 1 else None)
    assert len(results) > 1 or race["accuracy"]["std"] is None
    assert race["ceilings"] or race["fraction_of_ceiling"] is None
    text = race_results.race_text(FACTS | {"target": target}, race)
    assert expected in text and absent not in text


def test_accuracy_is_that_of_averaged_weights_on_test():
    evaluations = [
        {"split": split, "weights": weights, "tta": tta, "accuracy": score}
        for split, weights, tta, score in [
            ("validation", "raw", 0, 0.1), ("test", "raw", 0, 0.2), ("test", "raw", 2, 0.3), ("test", "ema", 2, 0.4),
        ]
    ]  # fmt: skip
    assert [race_results.accuracy_on_test(evaluations, tta) for tta in (0, 2)] == [0.2, 0.4]


def test_published_race(tmp_path, capsys):
    race_results.publish_race(tmp_path, FACTS | {"hard_example_pool": 3072}, summarize(RESULTS))
    text = capsys.readouterr().out
    assert "speednet94, batches of 1,536, the hardest of 3,072, cifar10, float32; Abacus" in text
    assert "Seconds to 94.00 %: 300.0 s of training (mean 94.10 %, std 0.20, n=3)" in text
    assert "18,000 GFLOP in 256 steps (Conv2D 66.7 %, MatMul 33.3 %)" in text
    assert "A run at the peak takes 150.0 s; training ran at 50.0 % of it." in text
    assert "* run by an earlier command: seed 2 (revision abc)" in text and "\n2*  " in text
    assert "Seconds to 94.00 %" in (tmp_path / "race.txt").read_text()
    assert run_files.read_json(tmp_path / "race.json")["training"]["mean"] == 150


def test_published_comparison(tmp_path, capsys):
    comparison = Comparison(COMPETITORS, {"tutorial, float32": "no net"})
    race_results.publish_comparison(tmp_path, FACTS, comparison)
    text = capsys.readouterr().out
    assert "batches of 1,536, cifar10" in text
    rows = {line.split()[0]: line.split() for line in text.splitlines() if " float32 " in line and "-" in line}
    assert rows["cifar_towers"][1:] == ["float32", "1", "310", "300-320", "3", "x", "8", "-"]
    assert rows["pytorch"][1:] == ["float32", "1", "155", "150-200", "3", "x", "9", "2.00"]
    assert rows["keras"][1:] == ["float32", "1", "310", "310-310", "3", "x", "8", "1.00"]
    assert "243 steps of 1,536 at the 155 images/s of pytorch, float32, take 2,408 s" in text
    headings = next(line.split() for line in text.splitlines() if line.startswith("framework"))
    assert headings[3:6] == ["images/s", "min-max", "n"]
    assert "Left out: tutorial, float32: no net" in text and "Seconds to" not in text
    assert "take 2,408 s" in (tmp_path / "side_by_side.txt").read_text()
    assert run_files.read_json(tmp_path / "side_by_side.json")["contestants"][1]["median"] == 155


def test_quartiles_from_five_rounds(tmp_path):
    comparison = Comparison(
        [Competitor("cifar_towers", "float32", 1536, 1, 8, [100.0, 500.0, 300.0, 200.0, 400.0])], {}
    )
    headings, row, *_ = (line.split() for line in race_results.comparison_text(FACTS, comparison).splitlines())
    assert headings[4] == "quartiles" and row[4:8] == ["200-400", "5", "x", "8"]
    race_results.publish_comparison(tmp_path, FACTS, comparison)
    (written,) = run_files.read_json(tmp_path / "side_by_side.json")["contestants"]
    assert written["quartiles"] == [200, 400] and written["steps"] == 8


def test_ratios_are_of_equal_numbers_of_devices():
    competitors = [
        Competitor("cifar_towers", "float32", 1536, 4, 8, [1000.0]),
        Competitor("cifar_towers", "float32", 1536, 1, 8, [300.0]),
        Competitor("keras-mirrored", "float32", 1536, 4, 8, [500.0]),
        Competitor("pytorch", "float32", 1536, 1, 8, [600.0]),
    ]
    text = race_results.comparison_text(FACTS, Comparison(competitors, {}))
    headings, *rows = [line.split() for line in text.splitlines()[:5]]
    assert headings[2] == "devices"
    assert [(row[0], row[2], row[-1]) for row in rows] == [
        ("cifar_towers", "4", "-"),
        ("pytorch", "1", "0.50"),
        ("keras-mirrored", "4", "2.00"),
        ("cifar_towers", "1", "-"),
    ]

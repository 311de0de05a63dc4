import pytest

from cifar_towers import files
from cifar_towers.benchmark import race_results
from cifar_towers.benchmark.framework_comparison import Competitor

FACTS = {
    "recipe": "mine", "model": "speednet94", "batch_size": 1536, "hard_example_pool": 0, "dataset": "cifar10",
    "precision": "float32", "processor": "Abacus", "cores": 2, "tta": 2, "target": 0.94, "date": "2026-01-01",
}  # fmt: skip


def make_seed(seed, accuracy, train, convolution, reused=False):
    seconds = {"train": train, "input": 4.0, "report": 1.0, "compile": 20.0, "start": 10.0, "evaluate": 30.0}
    return {
        "seed": seed, "reused": reused, "revision": "abc", "seconds": seconds, "step_seconds": train + 5,
        "images_per_sec": 200.0, "accuracy": accuracy, "plain_accuracy": accuracy - 0.01,
        "ceilings": [(convolution, 90.0)] * 2,
    }  # fmt: skip


SEEDS = [
    make_seed(0, 0.939, 95.0, 100.0),
    make_seed(1, 0.941, 195.0, 120.0),
    make_seed(2, 0.943, 145.0, 140.0, reused=True),
]
WORK = {"kind": (2, {"MatMul": 3 * 10**12, "Conv2D": 6 * 10**12})}


def make_competitor(name, rates, steps=8, devices=1):
    return Competitor(name=name, precision="float32", images=1536, devices=devices, steps=steps, images_per_sec=rates)


def test_seconds_to_target_include_untimed_first_steps():
    """Of 75 operations 43 are of timed steps, which take 150 s."""
    work = {"small": (3, {"Conv2D": 10, "MatMul": 1}), "large": (2, {"Conv2D": 20, "MatMul": 1})}
    race = race_results.summarize_race(SEEDS, work, target=0.94)
    assert (race["work"], race["steps"], race["operations"]) == (75, 5, {"Conv2D": 70, "MatMul": 5})
    assert race["training"]["mean"] == 150 and race["seconds_to_target"] == race["whole_training"] == 150 * (75 / 43)
    untimed = race_results.summarize_race(SEEDS, {"kind": (1, {"Conv2D": 200})}, target=0.94)
    assert untimed["seconds_to_target"] == 150


def test_statistics_over_seeds_and_fraction_of_the_peak():
    race = race_results.summarize_race(SEEDS, WORK, target=0.94)
    assert [seed["step_seconds"] for seed in race["seeds"]] == [100, 200, 150]
    assert race["accuracy"] == {"mean": pytest.approx(0.941), "std": pytest.approx(0.002), "n": 3}
    assert race["training"] == {"mean": 150, "std": 50, "n": 3}
    assert race["seconds_to_target"] == 300 and race["compile"]["mean"] == 20 and race["save"]["mean"] == 0
    assert race["ceiling"] == 120 and race["limit_seconds"] == pytest.approx(150)
    assert race["fraction_of_ceiling"] == pytest.approx(9e12 / 150 / 120e9)


MEAN = "mean 94.10 ± 0.20 % (n=3, 95 % interval 93.60 to 94.60 %)"


@pytest.mark.parametrize(
    ("seeds", "target", "expected", "absent"),
    [
        (
            SEEDS,
            0.9411,
            f"Seconds to 94.11 %: not reached: {MEAN}, after 300.0 s of",
            "?",
        ),
        (SEEDS[:1], 0.94, "mean 93.90 % (n=1)", "\nstd"),
        (
            SEEDS,
            0.0,
            f"Accuracy: {MEAN}, after 300.0 s of training: timed steps",
            "reached",
        ),
        (SEEDS, 0.0, "which is also in the 20.0 s of compilation", "Seconds to"),
        ([seed | {"ceilings": []} for seed in SEEDS], 0.94, "Seconds to", "peak"),
    ],
)
def test_conclusion_of_a_race(seeds, target, expected, absent):
    race = race_results.summarize_race(seeds, WORK, target)
    assert race["seconds_to_target"] == (300 if target == 0.94 and len(seeds) > 1 else None)
    assert len(seeds) > 1 or race["accuracy"]["std"] is None
    assert race["ceilings"] or race["fraction_of_ceiling"] is None
    facts = FACTS | {"target": target}
    text = race_results.race_table(facts, race) + race_results.conclude(facts, race)
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
    race = race_results.summarize_race(SEEDS, WORK, target=0.94)
    race_results.publish_race(tmp_path, FACTS | {"hard_example_pool": 3072}, race)
    text = capsys.readouterr().out
    assert "speednet94, batches of 1,536, the hardest of 3,072, cifar10, float32; Abacus" in text
    assert f"Seconds to 94.00 %: 300.0 s of training, {MEAN}" in text
    assert "18,000 GFLOP in 2 steps (Conv2D 66.7 %, MatMul 33.3 %)" in text
    assert "A run at the peak takes 150.0 s; training ran at 50.0 % of it." in text
    assert "* run by an earlier command: seed 2 (revision abc)" in text and "\n2*  " in text
    assert "Seconds to 94.00 %" in (tmp_path / "race.txt").read_text()
    assert files.read_json(tmp_path / "race.json")["training"]["mean"] == 150


def publish(tmp_path, capsys, competitors, **left_out):
    """What is printed, its words by framework and devices, and the rows in the JSON file."""
    race_results.publish_comparison(tmp_path, FACTS, competitors, left_out)
    text = capsys.readouterr().out
    lines = [line.split() for line in text.splitlines()]
    table = next(index for index, words in enumerate(lines) if words[:1] == ["framework"])
    assert text.strip() in (tmp_path / "side_by_side.txt").read_text()
    rows = files.read_json(tmp_path / "side_by_side.json")["contestants"]
    return text, lines[table : table + 1 + len(competitors)], rows


def test_published_comparison(tmp_path, capsys):
    competitors = [
        make_competitor("cifar_towers", [300.0, 320.0, 310.0]),
        make_competitor("pytorch", [155.0, 150.0, 200.0], steps=9),
        make_competitor("keras", [309.0] * 3),
    ]
    text, (headings, *table), rows = publish(tmp_path, capsys, competitors, tutorial="no net")
    assert "batches of 1,536, cifar10" in text
    assert headings[3:6] == ["images/s", "min-max", "n"]
    assert table == [
        ["cifar_towers", "float32", "1", "310", "300-320", "3", "x", "8", "-"],
        ["keras", "float32", "1", "309", "309-309", "3", "x", "8", "1.00"],
        ["pytorch", "float32", "1", "155", "150-200", "3", "x", "9", "2.00"],
    ]
    assert "243 steps of 1,536 at the 155 images/s of pytorch, float32, take 2,408 s" in text
    assert "Left out: tutorial: no net" in text and "Seconds to" not in text
    assert rows[1]["median"] == 155 and "measure" not in rows[1]


def test_quartiles_from_five_rounds(tmp_path, capsys):
    competitors = [make_competitor("cifar_towers", [100.0, 500.0, 300.0, 200.0, 400.0])]
    _, (headings, row), (written,) = publish(tmp_path, capsys, competitors)
    assert headings[4] == "quartiles" and row[4:8] == ["200-400", "5", "x", "8"]
    assert written["quartiles"] == [200, 400] and written["steps"] == 8


def test_ratios_are_of_equal_numbers_of_devices(tmp_path, capsys):
    competitors = [
        make_competitor("cifar_towers", [1000.0], devices=4),
        make_competitor("cifar_towers", [300.0]),
        make_competitor("keras-mirrored", [500.0], devices=4),
        make_competitor("pytorch", [600.0]),
    ]
    _, (headings, *table), _ = publish(tmp_path, capsys, competitors)
    assert headings[2] == "devices"
    assert [(row[0], row[2], row[-1]) for row in table] == [
        ("cifar_towers", "4", "-"),
        ("pytorch", "1", "0.50"),
        ("keras-mirrored", "4", "2.00"),
        ("cifar_towers", "1", "-"),
    ]

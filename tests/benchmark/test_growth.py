import json
import math

import matplotlib.image
import pytest

from cifar_towers.benchmark import growth, growth_points, growth_report
from cifar_towers.benchmark.growth_points import Point, Row, Series
from cifar_towers.cli.tool_configs import BenchmarkConfig
from cifar_towers.errors import RunError, UsageError

FACTS = {
    "recipe": "mine", "model": "speednet94", "batch_size": 1536, "precision": "float32", "dataset": "synthetic",
    "processor": "Abacus", "cores": 2, "devices": 1, "kind": "CPU", "date": "2026-01-01", "minutes": 1.0,
}  # fmt: skip
CONFIG = BenchmarkConfig(growth=True, optimizer="muon", image_size_schedule="0=24,50%=32")
SERIES = growth.plan(CONFIG, towers=2)
EVER = math.inf


def row(point, step=None, memory=None, start=5.0, compiling=7.0):
    """As of a machine that needs 0.1 s + 2 ms an image, and 500 MB + 1.5 MB an image."""
    step = step or 0.1 + 0.002 * point.batch_size
    return Row(point, start, compiling, [0.9 * step, step, 1.2 * step], memory or 500 + 1.5 * point.batch_size)


def rows_of(*points):
    return {point: row(point) for point in points}


def test_the_fit_of_exact_data():
    line = growth_points.fit([8, 16, 64], [0.1 + 0.002 * size for size in (8, 16, 64)])
    assert (line.start, line.slope) == pytest.approx((0.1, 0.002)) and line.off < 1e-9 and line.n == 3
    assert line.at(1000) == pytest.approx(2.1)


def test_the_fit_tells_how_far_off_it_is():
    """Least squares through (0, 1), (1, 1), (2, 4): 0.5 + 1.5 x, which is 0.5 off the first, 1 off the second."""
    line = growth_points.fit([0, 1, 2], [1, 1, 4])
    assert line == pytest.approx((0.5, 1.5, 1.0, 3))


def test_a_line_is_told_with_its_sign_and_how_true_it_is_where_it_may_not_be():
    assert growth_points.Line(0.1, 0.002, 0.034, 7).told("ms", 1000) == "100 ms + 2 ms x batch (at most 3 % off)"
    assert growth_points.Line(769.4, -0.542, 0.0, 2).told("MB") == "769 MB - 0.542 MB x batch"


def test_the_fit_passes_over_what_is_not_known():
    assert growth_points.fit([1, 2, 3], [5.0, 0.0, 9.0]) == pytest.approx((3.0, 2.0, 0.0, 2))
    assert growth_points.fit([1, 2], [0.0, 9.0]) is None


def test_the_plan_varies_one_thing_at_a_time():
    batches, towers, models = SERIES
    assert [point.batch_size for point in batches.points] == [128, 256, 512, 1024, 2048, 4096, 8192]
    assert {(point.model, point.towers) for point in batches.points} == {("speednet94", 2)}
    assert [point.towers for point in towers.points] == [1, 2, 4, 8, 16]
    assert {(point.model, point.batch_size) for point in towers.points} == {("speednet94", 1536)}
    wanted = {"cifarnet", "resnet20", "resnet56", "speednet93", "speednet94", "speednet95", "speednet96"}
    assert {point.model for point in models.points} == wanted
    assert {point[1:] for point in models.points} == {(256, 2)}
    assert batches.points[1] in models.points  # which is measured once


def test_what_a_model_cannot_take_of_the_recipe_is_left():
    speednet, cifarnet, resnet = (
        growth.recipe_at(CONFIG, Point(model, 256, 2)) for model in ("speednet96", "cifarnet", "resnet20")
    )
    assert (speednet.model, speednet.batch_size, speednet.optimizer) == ("speednet96", 256, "muon")
    assert (cifarnet.optimizer, cifarnet.image_size_schedule) == ("momentum", "")
    assert (resnet.optimizer, resnet.image_size_schedule) == ("momentum", CONFIG.image_size_schedule)


def test_a_batch_that_cannot_be_shared():
    with pytest.raises(UsageError, match="batch_size=200 cannot be shared by 16 towers; 192 and 208 can"):
        growth.recipe_at(CONFIG, Point("speednet94", 200, 16))


def test_as_many_steps_as_there_is_patience_for():
    assert [growth.steps_timed(seconds) for seconds in (0.1, 1, 10, 14, 29, 100)] == [20, 3, 3, 2, 1, 1]


def test_extrapolation():
    assert growth.extrapolate([(9, 99.0), (1, 10.0), (2, 12.0)], 4) == 16.0
    assert growth.extrapolate([(1, 12.0), (2, 10.0)], 4) == 10.0
    assert growth.extrapolate([(1, 12.0)], 4) == 12.0


def test_a_point_that_would_not_fit_into_the_time():
    """A batch of 1,024 takes 2.148 s a step, by the line through 256 and 512: five of them and 12 s for the start."""
    points = SERIES[0].points
    known = rows_of(*points[:3])
    growth.check_room(points[3], SERIES, known, 22.8, EVER)
    with pytest.raises(UsageError, match="needs about 23 s, and 22 s are left; give more --minutes"):
        growth.check_room(points[3], SERIES, known, 22.4, EVER)
    with pytest.raises(UsageError, match="and 0 s are left"):
        growth.check_room(points[3], SERIES, known, -5, EVER)


def test_a_point_that_would_not_fit_into_the_memory():
    points = SERIES[0].points
    known = rows_of(*points[:3])
    growth.check_room(points[3], SERIES, known, EVER, 2037)
    with pytest.raises(UsageError, match="needs about 2,036 MB of memory, and the machine has 2,035"):
        growth.check_room(points[3], SERIES, known, EVER, 2035)


def test_from_one_batch_the_time_of_a_step_is_taken_to_grow_with_it():
    """128 take 0.356 s, so 256 0.712."""
    first, second, *_ = SERIES[0].points
    growth.check_room(second, SERIES, rows_of(first), 12 + 5 * 0.713, EVER)
    with pytest.raises(UsageError):
        growth.check_room(second, SERIES, rows_of(first), 12 + 5 * 0.711, EVER)
    growth.check_room(first, SERIES, {}, 0, 0)  # nothing is known, so it is tried


def test_the_first_number_of_towers_is_judged_by_its_batch_and_the_others_by_it():
    one, two, *_ = SERIES[1].points
    known = rows_of(*SERIES[0].points[:4])
    with pytest.raises(UsageError, match="about 28 s"):  # 1,536 images take 3.172 s
        growth.check_room(one, SERIES, known, 27, EVER)
    known[one] = row(one, step=8.0)
    with pytest.raises(UsageError, match="about 52 s"):
        growth.check_room(two, SERIES, known, 27, EVER)


def test_what_cannot_be_had_is_told_and_the_rest_measured(monkeypatch, capsys):
    small, broken, large = (Point("cifarnet", size, 2) for size in (8, 15, 16))
    ended = Point("cifarnet", 12, 4)
    series = [Series("batch size", (16, 8, 15), (large, small, broken)), Series("towers", (4,), (ended,))]

    def measured(recipe, point, compute_dtype):
        assert recipe.batch_size == point.batch_size and compute_dtype == "float32"
        if point is ended:
            raise RunError("the process of 4 towers has ended")
        return row(point)

    monkeypatch.setattr(growth, "_measure_point", measured)
    config = BenchmarkConfig(growth=True, model="cifarnet", batch_size=16)
    rows, left_out = growth._measure(config, series, "float32", growth.time.monotonic(), EVER)
    assert list(rows) == [small, large]  # the small one first
    assert left_out[broken] == "batch_size=15 cannot be shared by 2 towers; 14 and 16 can"
    assert left_out[ended] == "the process of 4 towers has ended"
    assert (
        "2/4: cifarnet, batch of 12, 4 towers: left out: the process of 4 towers has ended" in capsys.readouterr().out
    )


def test_what_is_published(tmp_path, capsys):
    batches, towers, models = SERIES
    left_out = {batches.points[-1]: "it needs about 99 s, and 1 s are left; give more --minutes"}
    points = dict.fromkeys([*batches.points[:-1], *towers.points, *models.points])
    rows = {point: row(point, compiling=7.0 + point.towers) for point in points}
    rows[towers.points[-1]] = row(towers.points[-1], step=2 * 3.172, memory=3 * 2804.0, compiling=50.0)
    rows[models.points[0]] = row(models.points[0], step=0.1)
    growth_report.publish(tmp_path, FACTS, SERIES, rows, left_out)
    told, text = json.loads((tmp_path / "growth.json").read_text()), (tmp_path / "growth.txt").read_text()
    conclusion = told["conclusion"]
    assert conclusion.startswith(
        "By 6 batches of 128 to 4,096 a step of speednet94 takes 100 ms + 2 ms x batch (at most 0 % off); "
        "its process holds 500 MB + 1.5 MB x batch (at most 0 % off); "
        "16 towers take 2.00 times as long as 1, and 3.00 times the memory; models go from cifarnet's 2,560 to "
    )
    assert conclusion.endswith("takes 55 s (speednet94, batch of 1,536, 16 towers).") and conclusion in text
    assert text == capsys.readouterr().out[1:]
    assert "left out: speednet94, batch of 8,192, 2 towers: it needs about 99 s" in text
    assert told["left_out"][0]["batch_size"] == 8192 and told["seconds_by_batch"]["slope"] == pytest.approx(0.002)
    assert [found["varied"] for found in told["rows"]] == ["batch size"] * 6 + ["towers"] * 5 + ["model"] * 7
    lines = [line.split() for line in text.splitlines() if line.startswith("towers")]
    assert [line[3] for line in lines] == ["1", "2", "4", "8", "16"] and lines[0][4:8] == [
        "3,172",
        "ms",
        "2,855-3,806",
        "3",
    ]
    picture = matplotlib.image.imread(tmp_path / "growth.png")
    assert picture.shape[0] > 900 and picture.shape[1] > 1400 and picture[..., :3].std() > 0.05


def test_a_single_point_is_published_too(tmp_path):
    first = SERIES[0].points[0]
    growth_report.publish(tmp_path, FACTS, SERIES, rows_of(first), {})
    told = json.loads((tmp_path / "growth.json").read_text())
    assert told["seconds_by_batch"] is None
    assert told["conclusion"] == (
        "The longest start, compilation included, takes 12 s (speednet94, batch of 128, 2 towers)."
    )
    assert (tmp_path / "growth.png").stat().st_size > 10_000


@pytest.mark.slow
def test_growth_from_start_to_files(tmp_path, monkeypatch):
    """Processes of their own for batches of 8 and 16, on one tower and two."""
    for name, value in {"BATCH_SIZES": (8, 16), "TOWERS": (1, 2, 5), "MODELS": ("cifarnet",)}.items():
        monkeypatch.setattr(growth, name, value)
    monkeypatch.setattr(growth, "MODEL_BATCH_SIZE", 16)
    config = BenchmarkConfig(
        growth=True, model="cifarnet", dataset="synthetic", batch_size=16, precision="float32", minutes=30.0,
        train_dir=str(tmp_path),
    )  # fmt: skip
    growth.run(config)
    told = json.loads((tmp_path / "growth.json").read_text())
    found = [(row["varied"], row["model"], row["batch_size"], row["towers"]) for row in told["rows"]]
    assert found == [
        ("batch size", "cifarnet", 8, 2),
        ("batch size", "cifarnet", 16, 2),
        ("towers", "cifarnet", 16, 1),
        ("towers", "cifarnet", 16, 2),
        ("model", "cifarnet", 16, 2),
    ]
    assert told["rows"][1]["step_seconds"] == told["rows"][3]["step_seconds"]  # the same point, measured once
    for row in told["rows"]:
        assert len(row["step_seconds"]) >= 3 and 1e-4 < row["median"] < row["compile_seconds"]
        assert row["start_seconds"] > 0.5 and row["memory_mb"] > 200
    assert [(point["towers"], point["why"]) for point in told["left_out"]] == [
        (5, "batch_size=16 cannot be shared by 5 towers; 15 and 20 can")
    ]
    assert told["conclusion"] in (tmp_path / "growth.txt").read_text() and (tmp_path / "growth.png").exists()

import base64
import io
import os
import re
import shlex
import statistics
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from cifar_towers.errors import DataError, RunError
from cifar_towers.reporting import figures, html_report, run_records
from tests.programs import call
from tests.reporting.example_runs import CLASSES, accuracies, change, make_run, read_records, read_result, write_records

ROOT = Path(__file__).parents[2]
HOSTILE = "<script>alert('1')</script><img src=http://evil.example/x.png onerror=\"x()\">&amp;\"'\ud800\n"
SCORE = {"split": "test", "weights": "raw", "tta": 0}
LAYER = {"output": [1], "parameters": 1, "flops": 1}
RAW, TTA = "accuracy, %|test, raw weights, no TTA", "accuracy, %|test, raw weights, TTA 2"


class Page:
    """The elements and texts of a page, which must be well-formed."""

    def __init__(self, html):
        self.html, root = html, ElementTree.fromstring(html)
        self.tags = {element.tag for element in root.iter()}
        self.attributes = [(element.tag, *pair) for element in root.iter() for pair in element.items()]
        self.images = [image.attrib for image in root.iter("img")]
        self.texts = list(root.itertext())
        self.heads, self.rows = (
            [["|".join(cell.itertext()) for cell in row] for row in root.iterfind(f".//{part}/tr")]
            for part in ("thead", "tbody")
        )

    def row(self, *start):
        """Return the cells after these in the first row that begins with them; small text follows a `|`."""
        return next(row[len(start) :] for row in self.rows if tuple(row[: len(start)]) == start)

    def results(self, run):
        """Return the cells of a run in the first table by heading."""
        return dict(zip(self.heads[0], [run, *self.row(run)], strict=True))


@pytest.fixture
def plotted(monkeypatch):
    """Record the arguments of each plot and confusion matrix by title; draw none of them."""
    calls = {}

    def record(data, *arguments):
        title = next(argument for argument in arguments if isinstance(argument, str))
        calls[title] = (data, *arguments)
        return np.zeros((2, 2, 3), np.uint8)

    for name in ("line_plot", "dot_plot", "confusion_matrix"):
        monkeypatch.setattr(figures, name, record)
    return calls


def make_runs(directory, count=3, recipe="speed94", **settings):
    """Make runs of a recipe that differ in their seed."""
    return [make_run(directory / f"{recipe}-seed{seed}", recipe, seed, **settings) for seed in range(count)]


def groups_of(*directories):
    return run_records.group_by_recipe(run_records.read_runs(directories))


def render(*directories):
    return Page(html_report.render(run_records.read_runs(directories)))


def change_scores(path, **values):
    """Change the scores of a run's result, each value by a function of the score; drop the other evaluations."""
    scores = [score | {key: make(score) for key, make in values.items()} for score in read_result(path)["evaluations"]]
    change(path, "result.json", evaluations=scores)
    write_records(path, read_records(path, "train"))


def test_page_is_self_contained(tmp_path):
    """With all pictures drawn: three seeds of a recipe, one of which is not finished, and another recipe."""
    runs = [*make_runs(tmp_path), make_run(tmp_path / "resnet20", "resnet20", towers=4)]
    (runs[2] / "result.json").unlink()
    out = html_report.write(run_records.read_runs(runs), tmp_path / "report.html")
    page = Page(out.read_bytes().decode("ascii"))
    assert page.html.startswith("<!DOCTYPE html>") and not {"script", "iframe", "object", "base"} & page.tags
    assert ("meta", "charset", "utf-8") in page.attributes
    assert len(page.images) == 8 + 2 + 4
    for image in page.images:
        kind, content = image["src"].split(",", 1)
        picture = Image.open(io.BytesIO(base64.b64decode(content, validate=True)))
        picture.load()
        assert kind == "data:image/png;base64" and len(image["alt"]) > 20 and min(picture.size) > 100
    for tag, name, value in page.attributes:
        assert not name.startswith("on") and tag != "a"
        assert name not in ("src", "href") or value.startswith("data:")
    assert not re.search(r"url\(|@import|https?://", page.html)
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    for feature in (policy, "prefers-color-scheme: dark", "@media print", "width=device-width"):
        assert feature in page.html
    assert page.row("speed94: mean")


def test_results_table(tmp_path, plotted):
    runs = make_runs(tmp_path)
    for run in runs:
        change(run, "result.json", seconds=read_result(run)["seconds"] | {"lost": 8.0})
    page = render(*runs)
    for seed, run in enumerate(runs):
        result, cells = read_result(run), page.results(run.name)
        for heading, score in zip((RAW, TTA), result["evaluations"], strict=True):
            assert cells[heading] == f"{100 * score['accuracy']:.2f}|loss {score['loss']:.4f}"
        assert cells["images/s"] == f"{result['images_per_sec']:,.0f}"
        training = 540.25 + seed + 2.5 + 21.5 + 8.0
        assert cells["training, s|with input, compilation, lost steps"] == f"{training:.1f}"
        others = [cells[name] for name in ("steps", "recipe", "seed", "towers", "precision", "skipped steps")]
        assert others == ["264", "speed94", str(seed), "2", "bfloat16", "0"]
        assert cells["weights|sha256"] == result["weights_sha256"][:16]
    for heading, tta in ((RAW, 0), (TTA, 2)):
        values, shown = accuracies(runs, tta), page.results("speed94: mean")[heading]
        expected = f"{np.mean(values):.2f}|± {np.std(values, ddof=1):.2f}, n=3, "
        assert shown.startswith(expected)
        low, high = map(float, shown.removeprefix(expected).split(" to "))
        assert 0 < low < np.mean(values) < high < 100
    assert page.row("speed94-seed1", "tower_1", "/CPU:1")[-1] == "12"
    assert "speed94 (seeds 0, 1, 2)" in page.texts


def test_mean_is_over_finished_runs_and_a_deviation_needs_two(tmp_path, plotted):
    runs = [make_run(tmp_path / "s0"), make_run(tmp_path / "s1", seed=1, finished=False, last_step=220)]
    page = render(*runs)
    assert page.results("speed94: mean")[RAW] == f"{accuracies(runs[:1], 0)[0]:.2f}|n=1"
    newest, unfinished = read_records(runs[1], "eval")[-1], page.results("s1")
    assert unfinished["steps"] == "220|unfinished" and unfinished[TTA] == "-"
    reported = "accuracy, %|as reported"
    assert unfinished[reported].endswith("no TTA, at step 198") and "at step" not in page.results("s0")[reported]
    assert newest["step"] == 198 and unfinished[RAW].startswith(f"{100 * newest['accuracy']:.2f}|")
    assert [row[0] for row in page.rows if row[-1] == "580.7"] == ["s0"]  # total seconds
    change(runs[0], "result.json", step=132)  # continued after its result
    page = render(*runs)
    assert page.results("s0")["steps"] == "264|unfinished" and page.results("s0")["weights|sha256"] == "-"
    assert "speed94: mean" not in [row[0] for row in page.rows] and not any("total, s" in head for head in page.heads)


def test_tower_rows_hold_means_and_last_values(tmp_path, plotted):
    run = make_run(tmp_path / "run", towers=3)
    records = [record["towers"] for record in read_records(run) if "towers" in record]
    values = {key: [record[key][2] for record in records] for key in records[0]}
    expected = [f"{number:.4g}" for column in values.values() for number in (statistics.fmean(column), column[-1])]
    assert render(run).row("run", "tower_2", "/CPU:2") == [*expected, "12"]
    for step, loss in ((275, None), (286, 0.25)):  # continued with a single tower; null is not finite
        towers = {"loss": [loss], "gradient_norm": [1.5], "cosine": [None]}
        write_records(run, [*read_records(run), {"kind": "train", "step": step, "epoch": 8.0, "towers": towers}])
    assert render(run).row("run", "tower_0", "-") == ["0.25", "0.25", "1.5", "1.5", "-", "-", "2"]


@pytest.mark.parametrize("missing", ["config.json", "environment.json", "result.json", "mistakes.png", "train", "eval"])
def test_missing_files_and_records_are_left_out(tmp_path, plotted, missing):
    run, other = make_run(tmp_path / "run"), make_run(tmp_path / "other", "resnet20")
    if missing in ("train", "eval"):
        write_records(run, [record for record in read_records(run) if record["kind"] != missing])
    else:
        (run / missing).unlink()
    for page in (render(run), render(run, other)):
        assert page.results("run")["run"] == "run"
    complete, page = render(other), render(run)
    parts = {"mistakes.png": "mistakes", "train": "training loss", "eval": "no TTA, by epoch"}
    for part in parts.values():
        assert any(part in image["alt"] for image in complete.images), part
        assert any(part in image["alt"] for image in page.images) == (part != parts.get(missing)), part


def test_records_alone_are_enough(tmp_path, plotted):
    write_records(tmp_path / "bare", [{"kind": "train", "step": 3}])
    with (tmp_path / "bare" / "metrics.jsonl").open("a") as file:
        file.write('{"ki')
    page = render(tmp_path / "bare")
    assert page.results("bare")["steps"] == "3|unfinished" and not page.images


def test_all_strings_are_escaped(tmp_path):
    """Every string of the files, and the directories' names, would break a page that does not escape them."""
    run, other = make_run(tmp_path / "<b>&lt;'\"<script>"), make_run(tmp_path / "<i>", last_step=11)
    write_records(other, [{"kind": "train", "step": 11}])
    change(run, "config.json", recipe=HOSTILE, seed=HOSTILE, model=HOSTILE, **{HOSTILE: HOSTILE})
    change(
        run, "environment.json", command=[HOSTILE, "a b"], precision=HOSTILE, packages={HOSTILE: HOSTILE},
        towers=[{"name": HOSTILE, "device": HOSTILE}] * 2, synthetic_data=HOSTILE, class_names=[HOSTILE, *CLASSES[1:]],
        variables=[{"name": HOSTILE, "shape": HOSTILE, "bytes": 1}], model=[LAYER | {"name": HOSTILE, "kind": HOSTILE}],
    )  # fmt: skip
    change(run, "result.json", weights_sha256=HOSTILE, seconds={HOSTILE: 3.0})
    few = {"kind", "step", "epoch", "loss"}  # pictures take time
    training = [{key: record[key] for key in few} for record in read_records(run, "train")]
    evaluations = [record | {"split": HOSTILE, "weights": HOSTILE} for record in read_records(run, "eval")]
    write_records(run, training + evaluations)
    page = Page(html_report.write(run_records.read_runs([run, other]), tmp_path / "page.html").read_text())
    assert page.tags <= {
        "html", "head", "meta", "title", "link", "style", "body", "section", "h1", "h2", "p", "div", "table", "thead",
        "tbody", "tr", "th", "td", "small", "figure", "figcaption", "img", "details", "summary", "pre", "code",
    }  # fmt: skip
    assert {name for _, name, _ in page.attributes} <= {
        "lang", "charset", "name", "content", "http-equiv", "rel", "href", "class", "scope", "tabindex", "alt", "src",
    }  # fmt: skip
    assert all(image["src"].startswith("data:image/png;base64,") for image in page.images)
    shown = HOSTILE.replace("\ud800", "?")
    assert page.row("<b>&lt;'\"<script>", shown, shown)  # the tower
    assert page.row(shown) == [shown, "-"]  # the setting
    assert "<i>: 3 variables, 60,544 bytes" in page.texts and "<i>: " in page.texts
    (command,) = [text for text in page.texts if text.endswith(" 'a b'")]
    assert shlex.split(command) == [shown, "a b"]


def test_differing_settings_and_shared_settings(tmp_path, plotted):
    runs = [make_run(tmp_path / name, seed=seed, batch_size=1536 - seed) for seed, name in enumerate("ab")]
    change(runs[1], "environment.json", synthetic_data="SYNTHETIC DATA, NOT CIFAR-10")
    page = render(*runs)
    assert "b: SYNTHETIC DATA, NOT CIFAR-10" in page.texts
    assert page.row("batch_size") == ["1536", "1535"] and page.row("git_revision") == ["abc1230", "abc1231"]
    assert page.row("epochs") == ["8.0"]  # shared


def test_commands_and_listings(tmp_path, plotted):
    page = render(*make_runs(tmp_path, 2))
    commands = [shlex.split(text) for text in page.texts if text.startswith("python ")]
    assert commands == [
        ["python", "scripts/train.py", "--flagfile=configs/speed94.cfg", f"--seed={seed}", "--data_dir=/a b"]
        for seed in range(2)
    ]
    assert page.texts.count("3 layers, 15,136 parameters, 30,272,000 flops") == 1
    assert page.texts.count("3 variables, 60,544 bytes") == 1
    assert page.row("conv_1") == ["Conv2D", "[32, 32, 64]", "13,824", "27,648,000"]
    assert page.row("conv_1/kernel") == ["[3, 64]", "55,296", "/CPU:0"]


def test_page_that_cannot_be_written(tmp_path, plotted):
    run = make_run(tmp_path / "run", last_step=66)
    os.mkfifo(tmp_path / "pipe")
    places = [tmp_path, tmp_path / "none" / "page.html", tmp_path / "pipe", run / "config.json" / "page.html"]
    for out in (*places, tmp_path / ("n" * 253)):  # that name is allowed, but the temporary file's is too long
        with pytest.raises(RunError, match="cannot be written: .*--out=FILE") as error:
            html_report.write(run_records.read_runs([run]), out)
        assert error.value.exit_code == 1 and "\n" not in str(error.value)
    assert {path.name for path in tmp_path.iterdir()} == {"run", "pipe"} and (tmp_path / "pipe").is_fifo()


def run_program(*arguments, cwd):
    command = [sys.executable, str(ROOT / "scripts/report.py"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env={**os.environ, "LC_ALL": "C"})
    return done.returncode, done.stdout, done.stderr


def test_program(tmp_path, monkeypatch, capsys):
    for name in ("run", "other"):
        write_records(tmp_path / name, [{"kind": "train", "step": 3, "epoch": 1, "loss": 0.5}])
    assert run_program("run", cwd=tmp_path) == (0, "run/report.html\n", "")
    assert len(Page((tmp_path / "run/report.html").read_text()).images) == 1
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, "report.py", "run", tmp_path / "other") == 0 and capsys.readouterr().out == "report.html\n"
    assert Page((tmp_path / "report.html").read_text()).row("other")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "usage: .*report.py"),
        (["run", "--output=x"], 2, "usage: .*--output.*--out"),
        (["none"], 2, "usage: .*none"),
        (["run", "--out=none/page.html"], 1, "run: none/page.html cannot be written.* none"),
        (["damaged"], DataError.exit_code, "data: damaged/result.json cannot be read"),
    ],
)
def test_errors_of_the_program_are_one_line(tmp_path, arguments, code, message):
    make_run(tmp_path / "run", last_step=11)
    (make_run(tmp_path / "damaged", last_step=11) / "result.json").write_text("{")
    status, out, err = run_program(*arguments, cwd=tmp_path)
    assert (status, out) == (code, "") and re.match(message, err) and err.count("\n") == 1
    assert not list(tmp_path.rglob("*.html"))


def test_errors_import_nothing_slow():
    program = (
        "import runpy, sys; sys.argv = ['x', 'none']\n"
        f"try: runpy.run_path({str(ROOT / 'scripts/report.py')!r}, run_name='__main__')\n"
        "except SystemExit: print({'tensorflow', 'keras', 'matplotlib'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "set()\n"


def test_curve_is_the_mean_with_a_band_over_the_seeds(tmp_path, plotted):
    paths = [*make_runs(tmp_path), make_run(tmp_path / "r", "resnet20")]
    pictures = html_report.curves(groups_of(*paths))
    curves = {title: arguments[0] for title, arguments in plotted.items()}
    assert len(curves) == 8 and all(list(lines) == ["speed94", "resnet20"] for lines in curves.values())
    for title, key, scale in (
        ("training loss (batch)", "loss", 1),
        ("training accuracy (batch)", "accuracy", 100),
        ("time waiting for input", "input_wait", 100),
    ):
        values = scale * np.array([[record[key] for record in read_records(path, "train")] for path in paths])
        x, *band = curves[title]["speed94"]
        np.testing.assert_allclose(x, np.arange(11, 265, 11) / 33)
        mean, std = values[:3].mean(0), values[:3].std(0, ddof=1)
        np.testing.assert_allclose(band, [mean, mean - std, mean + std])
        np.testing.assert_allclose(curves[title]["resnet20"][1:], values[3:])
    x, y, low, _ = curves["test accuracy, raw weights, no TTA"]["speed94"]
    assert x.tolist() == [2, 4, 6, 8]
    final = accuracies(paths[:3], 0)
    assert (y[-1], low[-1]) == pytest.approx((np.mean(final), np.mean(final) - np.std(final, ddof=1)))
    assert f"at the end: speed94 {y[-1]:.4g}" in pictures[0].alt
    assert len(curves["gradient noise scale"]["speed94"][0]) == 11  # one of twelve is null
    assert curves["throughput"]["speed94"][2].min() > 1000


def test_mean_curve_of_runs_of_different_length():
    curve = html_report.mean_curve([{1.0: 2.0, 2.0: 6.0}, {1.0: 4.0}, {}])
    std = np.std([2, 4], ddof=1)
    assert [list(column) for column in curve] == [[1, 2], [3, 6], [3 - std, 6], [3 + std, 6]]
    assert [len(column) for column in html_report.mean_curve([{}], 3)] == [0, 0]


def test_mean_curve_of_runs_that_were_recorded_at_different_epochs():
    """The mean does not jump from run to run, nor is its band of one run, as with another --summary_every_steps."""
    x, y, low, high = html_report.mean_curve([{0.0: 1.0, 2.0: 3.0, 4.0: 5.0}, {1.0: 4.0, 3.0: 6.0}])
    assert x.tolist() == [0, 1, 2, 3, 4] and y.tolist() == [1, 3, 4, 5, 5]
    np.testing.assert_allclose(high - low, 2 * np.array([0, 2**0.5, 2**0.5, 2**0.5, 0]))


def test_mean_curve_averages_neighbors():
    runs = [{float(epoch): float(epoch**2 + run) for epoch in range(10)} for run in range(3)]
    del runs[2][9.0]
    x, y, low, high = html_report.mean_curve(runs, 5)
    assert x.tolist() == [0.5, 2.5, 4.5, 6.5, 8.5]
    last = np.std([72.5, 73.5, 66.0], ddof=1)  # of the run that has only one of the two
    np.testing.assert_allclose([y - low, high - y], [[1, 1, 1, 1, last]] * 2)
    assert y[0] == 1.5 and y[-1] == pytest.approx((72.5 + 73.5 + 66) / 3)


def test_long_training_is_averaged_and_its_evaluations_are_not(tmp_path, plotted):
    values = [{"step": step, "epoch": step, "loss": 1, "accuracy": 0.5} | SCORE for step in range(999)]
    write_records(tmp_path / "run", [{"kind": kind, **record} for record in values for kind in ("train", "eval")])
    page = render(tmp_path / "run")
    assert [len(arguments[0]["run"][0]) for arguments in plotted.values()] == [999, 111, 111]
    assert any("mean of several records" in text for text in page.texts)


def test_raw_and_averaged_weights_have_charts_of_one_range_and_recipes_one_color(tmp_path, plotted):
    paths = [make_run(tmp_path / "plain", "plain"), make_run(tmp_path / "averaged", "averaged", ema=True)]
    html_report.curves(groups_of(*paths))
    raw, averaged = (plotted[f"test accuracy, {weights} weights, no TTA"] for weights in ("raw", "ema"))
    assert list(raw[0]) == ["plain", "averaged"]
    assert [(name, len(line[0])) for name, line in averaged[0].items()] == [("plain: not recorded", 0), ("averaged", 4)]
    assert raw[-1] == averaged[-1] and raw[-1][0] < raw[-1][1]


def test_more_recipes_than_a_chart_can_distinguish(tmp_path, plotted):
    html_report.curves(groups_of(*(make_run(tmp_path / f"r{i}", f"recipe{i}", last_step=66) for i in range(9))))
    losses = {title: len(arguments[0]) for title, arguments in plotted.items() if "training loss" in title}
    assert losses == {"training loss (batch) (1 of 2)": 8, "training loss (batch) (2 of 2)": 1}


def test_single_evaluations_are_dots_with_n_mean_and_spread(tmp_path, plotted):
    """--eval_every_epochs=0 evaluates after the last step alone."""
    paths = make_runs(tmp_path)
    for path in paths:
        write_records(path, [each for each in read_records(path) if each["kind"] == "train" or each["step"] == 264])
    picture = html_report.curves(groups_of(*paths))[0]
    values = accuracies(paths, 0)
    text = f"n=3, mean {np.mean(values):.2f} ± {np.std(values, ddof=1):.2f}"
    shown = plotted["test accuracy, raw weights, no TTA"][0]
    assert shown == {f"speed94\n{text}": pytest.approx(values)} and text in picture.alt


def test_dots_of_groups_with_long_names_and_one_accuracy_are_told_apart(tmp_path, plotted):
    paths = [make_run(tmp_path / f"r{rate}", head_learning_rate=rate) for rate in (0.1, 0.2)]
    for path in paths:
        change_scores(path, accuracy=lambda _: 0.9)
        scores = [{"kind": "eval", "step": 264, "epoch": 8.0} | score for score in read_result(path)["evaluations"]]
        write_records(path, [*read_records(path), *scores])
    html_report.curves(groups_of(*paths))
    labels = [label.replace("\n", " ") for label in plotted["test accuracy, raw weights, no TTA"][0]]
    assert labels == [f"speed94, head_learning_rate={rate} n=1, mean 90.00" for rate in (0.1, 0.2)]


def test_confusion_matrices_of_a_group_are_summed_over_its_finished_runs(tmp_path, plotted):
    paths = make_runs(tmp_path)
    expected = sum(np.array(read_result(path)["evaluations"][-1]["confusion"]) for path in paths[:2])
    (paths[2] / "result.json").unlink()
    ((name, group),) = groups_of(*paths).items()
    picture, _ = html_report.group_errors(name, group)
    ((counts, names, title),) = plotted.values()
    assert (counts == expected).all()
    assert names == CLASSES and title == "speed94, seeds 0, 1: test, raw weights, TTA 2"
    errors = counts - np.diag(np.diag(counts))
    assert picture.alt.startswith("confusion")
    assert f"{np.trace(counts):,} of {counts.sum():,} right; most often, {errors.max():,} times, " in picture.alt
    true, predicted = (CLASSES.index(name) for name in re.search(r"(\w+) is taken for (\w+)", picture.alt).groups())
    assert errors[true, predicted] == errors.max()


def test_reliability_diagram_is_of_the_finished_runs_that_recorded_it(tmp_path, plotted):
    """A run of before the records had it is left out, and so is a bin without images."""
    images, correct = [0.0, 100.0, 300.0], [0.0, 60.0, 285.0]
    paths = make_runs(tmp_path, 4)
    assert not any("reliability" in image["alt"] for image in render(*paths).images)
    for path, confidence in zip(paths[:3], ([0.0, 50.0, 300.0], [0.0, 80.0, 276.0], [0.0, 99.0, 300.0]), strict=True):
        change_scores(path, reliability=lambda _, sums=confidence: [images, correct, sums])
    (paths[2] / "result.json").unlink()
    ((name, group),) = groups_of(*paths).items()
    plotted.clear()
    picture = html_report.group_reliability(name, group)
    ((curves, title, *_),) = plotted.values()
    # both runs: 200 images at a mean confidence of 65 %, 120 right; 600 at 96 %, 570 right
    # the error is the mean of the runs' own errors; in the joint bins errors of opposite signs would cancel
    ece = (abs(60 - 50) + abs(285 - 300) + abs(60 - 80) + abs(285 - 276)) / 800
    assert title == f"speed94, seeds 0, 1: test, raw weights, TTA 2\nmean expected calibration error {ece:.4f}"
    assert picture.alt == "reliability diagram of " + title.replace("\n", ": ")
    x, accuracy = curves["accuracy"]
    np.testing.assert_allclose((x, accuracy, curves["share of the images"][1]), [(65, 96), (60, 95), (25, 75)])
    page = render(*paths)
    alts = [image["alt"] for image in page.images]
    assert [alt.partition(" of ")[0] for alt in alts if alt.startswith(("confusion", "reliability"))] == [
        "confusion matrix",
        "reliability diagram",
    ]


def test_reliability_without_finite_confidences_is_drawn(tmp_path):
    path = make_run(tmp_path / "run")
    change_scores(path, reliability=lambda _: [[0, 4], [0, 1], [0, None]])
    ((name, group),) = groups_of(path).items()
    assert html_report.group_reliability(name, group).alt.endswith("expected calibration error nan")


def test_damaged_picture_of_mistakes_is_left_out(tmp_path):
    path = make_run(tmp_path / "run")
    runs = run_records.read_runs([path])
    assert len(html_report.mistakes(runs)) == 1
    png = (path / "mistakes.png").read_bytes()
    (path / "mistakes.png").write_bytes(png[: len(png) // 2])
    assert not html_report.mistakes(runs)


def test_run_reports_its_averaged_weights_whatever_their_accuracy(tmp_path, plotted):
    path = make_run(tmp_path / "run", ema=True)
    change_scores(path, accuracy=lambda score: 0.5 if score["weights"] == "ema" else 0.9)
    assert render(path).results("run")["accuracy, %|as reported"] == "50.00|test, ema weights, TTA 2"


def test_difference_of_two_groups_has_its_interval(tmp_path, plotted):
    paths = [*make_runs(tmp_path, ema=True), *make_runs(tmp_path, recipe="other", ema=True)]
    for path, accuracy in zip(paths, (0.94, 0.95, 0.96, 0.91, 0.93, 0.95), strict=True):
        change_scores(path, accuracy=lambda s, x=accuracy: x if (s["weights"], s["tta"]) == ("ema", 2) else 0.5)
    expected = "+2.00 points (95 % interval -2.16 to +6.16), test, ema weights, TTA 2"
    assert render(*paths).row("speed94", "other") == [expected]
    unfinished = make_runs(tmp_path, recipe="third", finished=False)
    assert "difference of the accuracies" not in render(*paths[:4], *unfinished).html


def test_groups_that_report_other_kinds_are_compared_by_one_without_tta(tmp_path, plotted):
    paths = [*make_runs(tmp_path, 2, ema=True), *make_runs(tmp_path, 2, recipe="other")]
    for path, accuracy in zip(paths, (0.94, 0.96, 0.91, 0.93), strict=True):
        change_scores(path, accuracy=lambda s, x=accuracy: 0.5 if s["weights"] == "ema" or s["tta"] else x)
    (difference,) = render(*paths).row("speed94", "other")
    assert re.match(r"\+3.00 points .*, test, raw weights, no TTA$", difference)
    for path in paths[2:]:
        change(path, "result.json", evaluations=read_result(path)["evaluations"][1:])  # with TTA alone
    assert "difference of the accuracies" not in render(*paths).html


def test_classes_have_wilsons_interval(tmp_path, plotted):
    """Two runs classify the same images, so the interval is for the images of one run."""
    paths = make_runs(tmp_path, 2)
    for path, right in zip(paths, (80, 100), strict=True):
        counts = np.eye(10, dtype=int) * right + np.eye(10, k=1, dtype=int) * (100 - right)
        change_scores(path, confusion=lambda _, counts=counts: counts.tolist())
    assert render(*paths).row("cat") == ["90.0", "82.6 to 94.5", "100"]


def test_classes_with_a_long_common_beginning_are_told_apart(tmp_path, plotted):
    path = make_run(tmp_path / "run")
    names = [f"a long beginning that both have, then {number}" for number in range(10)]
    change(path, "environment.json", class_names=names)
    change_scores(path, confusion=lambda _: np.diag([*range(10)]).tolist())
    assert [render(path).row(name)[2] for name in names] == [*"0123456789"]


def test_class_without_images_has_no_accuracy(tmp_path, plotted):
    path = make_run(tmp_path / "run")
    change_scores(path, confusion=lambda _: np.diag([0, *[100] * 9]).tolist())
    page = render(path)
    assert page.row(CLASSES[0]) == ["-", "-", "0"] and page.row(CLASSES[1])[0] == "100.0"

import base64
import io
import re
import shlex
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from cifar_towers.errors import RunError
from cifar_towers.reporting import figures, html_report, run_records
from tests.programs import call
from tests.reporting.example_runs import CLASSES, accuracies, change, make_run, read_records, read_result, write_records

HOSTILE = "<script>alert('1')</script><img src=http://evil.example/x.png onerror=\"x()\">&amp;\"'\ud800\n"
RAW, TTA = "accuracy, %|test/raw", "accuracy, %|test/raw_tta2"


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

    def row(self, start):
        """Return the cells after the first in the first row that begins with it; small text follows a `|`."""
        return next(row[1:] for row in self.rows if row[0] == start)

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

    for name in ("line_plot", "confusion_matrix"):
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
    assert len(page.images) == 4 + 2 + 4  # curves, confusion matrices, mistakes
    for image in page.images:
        kind, content = image["src"].split(",", 1)
        picture = Image.open(io.BytesIO(base64.b64decode(content, validate=True)))
        picture.load()
        assert kind == "data:image/png;base64" and len(image["alt"]) > 20 and min(picture.size) > 100
    for tag, name, value in page.attributes:
        assert not name.startswith("on") and tag != "a"
        assert name not in ("src", "href") or value.startswith("data:")
    assert not re.search(r"url\(|@import|https?://", page.html)
    assert "default-src 'none'; img-src data:; style-src 'unsafe-inline'" in page.html


def test_results_of_runs_and_their_mean(tmp_path, plotted):
    runs = make_runs(tmp_path)
    page = render(*runs)
    for seed, run in enumerate(runs):
        result, cells = read_result(run), page.results(run.name)
        for heading, score in zip((RAW, TTA), result["evaluations"], strict=True):
            assert cells[heading] == f"{100 * score['accuracy']:.2f}|loss {score['loss']:.4f}"
        assert cells["images/s"] == f"{result['images_per_sec']:,.0f}"
        assert cells["training, s|with input and compilation"] == f"{540.25 + seed + 2.5 + 21.5:.1f}"
        others = [cells[name] for name in ("steps", "seed", "towers", "precision", "skipped steps")]
        assert others == ["264", str(seed), "2", "bfloat16", "0"]
        assert cells["weights|sha256"] == result["weights_sha256"][:16]
    for heading, tta in ((RAW, 0), (TTA, 2)):
        values = accuracies(runs, tta)
        expected = f"{np.mean(values):.2f}|± {np.std(values, ddof=1):.2f}, n=3"
        assert page.results("speed94: mean")[heading] == expected
    assert "speed94 (seeds 0, 1, 2)" in page.texts


def test_mean_is_over_finished_runs(tmp_path, plotted):
    runs = [make_run(tmp_path / "s0"), make_run(tmp_path / "s1", seed=1, finished=False, last_step=220)]
    page = render(*runs)
    assert page.results("speed94: mean")[RAW] == f"{accuracies(runs[:1], 0)[0]:.2f}|n=1"
    newest, unfinished = read_records(runs[1], "eval")[-1], page.results("s1")
    assert unfinished["steps"] == "220|unfinished" and unfinished[TTA] == "-"
    reported = "accuracy, %|as reported"
    assert unfinished[reported].endswith("test/raw, at step 198") and "at step" not in page.results("s0")[reported]
    assert newest["step"] == 198 and unfinished[RAW].startswith(f"{100 * newest['accuracy']:.2f}|")
    change(runs[0], "result.json", step=132)  # continued after its result
    page = render(*runs)
    assert page.results("s0")["steps"] == "264|unfinished" and page.results("s0")["weights|sha256"] == "-"
    assert "speed94: mean" not in [row[0] for row in page.rows]


@pytest.mark.parametrize("missing", ["config.json", "environment.json", "result.json", "mistakes.png", "train", "eval"])
def test_missing_files_and_records_are_left_out(tmp_path, plotted, missing):
    run, other = make_run(tmp_path / "run"), make_run(tmp_path / "other", "resnet20")
    if missing in ("train", "eval"):
        write_records(run, [record for record in read_records(run) if record["kind"] != missing])
    else:
        (run / missing).unlink()
    assert render(run, other).results("run")["run"] == "run"
    complete, page = render(other), render(run)
    parts = {"mistakes.png": "mistakes", "train": "training loss", "eval": "test/raw, by epoch"}
    for part in parts.values():
        assert any(part in image["alt"] for image in complete.images), part
        assert any(part in image["alt"] for image in page.images) == (part != parts.get(missing)), part


def test_all_strings_are_escaped(tmp_path):
    """Every string of the files, and the directories' names, would break a page that does not escape them."""
    run, other = make_run(tmp_path / "<b>&lt;'\"<script>"), make_run(tmp_path / "<i>", last_step=11)
    write_records(other, [{"kind": "train", "step": 11, "epoch": 1}])
    change(run, "config.json", recipe=HOSTILE, seed=HOSTILE, model=HOSTILE, **{HOSTILE: HOSTILE})
    change(
        run, "environment.json", command=[HOSTILE, "a b"], precision=HOSTILE, packages={HOSTILE: HOSTILE},
        synthetic_data=HOSTILE, class_names=[HOSTILE, *CLASSES[1:]],
    )  # fmt: skip
    change(run, "result.json", weights_sha256=HOSTILE)
    evaluations = [record | {"split": HOSTILE, "weights": HOSTILE} for record in read_records(run, "eval")]
    write_records(run, read_records(run, "train") + evaluations)
    page = Page(html_report.write(run_records.read_runs([run, other]), tmp_path / "page.html").read_text())
    assert page.tags <= {
        "html", "head", "meta", "title", "link", "style", "body", "section", "h1", "h2", "p", "div", "table", "thead",
        "tbody", "tr", "th", "td", "small", "figure", "figcaption", "img", "details", "summary", "pre",
    }  # fmt: skip
    assert {name for _, name, _ in page.attributes} <= {
        "lang", "charset", "name", "content", "http-equiv", "rel", "href", "class", "scope", "tabindex", "alt", "src",
    }  # fmt: skip
    assert all(image["src"].startswith("data:image/png;base64,") for image in page.images)
    shown = HOSTILE.replace("\ud800", "?")
    assert page.row(shown) == [shown, "-"]  # the setting
    (command,) = [text for text in page.texts if text.endswith(" 'a b'")]
    assert shlex.split(command) == [shown, "a b"]


def test_differing_and_shared_settings_and_commands(tmp_path, plotted):
    runs = [make_run(tmp_path / name, seed=seed, batch_size=1536 - seed) for seed, name in enumerate("ab")]
    change(runs[1], "environment.json", synthetic_data="SYNTHETIC DATA, NOT CIFAR-10")
    page = render(*runs)
    assert "b: SYNTHETIC DATA, NOT CIFAR-10" in page.texts
    assert page.row("batch_size") == ["1536", "1535"] and page.row("git_revision") == ["abc1230", "abc1231"]
    assert page.row("epochs") == ["8.0"]  # shared
    commands = [shlex.split(text) for text in page.texts if text.startswith("python ")]
    assert [command[3] for command in commands] == ["--seed=0", "--seed=1"]


def test_program(tmp_path, monkeypatch, capsys):
    for name in ("run", "other"):
        write_records(tmp_path / name, [{"kind": "train", "step": 3, "epoch": 1, "loss": 0.5}])
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, "report", "run", tmp_path / "other") == 0 and capsys.readouterr().out == "report.html\n"
    assert Page((tmp_path / "report.html").read_text()).row("other")
    with pytest.raises(RunError, match="cannot be written: .*--out=FILE"):
        html_report.write(run_records.read_runs([tmp_path / "run"]), tmp_path / "none" / "page.html")


def test_curve_of_several_runs_has_a_band():
    x, mean, low, high = html_report.mean_curve([{0: 1.0, 2: 3.0}, {0: 3.0, 1: 4.0, 2: 5.0, 3: 6.0}])
    assert x.tolist() == [0, 1, 2, 3] and mean.tolist() == [2, 3, 4, 6]  # one run has ended before 3
    np.testing.assert_allclose(high - mean, [2**0.5, 2**0.5, 2**0.5, 0])
    np.testing.assert_allclose(mean - low, high - mean)


def test_long_curves_are_averaged_over_neighbors():
    x, mean = html_report.mean_curve([{epoch: float(epoch % 2) for epoch in range(1200)}])
    assert len(x) == html_report.MAX_POINTS and np.all(mean == 0.5) and x[0] == 4.5


def test_more_groups_than_a_picture_can_distinguish_take_several(tmp_path, plotted):
    paths = [make_run(tmp_path / f"r{i}", f"recipe{i}", last_step=66) for i in range(9)]
    pictures = [picture.alt for picture in html_report.curves(groups_of(*paths)) if "training loss" in picture.alt]
    assert [alt.count("recipe") for alt in pictures] == [8, 1]


def test_confusion_matrices_of_a_group_are_summed_over_its_finished_runs(tmp_path, plotted):
    paths = make_runs(tmp_path)
    expected = sum(np.array(read_result(path)["evaluations"][-1]["confusion"]) for path in paths[:2])
    (paths[2] / "result.json").unlink()
    (picture,) = html_report.confusion_matrices(groups_of(*paths))
    ((counts, names, title),) = plotted.values()
    assert (counts == expected).all()
    assert names == CLASSES and title == "speed94, seeds 0, 1: test/raw_tta2"
    assert f"{np.trace(counts):,} of {counts.sum():,} right" in picture.alt


def test_run_reports_its_averaged_weights_whatever_their_accuracy(tmp_path, plotted):
    path = make_run(tmp_path / "run", ema=True)
    change_scores(path, accuracy=lambda score: 0.5 if score["weights"] == "ema" else 0.9)
    assert render(path).results("run")["accuracy, %|as reported"] == "50.00|test/ema_tta2"


def test_groups_are_compared_by_a_kind_of_score_that_all_report(tmp_path, plotted):
    paths = [*make_runs(tmp_path, ema=True), *make_runs(tmp_path, recipe="other", ema=True)]
    for path, accuracy in zip(paths, (0.94, 0.95, 0.96, 0.91, 0.93, 0.95), strict=True):
        change_scores(path, accuracy=lambda s, x=accuracy: x if (s["weights"], s["tta"]) == ("ema", 2) else 0.5)
    text = "speed94 - other: +2.00 points (95 % -1.58 to +5.58), n=3 and 3; test/ema_tta2"
    assert text in render(*paths).texts
    unfinished = make_runs(tmp_path, recipe="third", finished=False)
    assert "difference of mean" not in render(*paths[:3], *unfinished).html
    raw = make_runs(tmp_path, 2, recipe="raw")
    (line,) = run_records.compare_groups(groups_of(*paths[:3], *raw))
    assert line.endswith("test/raw")

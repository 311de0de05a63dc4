import base64
import io
import re
import shlex
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from cifar_towers.inference import report
from cifar_towers.inference.runs import compare_groups, group_by_recipe, read_runs
from cifar_towers.reporting import figures
from tests.inference.example_runs import CLASSES, accuracies, change, make_run, read_records, read_result, write_records
from tests.programs import call

HOSTILE = "<script>alert('1')</script><img src=http://evil.example/x.png onerror=\"x()\">&amp;\"'\n"
RAW, TTA = "accuracy, %\ntest/raw", "accuracy, %\ntest/raw_tta2"


class Page:
    """The elements and texts of a page, which must be well-formed."""

    def __init__(self, html):
        self.html, root = html, ElementTree.fromstring(html)
        self.tags = {element.tag for element in root.iter()}
        self.attributes = [(element.tag, *pair) for element in root.iter() for pair in element.items()]
        self.images = [image.attrib for image in root.iter("img")]
        self.texts = list(root.itertext())
        self.heads, self.rows = (
            [["".join(cell.itertext()) for cell in row] for row in root.iterfind(f".//{part}/tr")]
            for part in ("thead", "tbody")
        )

    def row(self, start):
        """Return the cells after the first in the first row that begins with it."""
        return next(row[1:] for row in self.rows if row[0] == start)

    def results(self, run, table=0):
        """Return the cells of a row of the first table, or of the second one of means, by heading."""
        return dict(zip(self.heads[table], [run, *self.row(run)], strict=True))


@pytest.fixture
def undrawn(monkeypatch):
    """Draw no curves, which takes time."""
    monkeypatch.setattr(figures, "line_plot", lambda curves, title: np.zeros((2, 2, 3), np.uint8))


def make_runs(directory, count=3, recipe="speed94", **settings):
    """Make runs of a recipe that differ in their seed."""
    return [make_run(directory / f"{recipe}-seed{seed}", recipe, seed, **settings) for seed in range(count)]


def groups_of(*directories):
    return group_by_recipe(read_runs(directories))


def render(*directories):
    return Page(report.render(read_runs(directories)))


def test_page_is_self_contained(tmp_path):
    """With all pictures drawn: three seeds of a recipe, one of which is not finished, and another recipe."""
    runs = [*make_runs(tmp_path), make_run(tmp_path / "resnet20", "resnet20", towers=4)]
    (runs[2] / "result.json").unlink()
    out = report.write(read_runs(runs), tmp_path / "report.html")
    page = Page(out.read_text())
    assert page.html.startswith("<!DOCTYPE html>") and not {"script", "iframe", "object", "base"} & page.tags
    assert len(page.images) == 4 + 2 * 4  # curves; confusion matrix and mistakes of each run
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


def test_results_of_runs_and_their_mean(tmp_path, undrawn):
    runs = make_runs(tmp_path)
    page = render(*runs)
    for seed, run in enumerate(runs):
        result, cells = read_result(run), page.results(run.name)
        for heading, score in zip((RAW, TTA), result["evaluations"], strict=True):
            assert cells[heading] == f"{100 * score['accuracy']:.2f}\nloss {score['loss']:.4f}"
        assert cells["images/s"] == f"{result['images_per_sec']:,.0f}"
        assert cells["training, s\nwith input and compilation"] == f"{540.25 + seed + 2.5 + 21.5:.1f}"
        others = [cells[name] for name in ("steps", "seed", "towers", "precision", "skipped steps")]
        assert others == ["264", str(seed), "2", "bfloat16", "0"]
        assert cells["weights\nsha256"] == result["weights_sha256"][:16]
    for heading, tta in ((RAW, 0), (TTA, 2)):
        values = accuracies(runs, tta)
        expected = f"{np.mean(values):.2f} ± {np.std(values, ddof=1):.2f} % (n=3)"
        assert page.results("speed94\nseeds 0, 1, 2", table=1)[heading.replace(", %", "")] == expected
    assert "speed94 (seeds 0, 1, 2)" in page.texts


def test_mean_is_over_finished_runs(tmp_path, undrawn):
    runs = [make_run(tmp_path / "s0"), make_run(tmp_path / "s1", seed=1, finished=False, last_step=220)]
    page = render(*runs)
    mean = page.results("speed94\nseeds 0, 1", table=1)["accuracy\ntest/raw"]
    assert mean == f"{accuracies(runs[:1], 0)[0]:.2f} % (n=1)"
    newest, unfinished = read_records(runs[1], "eval")[-1], page.results("s1")
    assert unfinished["steps"] == "220\nunfinished" and unfinished[TTA] == "-"
    reported = "accuracy, %\nas reported"
    assert unfinished[reported].endswith("test/raw at step 198") and "at step" not in page.results("s0")[reported]
    assert newest["step"] == 198 and unfinished[RAW].startswith(f"{100 * newest['accuracy']:.2f}\n")
    change(runs[0], "result.json", step=132)  # continued after its result
    page = render(*runs)
    assert page.results("s0")["steps"] == "264\nunfinished" and page.results("s0")["weights\nsha256"] == "-"
    assert "speed94\nseeds 0, 1" not in [row[0] for row in page.rows]


@pytest.mark.parametrize("missing", ["environment.json", "result.json", "mistakes.png", "train", "eval"])
def test_missing_files_and_records_are_left_out(tmp_path, undrawn, missing):
    run, other = make_run(tmp_path / "run"), make_run(tmp_path / "other", "resnet20")
    if missing in ("train", "eval"):
        write_records(run, [record for record in read_records(run) if record["kind"] != missing])
    else:
        (run / missing).unlink()
    assert render(run, other).results("run")["run"] == "run"
    complete, page = render(other), render(run)
    parts = {"mistakes.png": "mistakes", "train": "training loss", "eval": "test/raw accuracy"}
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
    page = Page(report.write(read_runs([run, other]), tmp_path / "page.html").read_text())
    assert page.tags <= {
        "html", "head", "meta", "title", "link", "style", "body", "section", "h1", "h2", "p", "div", "table", "thead",
        "tbody", "tr", "th", "td", "figure", "figcaption", "img", "details", "summary", "pre",
    }  # fmt: skip
    assert {name for _, name, _ in page.attributes} <= {
        "lang", "charset", "name", "content", "http-equiv", "rel", "href", "class", "scope", "tabindex", "alt", "src",
    }  # fmt: skip
    assert all(image["src"].startswith("data:image/png;base64,") for image in page.images)
    assert page.row(HOSTILE) == [HOSTILE, "-"]  # the setting
    (command,) = [text for text in page.texts if text.endswith(" 'a b'")]
    assert shlex.split(command) == [HOSTILE, "a b"]


def test_differing_and_shared_settings_and_commands(tmp_path, undrawn):
    runs = [make_run(tmp_path / name, seed=seed, batch_size=1536 - seed) for seed, name in enumerate("ab")]
    change(runs[1], "environment.json", synthetic_data="SYNTHETIC DATA, NOT CIFAR-10")
    page = render(*runs)
    assert "b: SYNTHETIC DATA, NOT CIFAR-10" in page.texts
    assert page.row("batch_size") == ["1536", "1535"] and page.row("git_revision") == ["abc1230", "abc1231"]
    assert page.row("epochs") == ["8.0"]  # shared
    commands = [shlex.split(text) for text in page.texts if text.startswith("cifar-towers train ")]
    assert [command[3] for command in commands] == ["--seed=0", "--seed=1"]


def test_program(tmp_path, monkeypatch, capsys):
    make_runs(tmp_path / "seeds", last_step=22)
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, "report", "seeds", "--out=page.html") == 0 and capsys.readouterr().out == "page.html\n"
    page = Page((tmp_path / "page.html").read_text())
    assert [page.results(f"speed94-seed{seed}")["seed"] for seed in range(3)] == ["0", "1", "2"]


def test_curve_of_several_runs_has_a_band():
    x, mean, low, high = report.mean_curve([{0: 1.0, 1: 3.0}, {0: 3.0, 1: 5.0, 2: 6.0}])
    assert x.tolist() == [0, 1, 2] and mean.tolist() == [2, 4, 6]  # one run has ended before 2
    np.testing.assert_allclose(high - mean, [2**0.5, 2**0.5, 0])
    np.testing.assert_allclose(mean - low, high - mean)


def test_long_curves_are_averaged_over_neighbors():
    x, mean = report.mean_curve([{epoch: float(epoch % 2) for epoch in range(1200)}])
    assert len(x) == report.MAX_POINTS and np.all(mean == 0.5) and x[0] == 4.5


def test_more_groups_than_a_picture_can_distinguish_take_several(tmp_path, undrawn):
    paths = [make_run(tmp_path / f"r{i}", f"recipe{i}", last_step=66) for i in range(9)]
    pictures = [text for text, _ in report.curves(groups_of(*paths)) if "training loss" in text]
    assert [text.count("recipe") for text in pictures] == [8, 1]


def test_run_reports_its_averaged_weights_whatever_their_accuracy(tmp_path, undrawn):
    path = make_run(tmp_path / "run", ema=True)
    scores = read_result(path)["evaluations"]
    scores = [score | {"accuracy": 0.5 if score["weights"] == "ema" else 0.9} for score in scores]
    change(path, "result.json", evaluations=scores)
    assert render(path).results("run")["accuracy, %\nas reported"] == "50.00\ntest/ema_tta2"


def test_difference_of_groups_is_a_line(tmp_path, undrawn):
    runs = [*make_runs(tmp_path), *make_runs(tmp_path, recipe="other")]
    (line,) = compare_groups(groups_of(*runs))
    assert line.startswith("speed94 - other: +") and line in render(*runs).texts

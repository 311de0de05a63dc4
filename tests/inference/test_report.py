"""The report of runs: a page that holds all it shows, with the numbers of the runs' files."""

import base64
import io
import re
import shlex
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from cifar_towers.inference import report
from cifar_towers.reporting import figures
from cifar_towers.runs.table import group_by_recipe, read_runs
from tests.helpers.example_runs import (
    CLASSES,
    change,
    make_run,
    make_runs,
    read_records,
    read_result,
    write_records,
)
from tests.helpers.programs import call

HOSTILE = "<script>alert('1')</script><img src=http://evil.example/x.png onerror=\"x()\">&amp;\"'\n"
PLAIN = "accuracy, %\ntest"
TTA = "accuracy, %\ntest_tta"
REPORTED = "accuracy, %\nas reported"


def cell_texts(root, part):
    """Return the texts of the cells of each row, in the `thead` or `tbody` of all tables."""
    rows = []
    for row in root.iterfind(f".//{part}/tr"):
        rows.append(["".join(cell.itertext()) for cell in row])
    return rows


class Page:
    """The elements and texts of a page, which must be well-formed."""

    def __init__(self, html):
        self.html = html
        root = ElementTree.fromstring(html)
        self.tags = {element.tag for element in root.iter()}
        self.attributes = []
        for element in root.iter():
            self.attributes += [(element.tag, name, value) for name, value in element.items()]
        self.images = [image.attrib for image in root.iter("img")]
        self.texts = list(root.itertext())
        self.heads = cell_texts(root, "thead")
        self.rows = cell_texts(root, "tbody")

    def row(self, start):
        """Return the cells after the first in the first row that begins with it."""
        return next(row[1:] for row in self.rows if row[0] == start)

    def results(self, run, table=0):
        """Return the cells of a row of the first table, or of the second one of means, by
        heading.
        """
        return dict(zip(self.heads[table], [run, *self.row(run)], strict=True))


@pytest.fixture
def undrawn(monkeypatch):
    """Draw no curves, which takes time."""
    monkeypatch.setattr(figures, "line_plot", lambda curves, title: np.zeros((2, 2, 3), np.uint8))


def render(*directories):
    return Page(report.render(read_runs(directories)))


def accuracies(directories, tta):
    """Return the final accuracies in percent."""
    found = []
    for directory in directories:
        scores = read_result(directory)["evaluations"]
        found += [100 * score["accuracy"] for score in scores if score["tta"] == tta]
    return found


def test_page_of_the_program_is_self_contained(tmp_path, monkeypatch, capsys):
    """With all pictures drawn: three seeds of a recipe, one of which is not finished, and another
    recipe.
    """
    runs = [*make_runs(tmp_path), make_run(tmp_path / "resnet20", "resnet20", towers=4)]
    (runs[2] / "result.json").unlink()
    monkeypatch.chdir(tmp_path)

    assert call(monkeypatch, "report", *runs, "--out=page.html") == 0
    assert capsys.readouterr().out == "page.html\n"

    page = Page((tmp_path / "page.html").read_text())
    assert page.html.startswith("<!DOCTYPE html>")
    assert not {"script", "iframe", "object", "base"} & page.tags
    assert len(page.images) == 4 + 2 * 4  # curves; confusion matrix and mistakes of each run

    for image in page.images:
        kind, content = image["src"].split(",", 1)
        picture = Image.open(io.BytesIO(base64.b64decode(content, validate=True)))
        picture.load()
        assert kind == "data:image/png;base64"
        assert image["alt"]
        assert min(picture.size) > 100
    for tag, name, value in page.attributes:
        assert not name.startswith("on")
        assert tag != "a"
        assert name not in ("src", "href") or value.startswith("data:")

    assert not re.search(r"url\(|@import|https?://", page.html)
    assert "default-src 'none'; img-src data:; style-src 'unsafe-inline'" in page.html


def test_results_of_runs_and_of_groups_are_those_of_their_files(tmp_path, undrawn):
    runs = make_runs(tmp_path)
    page = render(*runs, *make_runs(tmp_path, recipe="other"))
    for seed, run in enumerate(runs):
        result = read_result(run)
        cells = page.results(run.name)
        for heading, score in zip((PLAIN, TTA), result["evaluations"], strict=True):
            assert cells[heading] == f"{100 * score['accuracy']:.2f}\nloss {score['loss']:.4f}"
        assert cells["images/s"] == f"{result['images_per_sec']:,.0f}"
        seconds = 540.25 + seed + 2.5 + 21.5
        assert cells["training, s,\nwith input and\ncompilation"] == f"{seconds:.1f}"
        others = [
            cells[name] for name in ("steps", "seed", "towers", "precision", "skipped\nsteps")
        ]
        assert others == ["8", str(seed), "2", "bfloat16", "0"]
        assert cells["weights\nsha256"] == result["weights_sha256"][:8]

    means = page.results("speed94\nseeds 0, 1, 2", table=1)
    for heading, tta in ((PLAIN, False), (TTA, True)):
        values = accuracies(runs, tta)
        expected = f"{np.mean(values):.2f} ± {np.std(values, ddof=1):.2f} % (n=3)"
        assert means[heading.replace(", %", "")] == expected

    assert any(text.startswith("speed94 - other: +2.00 points") for text in page.texts)


def test_mean_is_over_finished_runs(tmp_path, undrawn):
    runs = [
        make_run(tmp_path / "s0"),
        make_run(tmp_path / "s1", seed=1, finished=False, last_step=7),
    ]
    page = render(*runs)
    mean = page.results("speed94\nseeds 0, 1", table=1)["accuracy\ntest"]

    assert mean == f"{accuracies(runs[:1], False)[0]:.2f} % (n=1)"

    newest = read_records(runs[1], "eval")[-1]
    unfinished = page.results("s1")

    assert unfinished["steps"] == "7\nunfinished"
    assert unfinished[TTA] == "-"
    assert newest["step"] == 6
    assert unfinished[PLAIN].startswith(f"{100 * newest['accuracy']:.2f}\n")
    assert unfinished[REPORTED].endswith("test at step 6")
    assert "at step" not in page.results("s0")[REPORTED]

    change(runs[0], "result.json", step=4)  # continued after its result
    page = render(*runs)

    assert page.results("s0")["steps"] == "8\nunfinished"
    assert page.results("s0")["weights\nsha256"] == "-"
    assert "speed94\nseeds 0, 1" not in [row[0] for row in page.rows]


@pytest.mark.parametrize(
    "missing", ["environment.json", "result.json", "mistakes.png", "train", "eval"]
)
def test_missing_files_and_records_are_left_out(tmp_path, undrawn, missing):
    run = make_run(tmp_path / "run")
    other = make_run(tmp_path / "other", "resnet20")
    if missing in ("train", "eval"):
        write_records(run, [record for record in read_records(run) if record["kind"] != missing])
    else:
        (run / missing).unlink()

    assert render(run, other).results("run")["run"] == "run"

    complete = render(other)
    page = render(run)
    parts = {"mistakes.png": "mistakes", "train": "training loss", "eval": "test accuracy"}
    for part in parts.values():
        assert any(part in image["alt"] for image in complete.images), part
        is_drawn = any(part in image["alt"] for image in page.images)
        assert is_drawn == (part != parts.get(missing)), part


def test_all_strings_are_escaped(tmp_path, undrawn):
    """Every string of the files, and the directories' names, would break a page that does not
    escape them.
    """
    run = make_run(tmp_path / "<b>&lt;'\"<script>")
    other = make_run(tmp_path / "<i>", last_step=1)
    write_records(other, [{"kind": "train", "step": 1, "epoch": 1}])
    change(run, "config.json", recipe=HOSTILE, seed=HOSTILE, model=HOSTILE, **{HOSTILE: HOSTILE})
    change(
        run,
        "environment.json",
        command=[HOSTILE, "a b"],
        precision=HOSTILE,
        packages={HOSTILE: HOSTILE},
        class_names=[HOSTILE, *CLASSES[1:]],
    )
    change(run, "result.json", weights_sha256=HOSTILE, dataset=HOSTILE)
    evaluations = [
        record | {"split": HOSTILE, "weights": HOSTILE} for record in read_records(run, "eval")
    ]
    write_records(run, read_records(run, "train") + evaluations)
    page = render(run, other)
    plain = render(make_run(tmp_path / "plain"), make_run(tmp_path / "too", batch_size=2))
    names = {name for _, name, _ in page.attributes}

    assert page.tags <= plain.tags
    assert names <= {name for _, name, _ in plain.attributes}
    assert all(image["src"].startswith("data:image/png;base64,") for image in page.images)
    assert page.row(HOSTILE) == [HOSTILE, "-"]  # the setting

    commands = [text for text in page.texts if text.endswith(" 'a b'")]
    (command,) = commands
    assert shlex.split(command) == [HOSTILE, "a b"]


def test_differing_and_shared_settings_and_commands(tmp_path, undrawn):
    runs = [
        make_run(tmp_path / name, seed=seed, batch_size=1536 - seed)
        for seed, name in enumerate("ab")
    ]
    page = render(*runs)

    assert page.row("batch_size") == ["1536", "1535"]
    assert page.row("git_revision") == ["abc1230", "abc1231"]
    assert page.row("model") == ["net"]  # shared

    commands = [shlex.split(text) for text in page.texts if text.startswith("cifar-towers train ")]
    assert [command[2] for command in commands] == ["--seed=0", "--seed=1"]


def test_every_run_has_the_name_of_its_data_set(tmp_path, undrawn):
    done = make_run(tmp_path / "done")
    change(done, "result.json", dataset="synthetic")
    unfinished = make_run(tmp_path / "unfinished", finished=False, dataset="synthetic")
    page = render(done, unfinished, make_run(tmp_path / "other"))
    names = {run: page.results(run)["data"] for run in ("done", "unfinished", "other")}
    assert names == {"done": "synthetic", "unfinished": "synthetic", "other": "cifar10"}


def test_curves_have_a_band_of_several_runs_and_are_averaged_over_neighbors():
    x, mean, low, high = report.mean_curve([{0: 1.0, 1: 3.0}, {0: 3.0, 1: 5.0, 2: 6.0}])

    assert x.tolist() == [0, 1, 2]
    assert mean.tolist() == [2, 4, 6]  # one run has ended before 2
    np.testing.assert_allclose(high - mean, [2**0.5, 2**0.5, 0])
    np.testing.assert_allclose(mean - low, high - mean)

    x, mean = report.mean_curve([{epoch: float(epoch % 2) for epoch in range(1200)}])
    assert len(x) == report.MAX_POINTS
    assert np.all(mean == 0.5)
    assert x[0] == 4.5


def test_more_groups_than_a_picture_can_distinguish_take_several(tmp_path, undrawn):
    paths = [make_run(tmp_path / f"r{i}", f"recipe{i}", last_step=2) for i in range(9)]
    curves = report.curves(group_by_recipe(read_runs(paths)))
    pictures = [text for text, _ in curves if "training loss" in text]
    assert [text.count("recipe") for text in pictures] == [8, 1]

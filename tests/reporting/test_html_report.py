import base64
import io
import itertools
import json
import math
import os
import re
import shlex
import statistics
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cifar_towers.errors import RunError, UsageError
from cifar_towers.reporting import figures, html_report, report_figures, run_records

ROOT = Path(__file__).parents[2]
CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
HOSTILE = "<script>alert('1')</script><img src=http://evil.example/x.png onerror=\"x()\">&amp;\"'\ud800\n"
KINDS = ("train", "eval")
STEPS, EVERY, PER_EPOCH = 264, 11, 33
SHEET = figures.png(np.random.default_rng(0).integers(0, 256, (300, 800, 3), np.uint8))


def make_run(directory, recipe="speed94", seed=0, *, towers=2, finished=True, last_step=STEPS, ema=False, **settings):
    """A run's directory, its curves as of a small net: what the accuracies end at is a function of recipe and seed."""
    directory.mkdir(parents=True)
    draws = np.random.default_rng([seed, len(recipe)])
    level = 0.938 if recipe == "speed94" else 0.921
    config = {"recipe": recipe, "model": "speednet94", "seed": seed, "batch_size": 1536, "epochs": 8.0, "seeds": ""}
    config |= {
        "train_dir": str(directory),
        "precision": "auto",
        "num_gpus": 0,
        "optimizer": "muon",
        "tta": 2,
    } | settings
    packages = {"tensorflow": "2.21.0", "keras": "3.15.1", "numpy": "2.4.6"}
    layers = [("whiten", "Conv2D", 24, 672), ("conv_1", "Conv2D", 64, 13824), ("head", "Dense", 10, 640)]
    environment = {
        "command": [
            "python",
            "scripts/train.py",
            f"--flagfile=configs/{recipe}.cfg",
            f"--seed={seed}",
            "--data_dir=/a b",
        ],
        "python": "3.11.2",
        "platform": "Linux-6.1",
        "processor": "AMD EPYC",
        "cores": 2,
        "packages": packages,
        "git_revision": f"abc123{seed}",
        "towers": [{"name": f"tower_{k}", "device": f"/CPU:{k}"} for k in range(towers)],
        "precision": "bfloat16",
        "data_sha256": {"train": "c50e2d9aebe4fd88", "test": "4b43d2e153a74d46"},
        "synthetic_data": "",
        "class_names": CLASSES,
        "variables": [
            {"name": f"{n}/kernel", "shape": [3, c], "bytes": 4 * p, "device": "/CPU:0"} for n, _, c, p in layers
        ],
        "model": [
            {"name": n, "kind": k, "output": [32, 32, c], "parameters": p, "flops": 2000 * p} for n, k, c, p in layers
        ],
    }
    evaluations, lines = [], []
    for step in range(EVERY, last_step + 1, EVERY):
        part = step / STEPS
        epoch = step / PER_EPOCH
        record = {
            "kind": "train",
            "step": step,
            "epoch": epoch,
            "image_side": 24 if part <= 0.5 else 32,
            "bad_steps": 0,
        }
        record |= {"loss": 0.75 + 1.4 * math.exp(-4 * part) + 0.03 * draws.normal()}
        record |= {"accuracy": min(0.99, level * (1 - 0.8 * math.exp(-5 * part)) + 0.01 * draws.normal())}
        record |= {
            "images_per_sec": (3100 if part <= 0.5 else 1500) + 40 * draws.normal(),
            "learning_rate": 0.2 * (1 - part),
        }
        record |= {"gradient_norm": 0.4 + 0.6 * part + 0.05 * draws.normal(), "input_wait": abs(0.01 * draws.normal())}
        if step == EVERY:
            record["images_per_sec"] = 0.0  # no step was timed yet
        if step % (2 * EVERY) == 0:
            record["towers"] = {
                "loss": [record["loss"] + 0.01 * k for k in range(towers)],
                "gradient_norm": [1.1 * record["gradient_norm"] + 0.01 * k for k in range(towers)],
                "cosine": [0.9 - 0.2 * part - 0.01 * k for k in range(towers)],
            }
            record["gradient_noise_scale"] = None if step == 2 * EVERY else 900 * math.exp(part) + 30 * draws.normal()
        lines.append(record)
        final = finished and step == last_step
        if step % (2 * PER_EPOCH) == 0 or final:
            evaluations = []
            for weights in ["raw", "ema"] if ema else ["raw"]:
                for tta in [0, 2] if final else [0]:
                    reached = level * (1 - 0.9 * math.exp(-6 * part)) + 0.006 * bool(tta) + 0.001 * draws.normal()
                    confusion = mistaken(reached, draws)
                    told = {"split": "test", "weights": weights, "tta": tta, "count": int(confusion.sum())}
                    told |= {"accuracy": np.trace(confusion) / confusion.sum(), "loss": 1.3 - reached}
                    evaluations.append(told | {"confusion": confusion.tolist()})
            lines += [{"kind": "eval", "step": step, "epoch": epoch, **told} for told in evaluations]
    seconds = {"start": 4.2, "compile": 21.5, "train": 540.25 + seed, "input": 2.5, "evaluate": 11.0, "save": 1.25}
    result = {
        "step": last_step,
        "reached": 0.0,
        "dataset": "cifar10",
        "seconds": seconds,
        "images_per_sec": 1875.4 + seed,
    }
    result |= {"weights_sha256": f"{seed:x}" * 64, "failed_saves": 0, "bad_steps": 0, "rollbacks": 0}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "environment.json").write_text(json.dumps(environment))
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (directory / "mistakes.png").write_bytes(SHEET)
    if finished:
        (directory / "result.json").write_text(json.dumps(result | {"evaluations": evaluations}))
    return directory


def mistaken(accuracy, draws):
    """[10, 10] counts of 1,000 examples a class."""
    off = draws.dirichlet(np.full(10, 0.4), 10) * (1 - accuracy)
    return np.round(1000 * (off + accuracy * np.eye(10))).astype(int)


class Page(HTMLParser):
    """What a page holds, and whether every element is closed in its place."""

    VOID = {"meta", "link", "img"}

    def __init__(self, html):
        super().__init__()
        self.open, self.tags, self.images, self.attributes = [], set(), [], []
        self.heads, self.rows, self.texts, self.shown = [], [], [], html
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += [(tag, *pair) for pair in attrs]
        if tag == "img":
            self.images.append(dict(attrs))
        rows = self.heads if "thead" in self.open else self.rows
        if tag == "tr":
            rows.append([])
        if tag in ("td", "th"):
            rows[-1].append("")
        if tag == "small":
            rows[-1][-1] += "|"
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)
        if {"td", "th"} & set(self.open):
            (self.heads if "thead" in self.open else self.rows)[-1][-1] += data

    def row(self, *start):
        """The cells after these in the first row that begins with them, a `|` before what stands small."""
        return next(row[len(start) :] for row in self.rows if tuple(row[: len(start)]) == start)

    def column(self, heading, run):
        return dict(zip(self.heads[0], [run, *self.row(run)], strict=True))[heading]


@pytest.fixture
def drawn(monkeypatch):
    """(name, arguments) of each picture asked for, none of which is drawn."""
    calls = []
    for name in ("line_plot", "confusion_matrix"):
        monkeypatch.setattr(
            figures, name, lambda *given, name=name: (calls.append((name, *given)), np.zeros((2, 2, 3), np.uint8))[1]
        )
    return calls


def read(*directories):
    return Page(html_report.render(run_records.read_runs(directories)))


def result_of(directory):
    return json.loads((directory / "result.json").read_text())


def accuracies(directories, tta):
    return [100 * s["accuracy"] for d in directories for s in result_of(d)["evaluations"] if s["tta"] == tta]


def change(directory, name, **values):
    """Gives the JSON file other values; None takes a key away."""
    changed = json.loads((directory / name).read_text()) | values
    kept = {key: value for key, value in changed.items() if value is not None}
    (directory / name).write_text(json.dumps(kept))


RAW, TTA = "test accuracy, %|raw weights, no TTA", "test accuracy, %|raw weights, TTA 2"


def test_the_page_is_one_file_that_is_whole_and_loads_nothing(tmp_path):
    """All pictures really drawn: three seeds of one recipe, one of which is not finished, and another recipe."""
    runs = [make_run(tmp_path / f"speed94-seed{seed}", seed=seed, finished=seed < 2) for seed in range(3)]
    runs.append(make_run(tmp_path / "resnet20", "resnet20", towers=4))
    out = html_report.write(runs, tmp_path / "report.html")
    page = Page(out.read_bytes().decode("ascii"))
    assert page.shown.startswith("<!doctype html>") and not {"script", "iframe", "object", "base"} & page.tags
    assert ("meta", "charset", "utf-8") in page.attributes
    assert "default-src 'none'; img-src data:; style-src 'unsafe-inline'" in page.shown
    assert len(page.images) == 8 + 2 + 4
    for image in page.images:
        picture = decoded(image)
        assert len(image["alt"]) > 20 and min(picture.size) > 100
    for tag, name, value in page.attributes:
        assert not name.startswith("on") and tag != "a"
        assert name not in ("src", "href") or value.startswith("data:")
    assert not re.search(r"url\(|@import|https?://", page.shown)
    assert {"prefers-color-scheme: dark", "@media print", "width=device-width"} <= set(
        re.findall(r"prefers-color-scheme: dark|@media print|width=device-width", page.shown)
    )
    assert page.row("speed94: mean")


def decoded(image):
    kind, encoded = image["src"].split(",", 1)
    assert kind == "data:image/png;base64"
    picture = Image.open(io.BytesIO(base64.b64decode(encoded, validate=True)))
    picture.load()
    return picture


def test_the_table_says_what_the_results_say(tmp_path, drawn):
    runs = [make_run(tmp_path / f"speed94-seed{seed}", seed=seed) for seed in range(3)]
    page = read(*runs)
    for seed, run in enumerate(runs):
        result = result_of(run)
        plain, augmented = result["evaluations"]
        cells = dict(zip(page.heads[0], [run.name, *page.row(run.name)], strict=True))
        assert cells[RAW] == f"{100 * plain['accuracy']:.2f}|loss {plain['loss']:.4f}"
        assert cells[TTA] == f"{100 * augmented['accuracy']:.2f}|loss {augmented['loss']:.4f}"
        assert cells["images/s"] == f"{result['images_per_sec']:,.0f}"
        assert cells["training, s|with input, compilation"] == f"{540.25 + seed + 2.5 + 21.5:.1f}"
        told = [cells[name] for name in ("steps", "recipe", "seed", "towers", "precision", "bad steps")]
        assert told == ["264", "speed94", str(seed), "2", "bfloat16", "0"]
        assert cells["weights|sha256"] == result["weights_sha256"][:16]
    for heading, tta in ((RAW, 0), (TTA, 2)):
        values = accuracies(runs, tta)
        assert page.column(heading, "speed94: mean") == f"{np.mean(values):.2f}|± {np.std(values, ddof=1):.2f}, n=3"
    assert page.row("speed94-seed1", "tower_1", "/CPU:1")[-1] == "12"
    assert "speed94 (seeds 0, 1, 2)" in page.texts


def test_a_mean_needs_what_is_finished_and_a_deviation_two(tmp_path, drawn):
    runs = [
        make_run(tmp_path / f"s{seed}", seed=seed, finished=seed == 0, last_step=264 - 44 * seed) for seed in range(2)
    ]
    page = read(*runs)
    assert page.column(RAW, "speed94: mean") == f"{accuracies(runs[:1], 0)[0]:.2f}|n=1"
    assert page.column("steps", "s1") == "220|unfinished"
    last = [json.loads(line) for line in (runs[1] / "metrics.jsonl").read_text().splitlines()]
    newest = [record for record in last if record["kind"] == "eval"][-1]
    assert newest["step"] == 198 and page.column(RAW, "s1").startswith(f"{100 * newest['accuracy']:.2f}|")
    assert page.column(TTA, "s1") == "-"
    assert [row[0] for row in page.rows if row[-1] == "580.7"] == ["s0"]  # where the seconds went
    (runs[0] / "result.json").unlink()
    assert "speed94: mean" not in [row[0] for row in read(*runs).rows]


def test_a_run_that_went_on_after_its_result_is_not_finished(tmp_path, drawn):
    run = make_run(tmp_path / "run")
    change(run, "result.json", step=132)
    page = read(run)
    assert page.column("steps", "run") == "264|unfinished" and page.column("weights|sha256", "run") == "-"
    assert "total, s" not in itertools.chain(*page.heads)  # the seconds


def test_a_curve_is_the_mean_with_a_band_over_the_seeds(tmp_path, drawn):
    runs = [make_run(tmp_path / f"s{seed}", seed=seed) for seed in range(3)] + [make_run(tmp_path / "r", "resnet20")]
    page = read(*runs)
    told = [[json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in runs]
    curves = {call[2]: call[1] for call in drawn if call[0] == "line_plot"}
    assert len(curves) == 8 and all(list(of) == ["speed94", "resnet20"] for of in curves.values())
    for title, key, scale in (
        ("training loss (batch)", "loss", 1),
        ("training accuracy (batch)", "accuracy", 100),
        ("time waiting for input", "input_wait", 100),
    ):
        values = scale * np.array([[r[key] for r in run if r["kind"] == "train"] for run in told])
        x, y, low, high = curves[title]["speed94"]
        np.testing.assert_allclose(x, np.arange(11, 265, 11) / 33)
        np.testing.assert_allclose([y, low, high], [values[:3].mean(0), values[:3].min(0), values[:3].max(0)])
        np.testing.assert_allclose(curves[title]["resnet20"][1], values[3])
        assert len(curves[title]["resnet20"]) == 2
    x, y, low, high = curves["test accuracy, raw weights, no TTA"]["speed94"]
    assert x.tolist() == [2, 4, 6, 8]
    assert (y[-1], low[-1]) == pytest.approx((np.mean(of := accuracies(runs[:3], 0)), min(of)))
    assert f"at the end: speed94 {y[-1]:.4g}" in page.images[0]["alt"]
    assert len(curves["gradient noise scale"]["speed94"][0]) == 11  # one of twelve is null
    assert curves["throughput"]["speed94"][2].min() > 1000


def test_where_a_run_ends_the_others_go_on():
    x, y, low, high = report_figures.mean_curve([{1.0: 2.0, 2.0: 6.0}, {1.0: 4.0}, {}])
    assert [list(column) for column in (x, y, low, high)] == [[1, 2], [3, 6], [2, 6], [4, 6]]
    assert [len(column) for column in report_figures.mean_curve([{}], 3)] == [0, 0]


def test_neighbours_of_a_long_curve_are_averaged_and_no_evaluation_is(tmp_path, drawn):
    runs = [{float(epoch): float(epoch**2 + run) for epoch in range(10)} for run in range(3)]
    del runs[2][9.0]
    x, y, low, high = report_figures.mean_curve(runs, 5)
    assert x.tolist() == [0.5, 2.5, 4.5, 6.5, 8.5]
    assert low.tolist() == [0.5, 6.5, 20.5, 42.5, 66.0]  # the last of the run that has but one of the two
    assert (
        high.tolist() == [2.5, 8.5, 22.5, 44.5, 73.5] and y[0] == 1.5 and y[-1] == pytest.approx((72.5 + 73.5 + 66) / 3)
    )
    (tmp_path / "run").mkdir()
    told = [
        {"kind": kind, "step": step, "epoch": step, "loss": 1, "accuracy": 0.5} for step in range(999) for kind in KINDS
    ]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in told))
    page = read(tmp_path / "run")
    assert [len(call[1]["run"][0]) for call in drawn] == [999, 111, 111]
    assert "A point of a long run's training is the mean of several records." in page.texts


def test_raw_and_averaged_weights_have_a_picture_each_and_recipes_one_colour(tmp_path, drawn):
    read(make_run(tmp_path / "plain", "plain"), make_run(tmp_path / "averaged", "averaged", ema=True))
    curves = {call[2]: call[1] for call in drawn if call[0] == "line_plot"}
    assert list(curves["test accuracy, raw weights, no TTA"]) == ["plain", "averaged"]
    averaged = curves["test accuracy, ema weights, no TTA"]
    assert [(name, len(of[0])) for name, of in averaged.items()] == [("plain: not recorded", 0), ("averaged", 4)]


def test_confusions_of_a_group_are_summed_over_its_finished_runs(tmp_path, drawn):
    runs = [make_run(tmp_path / f"s{seed}", seed=seed) for seed in range(3)]
    (runs[2] / "result.json").unlink()
    page = read(*runs)
    ((_, counts, names, title),) = [call for call in drawn if call[0] == "confusion_matrix"]
    assert (counts == sum(np.array(result_of(run)["evaluations"][-1]["confusion"]) for run in runs[:2])).all()
    assert names == CLASSES and title == "speed94, seeds 0, 1: test, raw weights, TTA 2"
    off = counts - np.diag(np.diag(counts))
    alt = next(image["alt"] for image in page.images if image["alt"].startswith("confusion"))
    assert f"{np.trace(counts):,} of {counts.sum():,} right; most often, {off.max():,} times, " in alt
    true, taken = (CLASSES.index(name) for name in re.search(r"(\w+) is taken for (\w+)", alt).groups())
    assert off[true, taken] == off.max()


def test_of_towers_the_mean_and_the_last(tmp_path, drawn):
    run = make_run(tmp_path / "run", towers=3)
    told = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    told = [record["towers"] for record in told if "towers" in record]
    expected = [f"{of:.4g}" for key in told[0] for of in (statistics.fmean(t[key][2] for t in told), told[-1][key][2])]
    page = read(run)
    assert page.row("run", "tower_2", "/CPU:2") == [*expected, "12"]


def test_towers_of_a_run_that_went_on_with_fewer(tmp_path, drawn):
    run = make_run(tmp_path / "run", towers=2)
    with (run / "metrics.jsonl").open("a") as file:
        late = {"loss": [0.5, None], "gradient_norm": [1.5], "cosine": None}
        file.write(json.dumps({"kind": "train", "step": 275, "towers": late}) + "\n")
        file.write(json.dumps({"kind": "train", "step": 286, "towers": {"loss": [0.25]}}) + "\n")
    assert read(run).row("run", "tower_0", "-") == ["0.25", "0.25", "-", "-", "-", "-", "1"]


@pytest.mark.parametrize("without", ["config.json", "environment.json", "result.json", "mistakes.png", "train", "eval"])
def test_what_is_missing_is_left_out(tmp_path, drawn, without):
    run, other = make_run(tmp_path / "run"), make_run(tmp_path / "other", "resnet20")
    if without in ("train", "eval"):
        lines = (run / "metrics.jsonl").read_text().splitlines()
        kept = [line for line in lines if json.loads(line)["kind"] != without]
        (run / "metrics.jsonl").write_text("\n".join(kept))
    else:
        (run / without).unlink()
    for page in (read(run), read(run, other)):
        assert page.column("run", "run") == "run"
    whole, page = read(other), read(run)
    gone = {"mistakes.png": "mistakes", "train": "training loss", "eval": "no TTA, by epoch"}
    for what in gone.values():
        assert any(what in image["alt"] for image in whole.images), what
        assert any(what in image["alt"] for image in page.images) == (what != gone.get(without)), what


def test_records_alone_are_enough(tmp_path, drawn):
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "metrics.jsonl").write_text('{"kind": "train", "step": 3}\n{"kind": "eval", "step": 3}\n{"ki')
    page = read(tmp_path / "bare")
    assert page.column("steps", "bare") == "3|unfinished" and not page.images


@pytest.mark.parametrize("name", ["config.json", "environment.json", "result.json", "metrics.jsonl"])
def test_values_of_another_kind_break_nothing(tmp_path, drawn, name):
    for number, value in enumerate([None, True, -1e308, "text", [], [[1], [2, 3]], [None], {"a": [1]}, 10**400]):
        run, other = (make_run(tmp_path / f"{number}{of}", last_step=22) for of in ("run", "other"))
        if name == "metrics.jsonl":
            told = [json.loads(line) for line in (run / name).read_text().splitlines()]
            told += [one | {key: value} for one in told for key in one if key not in ("kind", "step")]
            (run / name).write_text("".join(json.dumps(one) + "\n" for one in told))
        else:
            change(run, name, **dict.fromkeys(json.loads((run / name).read_text()), value))
        page = read(run, other)
        assert page.column("run", run.name) == run.name


def test_what_files_hold_is_shown_and_never_obeyed(tmp_path):
    """Every string of the files and a directory's name are such that a page that does not escape them is another."""
    run, other = make_run(tmp_path / "<b>&lt;'\"<script>"), make_run(tmp_path / "<i>", last_step=11)
    (other / "metrics.jsonl").write_text('{"kind": "train", "step": 11}')
    names = [HOSTILE, *CLASSES[1:]]
    towers = [{"name": HOSTILE, "device": HOSTILE}] * 2
    change(run, "config.json", recipe=HOSTILE, seed=HOSTILE, model=HOSTILE, **{HOSTILE: HOSTILE})
    change(
        run, "environment.json", command=[HOSTILE, "a b"], precision=HOSTILE, packages={HOSTILE: HOSTILE},
        towers=towers, synthetic_data=HOSTILE, class_names=names,
        variables=[{"name": HOSTILE, "shape": HOSTILE, "device": HOSTILE}], model=[{"name": HOSTILE, HOSTILE: HOSTILE}],
    )  # fmt: skip
    change(run, "result.json", weights_sha256=HOSTILE, rollbacks=HOSTILE, seconds={HOSTILE: 3.0})
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    few = {"kind", "step", "epoch", "loss"}  # pictures take time
    lines = [{key: line[key] for key in few} if line["kind"] == "train" else line for line in lines]
    lines = [line | {"split": HOSTILE, "weights": HOSTILE} if line["kind"] == "eval" else line for line in lines]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = Page(html_report.write([run, other], tmp_path / "page.html").read_text())
    assert page.tags <= {
        "html", "head", "meta", "title", "link", "style", "body", "section", "h1", "h2", "p", "div", "table", "thead",
        "tbody", "tr", "th", "td", "small", "figure", "figcaption", "img", "details", "summary", "pre", "code",
    }  # fmt: skip
    names = {name for _, name, _ in page.attributes}
    assert names <= {
        "lang", "charset", "name", "content", "http-equiv", "rel", "href", "class", "scope", "tabindex", "alt", "src",
    }  # fmt: skip
    assert all(image["src"].startswith("data:image/png;base64,") for image in page.images)
    shown = HOSTILE.replace("\ud800", "\ufffd")
    assert page.row("<b>&lt;'\"<script>", shown, shown)  # the tower
    assert page.row(shown) == [shown, "-"]  # the setting
    assert "<i>: 3 variables, 60,544 bytes" in page.texts and "<i>: " in page.texts
    (command,) = [text for text in page.texts if text.endswith(" 'a b'")]
    assert shlex.split(command) == [shown, "a b"]


def test_a_picture_that_is_cut_short_is_left_out(tmp_path, drawn):
    run = make_run(tmp_path / "run")
    assert len(read(run).images) == 8 + 1 + 1
    png = (run / "mistakes.png").read_bytes()
    (run / "mistakes.png").write_bytes(png[: len(png) // 2])
    assert len(read(run).images) == 8 + 1


def test_more_recipes_than_a_picture_tells_apart(tmp_path, drawn):
    page = read(*(make_run(tmp_path / f"r{i}", f"recipe{i}", last_step=66) for i in range(9)))
    losses = [call for call in drawn if call[0] == "line_plot" and "training loss" in call[2]]
    assert [len(call[1]) for call in losses] == [8, 1]
    assert [call[2] for call in losses] == [f"training loss (batch) ({part} of 2)" for part in (1, 2)]
    assert page.row("r8")


def test_runs_of_one_recipe_with_other_settings_are_groups_of_their_own(tmp_path, drawn):
    make_run(tmp_path / "a", seed=0, batch_size=1536), make_run(tmp_path / "b", seed=1, batch_size=512)
    make_run(tmp_path / "c", seed=2, batch_size=512), make_run(tmp_path / "d", seed=0, batch_size=512, towers=4)
    make_run(tmp_path / "e", seed=3, batch_size=512)
    change(tmp_path / "e", "environment.json", synthetic_data="SYNTHETIC DATA, NOT CIFAR-10")
    make_run(tmp_path / "f", seed=4, batch_size=512, data_dir="/elsewhere", dataset="auto", overwrite=True)
    change(tmp_path / "f", "config.json", workers="127.0.0.1:5000,127.0.0.1:5001", profile_steps="1:2")
    runs = run_records.read_runs([tmp_path / name for name in "abcdef"])
    groups = {name: [run.name for run in group] for name, group in run_records.group_by_recipe(runs).items()}
    assert sorted(groups.values()) == [["a"], ["b", "c", "f"], ["d"], ["e"]]
    assert all(name.startswith("speed94, batch_size=") for name in groups)
    page = Page(html_report.render(runs))
    assert "e: SYNTHETIC DATA, NOT CIFAR-10" in page.texts
    assert page.row("batch_size") == ["1536", "512", "512", "512", "512", "512"]
    assert page.row("epochs") == ["8.0"]  # all share it
    assert page.row("git_revision") == ["abc1230", "abc1231", "abc1232", "abc1230", "abc1233", "abc1234"]


@pytest.mark.parametrize("where", ["config.json", "result.json"])
def test_synthetic_data_that_was_asked_for_is_told_too(tmp_path, drawn, where):
    run = make_run(tmp_path / "run")
    assert not [text for text in read(run).texts if "SYNTHETIC" in text]
    change(run, where, dataset="synthetic")
    assert "SYNTHETIC DATA, NOT CIFAR-10: these accuracies say nothing about CIFAR-10." in read(run).texts


def test_long_names_stay_apart(tmp_path, drawn):
    runs = [make_run(tmp_path / f"r{i}", "n" * 100 + str(i), last_step=66) for i in range(2)]
    assert [len(name) for name in run_records.group_by_recipe(run_records.read_runs(runs))] == [44, 47]


def test_runs_are_named_by_as_much_as_tells_them_apart(tmp_path):
    paths = [make_run(tmp_path / name / "seed0", last_step=66) for name in ("one", "other")]
    assert [run.name for run in run_records.read_runs(paths[:1])] == ["seed0"]
    assert [run.name for run in run_records.read_runs(paths)] == ["one/seed0", "other/seed0"]


def test_the_command_can_be_typed_again(tmp_path, drawn):
    runs = [make_run(tmp_path / f"s{seed}", seed=seed) for seed in range(2)]
    page = read(*runs)
    lines = [text for text in page.texts if text.startswith("python ")]
    assert [shlex.split(line) for line in lines] == [
        ["python", "scripts/train.py", "--flagfile=configs/speed94.cfg", f"--seed={seed}", "--data_dir=/a b"]
        for seed in range(2)
    ]


def test_layers_and_variables_are_listed_once_with_their_sums(tmp_path, drawn):
    runs = [make_run(tmp_path / f"s{seed}", seed=seed) for seed in range(2)]
    page = read(*runs)
    assert page.texts.count("3 layers, 15,136 parameters, 30,272,000 flops") == 1
    assert page.texts.count("3 variables, 60,544 bytes") == 1
    assert page.row("conv_1") == ["Conv2D", "[32, 32, 64]", "13,824", "27,648,000"]
    assert page.row("conv_1/kernel") == ["[3, 64]", "55,296", "/CPU:0"]


def test_what_is_no_run(tmp_path):
    run = make_run(tmp_path / "run", last_step=66)
    (tmp_path / "empty").mkdir()
    for given, told in (
        ([tmp_path / "none"], "there is no directory"),
        ([run, run / ".." / "run"], "given twice"),
        ([run, tmp_path / "empty"], "holds no records of a run in metrics.jsonl"),
    ):
        with pytest.raises(UsageError, match=told) as error:
            html_report.write(given, tmp_path / "page.html")
        assert "\n" not in str(error.value)
    assert not (tmp_path / "page.html").exists()


def test_where_the_page_cannot_be_written(tmp_path, drawn):
    run = make_run(tmp_path / "run", last_step=66)
    os.mkfifo(tmp_path / "pipe")
    places = [tmp_path, tmp_path / "none" / "page.html", tmp_path / "pipe", run / "config.json" / "page.html"]
    for out in (*places, tmp_path / ("n" * 253)):  # the last is a file's name, but the unfinished one's is too long
        with pytest.raises(RunError, match="cannot be written: .*--out=FILE") as error:
            html_report.write([run], out)
        assert error.value.exit_code == 1 and "\n" not in str(error.value)
    assert {path.name for path in tmp_path.iterdir()} == {"run", "pipe"} and (tmp_path / "pipe").is_fifo()


def start(*arguments, cwd):
    command = [sys.executable, str(ROOT / "scripts/report.py"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env={**os.environ, "LC_ALL": "C"})
    return done.returncode, done.stdout, done.stderr


def test_the_program(tmp_path):
    for name in ("run", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text('{"kind": "train", "step": 3, "epoch": 1, "loss": 0.5}')
    assert start("run", cwd=tmp_path) == (0, "run/report.html\n", "")
    assert len(Page((tmp_path / "run/report.html").read_text()).images) == 1
    assert start("run", tmp_path / "other", cwd=tmp_path) == (0, "report.html\n", "")
    assert Page((tmp_path / "report.html").read_text()).row("other")


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        ([], 2, "usage: which runs? write: report.py"),
        (["run", "--output=x"], 2, "usage: Unknown command line flag 'output'; --help lists the flags"),
        (["none"], 2, "usage: there is no directory none"),
        (["."], 2, "usage: . holds no records"),
        (["run", "--out=none/page.html"], 1, "run: none/page.html cannot be written: there is no directory none; "),
    ],
)
def test_errors_of_the_program_are_one_line(tmp_path, arguments, code, told):
    make_run(tmp_path / "run", last_step=11)
    found, out, err = start(*arguments, cwd=tmp_path)
    assert (found, out) == (code, "") and err.startswith(told) and err.count("\n") == 1


def test_help_and_errors_load_nothing_slow(tmp_path):
    program = (
        "import runpy, sys; sys.argv = ['x', {!r}]\n"
        f"try: runpy.run_path({str(ROOT / 'scripts/report.py')!r}, run_name='__main__')\n"
        "except SystemExit: print({{'tensorflow', 'keras', 'matplotlib'}} & set(sys.modules))"
    )
    for argument in ("--help", "none"):
        done = subprocess.run([sys.executable, "-c", program.format(argument)], capture_output=True, text=True)
        assert done.stdout.endswith("set()\n"), done
        assert argument == "none" or "Exit codes" in done.stdout

"""Every TensorBoard dashboard draws all that a run of two towers wrote.

`make test-browser` saves a screenshot of each in `runs/test-browser/`, named after its test.
"""

import io
import re

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

pytestmark = pytest.mark.browser

LAST_STEP, NUM_DIAGNOSTICS, NUM_EVALUATIONS = 30, 6, 2  # of the run
FINAL = "test/ema_tta2"  # only in the last evaluation
TRAIN, EVAL, TOWERS = "small/train", "small/eval", ("small/tower_0", "small/tower_1")
FIRST_SCREEN = {"accuracy": TRAIN, "accuracy/test/ema": EVAL}  # the first cards of TIME SERIES
SCALARS = {  # tag: (runs, minimum number of points)
    "loss": ([TRAIN], LAST_STEP),
    "accuracy": ([TRAIN], LAST_STEP),
    "losses/cross_entropy": ([TRAIN], LAST_STEP),
    "losses/cross_entropy (raw)": ([TRAIN], LAST_STEP),
    "losses/total_loss": ([TRAIN], LAST_STEP),
    "learning_rate/kernels": ([TRAIN], LAST_STEP),
    "health/gradient_norm": ([TRAIN], LAST_STEP),
    "speed/images_per_sec": ([TRAIN], LAST_STEP - 5),
    "towers/loss": (TOWERS, NUM_DIAGNOSTICS),
    "towers/cosine": (TOWERS, NUM_DIAGNOSTICS),
    "accuracy/test/ema": ([EVAL], NUM_EVALUATIONS),
    f"accuracy/{FINAL}": ([EVAL], 1),
}
IMAGES = {"confusion/test": EVAL, "mistakes/test": EVAL, "input/augmented": TRAIN}
HISTOGRAMS = ["activations/group1_gelu1", "activations/logits"]
HISTOGRAMS += [f"{kind}/{layer}/kernel" for kind in ("weights", "gradients") for layer in ("group1_conv1", "head")]
BOXES = ("split_batch", "tower_0", "tower_1", "average_gradients", "apply")
ARROWS = ("split_batch--tower_0", "split_batch--tower_1", "tower_0--average_gradients", "tower_1--average_gradients")
LAYERS = ("group1_conv1", "group3_conv2")  # inside a tower
SETTINGS = ("model", "batch_size", "learning_rate")
METRIC = "accuracy/test/ema_tta2"


def test_time_series(show, expect):
    """The first page, as it opens."""
    page = show("timeseries")
    for tag, run in FIRST_SCREEN.items():
        card = page.locator("scalar-card").filter(has=page.locator(f'.tag[title="{tag}"]'))
        row = card.locator("tb-data-table-content-row")
        expect(row).to_contain_text(run)
        expect(row).to_contain_text(str(LAST_STEP))
        color = row.locator(".row-circle span").evaluate("circle => getComputedStyle(circle).backgroundColor")
        _wait_for_screenshot(
            card.locator("line-chart"), _has_line_of_color, [int(part) for part in re.findall(r"\d+", color)]
        )


def test_time_series_of_each_kind(show, expect):
    page = show("timeseries", ["towers/loss", HISTOGRAMS[0], "input/augmented"], forceSVG="true")
    rows = page.locator("scalar-card tb-data-table-content-row")
    expect(rows).to_contain_text(TOWERS)
    _expect_paths(
        expect, page.locator("scalar-card line-chart .series-view > svg > path"), 2 * len(TOWERS), NUM_DIAGNOSTICS
    )
    _expect_paths(expect, page.locator("histogram-card g.histogram path"), NUM_DIAGNOSTICS, 10)
    expect(page.locator("image-card img")).to_have_js_property("complete", True)


def test_scalars(show, expect):
    page = show("scalars", SCALARS)
    for tag, (runs, points) in SCALARS.items():
        lines = _card(page, "tf-scalar-card", tag).locator(".line-plot:not(.ghost) path.line")
        _expect_paths(expect, lines, len(runs), max(1, 3 * points // 4))  # what lies outside the chart is cropped


def test_images(show, expect, run):
    page = show("images", IMAGES)
    for tag, of in IMAGES.items():
        card = _card(page, "tf-image-loader", tag)
        written = EventAccumulator(str(run.directory.parent / of), {"tensors": 0}).Reload().Tensors(tag)[-1]
        expect(card.locator("#heading-run")).to_have_text(of)
        expect(card).to_contain_text(re.compile(rf"step\s*{written.step}"))
        for side, pixels in zip(("naturalWidth", "naturalHeight"), written.tensor_proto.string_val[:2], strict=True):
            expect(card.locator("img")).to_have_js_property(side, int(pixels))


def test_graphs(show, expect):
    """The towers are side by side between `split_batch` and `average_gradients`."""
    page = show("graphs")
    graph = page.locator("svg#svg")
    for box in BOXES:
        expect(graph.locator(f'g.node.meta[data-name="{box}"] > text.nodelabel')).to_be_visible()
    for arrow in ARROWS:
        expect(graph.locator(f'g.edge[data-edge="{arrow}"]')).to_be_attached()


def test_graphs_inside_a_tower(show, expect):
    page = show("graphs")
    page.locator("tf-graph-controls paper-radio-button", has_text="Device").click()
    expect(page.locator("tf-graph-controls")).to_contain_text(re.compile(r"CPU:0.*CPU:1", re.DOTALL))
    graph = page.locator("svg#svg")
    graph.locator('g.node.meta[data-name="tower_1"] > g.nodeshape').dispatch_event("dblclick")
    for layer in LAYERS:
        expect(graph.locator(f'g.node.meta[data-name^="tower_1/{layer}"]')).to_be_attached()


def test_distributions(show, expect):
    page = show("distributions", HISTOGRAMS)
    for tag in HISTOGRAMS:
        _expect_paths(expect, _card(page, "tf-distribution-loader", tag).locator("path.area"), 8, NUM_DIAGNOSTICS)


def test_histograms(show, expect):
    page = show("histograms", HISTOGRAMS)
    for tag in HISTOGRAMS:
        outlines = _card(page, "tf-histogram-loader", tag).locator("path.outline")
        _expect_paths(expect, outlines, NUM_DIAGNOSTICS, 10)
        assert max(outlines.evaluate_all("all => all.map(path => path.getBoundingClientRect().height)")) > 10


def test_hparams(show, expect, run):
    page = show("hparams")
    table = page.locator("tf-hparams-table-view vaadin-grid")
    expect(table.get_by_text(EVAL)).to_be_visible()
    columns = page.locator("tf-hparams-query-pane paper-checkbox.hparam-checkbox")
    while columns.and_(page.locator("[checked]")).count():  # the first five, by their names
        columns.and_(page.locator("[checked]")).first.uncheck()
    for name in (*SETTINGS, METRIC):
        page.locator("tf-hparams-query-pane paper-checkbox", has_text=_exactly(name)).check()
        expect(table.locator(".table-header", has_text=_exactly(name))).to_be_attached()
    names, values = table.evaluate(
        """table => [...table.shadowRoot.querySelectorAll('thead tr, tbody tr')].map(row =>
            [...row.querySelectorAll(':scope > :not([hidden]) > slot')].map(slot =>
                slot.assignedElements()[0]?.innerText.trim()))"""
    )
    shown = dict(zip(names, values, strict=True))
    assert shown["model"] == run.config["model"]
    assert float(shown["batch_size"]) == run.config["batch_size"]
    assert float(shown["learning_rate"]) == run.config["learning_rate"]
    (final,) = [score for score in run.result["evaluations"] if (score["weights"], score["tta"]) == ("ema", 2)]
    assert float(shown[METRIC]) == pytest.approx(final["accuracy"], rel=1e-4)


def _card(page, kind, text, part="tag"):
    """Return the first card with this `tag` or `name`."""
    return page.locator(kind).filter(has=page.locator(f"[itemprop={part}]", has_text=_exactly(text))).first


def _expect_paths(expect, paths, count, points):
    """Wait for `count` paths of at least this many points."""
    expect(paths).to_have_count(count)
    for path in paths.all():
        expect(path).to_have_attribute("d", _path_regex(points))


def _path_regex(points):
    """Match the `d` attribute of a path of at least this many points, all of them numbers."""
    return re.compile(rf"^M([-\d.eL]+,){{{points},}}[-\d.eZ]+$")


def _exactly(text):
    return re.compile(rf"^\s*{re.escape(text)}\s*$")


def _wait_for_screenshot(place, is_drawn, *arguments):
    """Take screenshots of a canvas, which has no elements to query, until one satisfies `is_drawn`."""
    for _ in range(40):
        picture = np.array(Image.open(io.BytesIO(place.screenshot())).convert("RGB"), int)
        if is_drawn(picture, *arguments):
            return
    raise AssertionError("the screenshot does not show what it should")


def _has_line_of_color(picture, color):
    """Whether more than half of the columns contain nearly this color."""
    return (abs(picture - color).max(2) < 30).any(0).mean() > 0.5

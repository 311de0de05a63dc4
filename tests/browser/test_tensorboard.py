"""Every TensorBoard dashboard draws all that a run of two towers wrote.

`make test-browser` saves a screenshot of each in `runs/test-browser/`, named after its test.
"""

import re

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

pytestmark = pytest.mark.browser

# of the run
LAST_STEP = 30
NUM_DIAGNOSTICS = 6
NUM_EVALUATIONS = 2

FINAL = "test_tta"  # only in the last evaluation
TRAIN = "small/train"
EVAL = "small/eval"
FIRST_SCREEN = {"accuracy": TRAIN, "accuracy/test": EVAL}  # the first cards of TIME SERIES
SCALARS = {  # tag: minimum number of points
    "loss": LAST_STEP,
    "accuracy": LAST_STEP,
    "losses/cross_entropy": LAST_STEP,
    "losses/cross_entropy (raw)": LAST_STEP,
    "losses/total_loss": LAST_STEP,
    "learning_rate/kernels": LAST_STEP,
    "health/gradient_norm": LAST_STEP,
    "speed/images_per_sec": LAST_STEP - 5,
    "tower_0/loss": NUM_DIAGNOSTICS,
    "tower_1/cosine": NUM_DIAGNOSTICS,
    "accuracy/test": NUM_EVALUATIONS,
    f"accuracy/{FINAL}": 1,
}
IMAGES = {"confusion/test": EVAL, "mistakes/test": EVAL, "input/augmented": TRAIN}
HISTOGRAMS = [
    "activations/group1_gelu1",
    "activations/logits",
    "weights/group1_conv1/kernel",
    "weights/head/kernel",
    "gradients/group1_conv1/kernel",
    "gradients/head/kernel",
]
BOXES = ("split_batch", "variables", "tower_0", "tower_1", "average_gradients", "apply")
ARROWS = (
    "split_batch--tower_0",
    "split_batch--tower_1",
    "variables--tower_0",
    "variables--tower_1",
    "tower_0--average_gradients",
    "tower_1--average_gradients",
)
LAYERS = ("group1_conv1", "group3_conv2", "gradient_tape")  # inside a tower
# of HPARAMS: settings and a score
COLUMNS = ("model", "batch_size", "learning_rate", "accuracy/test_tta")


def test_time_series(show, expect):
    """The first page, as it opens."""
    page = show("timeseries")
    for tag, run in FIRST_SCREEN.items():
        card = page.locator("scalar-card").filter(has=page.locator(f'.tag[title="{tag}"]'))
        row = card.locator("tb-data-table-content-row")
        expect(row).to_contain_text(run)
        expect(row).to_contain_text(str(LAST_STEP))


def test_scalars(show, expect):
    page = show("scalars", SCALARS)
    for tag, points in SCALARS.items():
        lines = _card(page, "tf-scalar-card", tag).locator(".line-plot:not(.ghost) path.line")
        # what lies outside the chart is cropped
        _expect_paths(expect, lines, 1, max(1, 3 * points // 4))


def test_images(show, expect, run):
    page = show("images", IMAGES)
    for tag, of in IMAGES.items():
        card = _card(page, "tf-image-loader", tag)
        written = EventAccumulator(str(run.parent / of), {"tensors": 0}).Reload().Tensors(tag)[-1]
        expect(card.locator("#heading-run")).to_have_text(of)
        expect(card).to_contain_text(re.compile(rf"step\s*{written.step}"))

        width, height = written.tensor_proto.string_val[:2]
        expect(card.locator("img")).to_have_js_property("naturalWidth", int(width))
        expect(card.locator("img")).to_have_js_property("naturalHeight", int(height))


def test_graphs(show, expect):
    """The towers are side by side between `split_batch` and `average_gradients`, with their layers
    inside.
    """
    page = show("graphs")
    page.get_by_text("Auto-extract high-degree nodes").click()  # which would put the towers aside
    graph = page.locator("svg#svg")
    for box in BOXES:
        expect(graph.locator(f'g.node.meta[data-name="{box}"] > text.nodelabel')).to_be_visible()
    for arrow in ARROWS:
        expect(graph.locator(f'g.edge[data-edge="{arrow}"]')).to_be_attached()
    expect(graph.locator('g.edge[data-edge="tower_0--tower_1"]')).to_have_count(0)
    expect(graph.locator('g.node.meta[data-name="gradient_tape"]')).to_have_count(0)
    page.locator("tf-graph-controls paper-radio-button", has_text="Device").click()
    expect(page.locator("tf-graph-controls")).to_contain_text(
        re.compile(r"CPU:0.*CPU:1", re.DOTALL)
    )
    graph.locator('g.node.meta[data-name="tower_1"] > g.nodeshape').dispatch_event("dblclick")
    for layer in LAYERS:
        expect(graph.locator(f'g.node.meta[data-name^="tower_1/{layer}"]')).to_be_attached()


@pytest.mark.parametrize(
    ("kind", "part", "count", "points", "height"),
    [
        ("distribution", "path.area", 8, NUM_DIAGNOSTICS, 0),
        ("histogram", "path.outline", NUM_DIAGNOSTICS, 10, 10),
    ],
)
def test_distributions_and_histograms(show, expect, kind, part, count, points, height):
    page = show(f"{kind}s", HISTOGRAMS)
    for tag in HISTOGRAMS:
        paths = _card(page, f"tf-{kind}-loader", tag).locator(part)
        _expect_paths(expect, paths, count, points)
        heights = paths.evaluate_all("all => all.map(path => path.getBoundingClientRect().height)")
        assert max(heights) >= height


def test_hparams(show, expect):
    page = show("hparams")
    table = page.locator("tf-hparams-table-view vaadin-grid")
    expect(table.get_by_text(EVAL)).to_be_visible()
    columns = page.locator("tf-hparams-query-pane paper-checkbox.hparam-checkbox")
    while columns.and_(page.locator("[checked]")).count():  # the first five, by their names
        columns.and_(page.locator("[checked]")).first.uncheck()
    for name in COLUMNS:
        page.locator("tf-hparams-query-pane paper-checkbox", has_text=_exactly(name)).check()
        expect(table.locator(".table-header", has_text=_exactly(name))).to_be_attached()


def _card(page, kind, tag):
    """Return the first card with this tag."""
    title = page.locator("[itemprop=tag]", has_text=_exactly(tag))
    return page.locator(kind).filter(has=title).first


def _expect_paths(expect, paths, count, points):
    """Wait for `count` paths of at least this many points."""
    expect(paths).to_have_count(count)
    numbers = re.compile(rf"^M([-\d.eL]+,){{{points},}}[-\d.eZ]+$")
    for path in paths.all():
        expect(path).to_have_attribute("d", numbers)


def _exactly(text):
    return re.compile(rf"^\s*{re.escape(text)}\s*$")

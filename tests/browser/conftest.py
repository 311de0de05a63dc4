"""Fixtures of the session: a run, a TensorBoard server on it, and a browser."""

import json
import re
import shutil
import time
import urllib.request
from pathlib import Path
from urllib.parse import quote

import pytest
from tensorboard import program

from cifar_towers import api
from cifar_towers.config import TrainConfig
from cifar_towers.config.flags import parse_command_line
from cifar_towers.data import synthetic
from cifar_towers.signals import StopSignals

RECIPE = Path(__file__).parents[2] / "configs/smoke.cfg"
SMALL = (
    "--num_gpus=2",
    "--batch_size=100",
    "--crop=20",
    "--shift=0",
    "--ema_decay=0.5",
    "--precision=float32",
    "--eval_every_epochs=1",
    "--summary_every_steps=5",
)
NAME = "small"
SCREENSHOTS = Path(__file__).parents[2] / "runs/test-browser"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
TIMEOUT_SECONDS = 40.0  # of any wait, on two shared cores


@pytest.fixture(scope="session")
def browser():
    """Start a headless browser that caches across pages; the tests fail without one."""
    try:
        from playwright.sync_api import expect, sync_playwright
    except ImportError:
        pytest.fail(
            "playwright is missing, which drives the browser: pip install -e '.[browser]'",
            pytrace=False,
        )
    found = [path for path in map(shutil.which, BROWSERS) if path]
    if not found:
        pytest.fail(
            f"there is no browser ({', '.join(BROWSERS)}): apt-get install chromium", pytrace=False
        )
    expect.set_options(timeout=1000 * TIMEOUT_SECONDS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found[0], args=FLAGS)
        yield browser.new_context(viewport={"width": 1500, "height": 1000})
        browser.close()


@pytest.fixture(scope="session")
def expect(browser):
    """Playwright's assertions, which retry until they hold."""
    from playwright.sync_api import expect

    return expect


@pytest.fixture
def page(browser, request):
    """Open an empty page, take a screenshot at the end, and fail if it had errors."""
    page = browser.new_page()
    page.set_default_timeout(1000 * TIMEOUT_SECONDS)
    errors = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on(
        "console", lambda message: errors.append(message.text) if message.type == "error" else None
    )
    page.on(
        "response", lambda response: errors.append(response.url) if response.status >= 400 else None
    )
    yield page
    name = re.sub(r"\W+", "_", request.node.name.removeprefix("test_")).strip("_")
    page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=True)
    page.close()
    assert not errors


@pytest.fixture(scope="session")
def run(browser, tmp_path_factory):
    """Train on two towers, evaluated after each of two epochs of 15 steps, and return the run's
    directory.
    """
    directory = tmp_path_factory.mktemp("runs") / NAME
    config = parse_command_line(
        TrainConfig, [f"--flagfile={RECIPE}", f"--train_dir={directory}", *SMALL]
    )
    with pytest.MonkeyPatch.context() as patch:
        small = synthetic.make(1500, 0, 0), synthetic.make(300, 0, 1)
        patch.setattr(synthetic, "load", lambda: small)
        source, config = api.locate_data(config)
        api.train_run(config, source, StopSignals(()))
    return directory


@pytest.fixture(scope="session")
def tensorboard(browser, run):
    """Return the address of a TensorBoard server that lists every directory with event files."""
    logdir = run.parent
    deadline = time.monotonic() + 3 * TIMEOUT_SECONDS
    server = program.TensorBoard()
    server.configure(argv=["", f"--logdir={logdir}", "--host=127.0.0.1", "--port=0"])
    address = server.launch()
    names = {str(path.parent.relative_to(logdir)) for path in logdir.rglob("*tfevents*")}
    while True:
        runs = json.load(urllib.request.urlopen(f"{address}data/runs"))
        if names <= set(runs):
            return address
        assert time.monotonic() < deadline, f"TensorBoard lists {runs}, not {names}"
        time.sleep(0.5)


@pytest.fixture
def show(page, expect, tensorboard):
    """show(dashboard, tags): a page with that dashboard, filtered by tags if given. Fails if a
    spinner is left.
    """

    def open_it(dashboard, tags=(), **flags):
        words = {"tagFilter": f"^({'|'.join(map(re.escape, tags))})$"} if tags else {}
        words = "".join(f"&{name}={quote(word)}" for name, word in (words | flags).items())
        where = f"?{words}#{dashboard}" if dashboard == "timeseries" else f"#{dashboard}{words}"
        page.goto(tensorboard + where)
        return page

    yield open_it
    expect(page.locator("paper-spinner-lite, mat-spinner").filter(visible=True)).to_have_count(0)

"""Fixtures of the session: a run, a TensorBoard server on it, and a browser."""

import json
import queue
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import pytest

from cifar_towers import trainer
from cifar_towers.cli.flags import parse_command_line
from cifar_towers.cli.shutdown import ShutdownHandler
from cifar_towers.config import TrainConfig
from cifar_towers.data import sources, synthetic

RECIPE = Path(__file__).parents[2] / "configs/smoke.cfg"
SMALL = (
    "--num_gpus=2",
    "--batch_size=100",
    "--crop=20",
    "--shift=0",
    "--whitening_images=500",
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


class Run(NamedTuple):
    directory: Path
    config: dict
    environment: dict
    result: dict


@pytest.fixture(scope="session")
def browser():
    """Start a headless browser that caches across pages; the tests fail without one."""
    try:
        from playwright.sync_api import expect, sync_playwright
    except ImportError:
        sync_playwright = None
    if not sync_playwright:
        pytest.fail("playwright is missing, which drives the browser: pip install -e '.[browser]'", pytrace=False)
    found = [path for path in map(shutil.which, BROWSERS) if path]
    if not found:
        pytest.fail(f"there is no browser ({', '.join(BROWSERS)}): apt-get install chromium", pytrace=False)
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
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("response", lambda response: errors.append(response.url) if response.status >= 400 else None)
    yield page
    name = re.sub(r"\W+", "_", request.node.name.removeprefix("test_")).strip("_")
    page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=True)
    page.close()
    assert not errors


@pytest.fixture(scope="session")
def run(browser, tmp_path_factory):
    """Train on two towers, evaluated after each of two epochs of 15 steps, in a directory of its own, like `runs/`."""
    directory = tmp_path_factory.mktemp("runs") / NAME
    config = parse_command_line(TrainConfig, ["", f"--flagfile={RECIPE}", f"--train_dir={directory}", *SMALL], "")
    with pytest.MonkeyPatch.context() as patch:
        small = synthetic.make(1500, 0, 0), synthetic.make(300, 0, 1)
        patch.setattr(synthetic, "load", lambda seed=0: small)
        trainer.train(config, sources.find("synthetic"), ShutdownHandler())
    files = "config.json", "environment.json", "result.json"
    return Run(directory, *(json.loads((directory / file).read_text()) for file in files))


@pytest.fixture(scope="session")
def tensorboard(browser, run):
    """Return the address of a TensorBoard server that has loaded the whole run."""
    logdir = run.directory.parent
    command = [sys.executable, "-m", "tensorboard.main", f"--logdir={logdir}", "--host=127.0.0.1", "--port=0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        lines = queue.SimpleQueue()
        reader = threading.Thread(target=_read_lines, args=(server.stderr, lines), daemon=True)
        reader.start()
        try:
            address = _address(lines)
            _wait_until_read(browser, address, logdir)
            yield address
        finally:
            server.terminate()
            reader.join(TIMEOUT_SECONDS)


@pytest.fixture
def show(page, expect, tensorboard):
    """show(dashboard, tags): a page with that dashboard, filtered by tags if given. Fails if a spinner is left."""

    def open_it(dashboard, tags=(), **flags):
        words = {"tagFilter": f"^({'|'.join(map(re.escape, tags))})$"} if tags else {}
        words = "".join(f"&{name}={quote(word)}" for name, word in (words | flags).items())
        where = f"?{words}#{dashboard}" if dashboard == "timeseries" else f"#{dashboard}{words}"
        page.goto(tensorboard + where)
        return page

    yield open_it
    expect(page.locator("paper-spinner-lite, mat-spinner").filter(visible=True)).to_have_count(0)


def _read_lines(stream, lines):
    """Read the output of a process so that it never blocks; put an empty line when it ends."""
    for line in stream:
        lines.put(line)
    lines.put("")


def _address(lines):
    """Return the address that TensorBoard prints once it is ready."""
    lines_read = []
    while True:
        lines_read.append(lines.get(timeout=3 * TIMEOUT_SECONDS))
        found = re.search(r"at (http://\S+/)", lines_read[-1])
        if found:
            return found[1]
        assert lines_read[-1], "TensorBoard did not start: " + "".join(lines_read)


def _wait_until_read(browser, address, logdir):
    """Wait until TensorBoard lists every directory with event files, and the projector."""
    names = sorted({str(path.parent.relative_to(logdir)) for path in logdir.rglob("*tfevents*")})
    page = browser.new_page()
    page.goto(f"{address}data/environment")
    page.wait_for_function(
        """async names => {
            const read = async what => (await fetch(`/data/${what}`)).json();
            const [runs, plugins] = [await read('runs'), await read('plugins_listing')];
            return names.every(name => runs.includes(name)) && plugins.projector.enabled;
        }""",
        arg=names,
        polling=500,
        timeout=1000 * TIMEOUT_SECONDS,
    )
    page.close()

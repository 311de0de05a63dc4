"""The report of a run in a browser: self-contained, in light and dark, on wide and narrow
screens.
"""

import pytest

from cifar_towers.inference import report
from cifar_towers.runs.table import read_runs

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def address(run, tmp_path_factory):
    """Return the address of the page about a run."""
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(report.render(read_runs([run])))
    return path.as_uri()


@pytest.mark.parametrize("width", [1300, 420])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_report(page, expect, address, scheme, width):
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(address)

    images = page.locator("img")
    for image in images.all():
        image.scroll_into_view_if_needed()
        expect(image).to_have_js_property("complete", True)
    widths = images.evaluate_all("images => images.map(image => image.naturalWidth)")

    assert widths
    assert all(widths)

    contents = page.locator("table").evaluate_all(
        "tables => tables.map(table => [...table.querySelectorAll('td')].map(cell => "
        "cell.textContent.trim()).join(''))"
    )

    assert contents
    assert all(contents)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert [url for url in asked if not url.startswith("data:")] == [address]

    paper, ink = page.evaluate(
        "['backgroundColor', 'color'].map(of => "
        "getComputedStyle(document.body)[of].match(/\\d+/g).map(Number))"
    )

    assert sum(paper) > sum(ink) if scheme == "light" else sum(paper) < sum(ink)

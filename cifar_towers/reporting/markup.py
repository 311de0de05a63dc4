"""The pieces of an HTML page that holds all it shows, for light and dark, narrow windows and paper."""

import base64
import html
from collections.abc import Iterable, Sequence

MEAN, WORDS = ' class="mean"', ' class="words"'


def document(title: str, banners: str, body: str) -> str:
    """The whole page; `title` is escaped here, the rest is HTML."""
    return PAGE.format(title=html.escape(title), style=STYLE, banners=banners, body=body)


def table(headings: Sequence[str], rows: Iterable[Sequence], left: int = 1, marked: Sequence[int] = ()) -> str:
    """A table in a box that scrolls; a cell is a text, or a pair of which the second stands small under the first.

    Args:
      left: how many columns hold words, not figures. marked: the rows that stand out.
    """
    heads = "".join(_element("th", heading, column < left, ' scope="col"') for column, heading in enumerate(headings))
    lines = []
    for place, row in enumerate(rows):
        cells = (
            _element("td" if column else "th", cell, column < left, "" if column else ' scope="row"')
            for column, cell in enumerate(row)
        )
        lines.append(f"<tr{MEAN if place in marked else ''}>{''.join(cells)}</tr>\n")
    inside = f"<thead><tr>{heads}</tr></thead>\n<tbody>\n{''.join(lines)}</tbody>"
    return f'<div class="wide" tabindex="0"><table>\n{inside}</table></div>\n'


def _element(tag: str, cell: str | tuple[str, str], words: bool, more: str) -> str:
    text, small = cell if isinstance(cell, tuple) else (cell, "")
    small = f"<small>{html.escape(small)}</small>" if small else ""
    return f"<{tag}{more}{WORDS if words else ''}>{html.escape(text)}{small}</{tag}>"


def folded(summary: str, inside: str) -> str:
    """What is seen when its summary, which is escaped here, is clicked."""
    return f"<details><summary>{html.escape(summary)}</summary>\n{inside}</details>\n"


def picture(png: bytes, alt: str, caption: str = "") -> str:
    """A PNG file's bytes as a picture under its caption, if it has one; `alt` says what there is to see. Both texts are
    escaped here."""
    encoded = base64.b64encode(png).decode()
    told = f"<figcaption>{html.escape(caption)}</figcaption>\n" if caption else ""
    return f'<figure>{told}<img alt="{html.escape(alt)}" src="data:image/png;base64,{encoded}"></figure>\n'


def grid(images: Iterable[str]) -> str:
    """As many beside each other as there is room for."""
    told = "".join(images)
    return f'<div class="grid">\n{told}</div>\n' if told else ""


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<link rel="icon" href="data:,">
<style>
{style}</style></head><body>
<h1>{title}</h1>
{banners}{body}</body></html>
"""

STYLE = """:root {
  color-scheme: light dark;
  --paper: #fff; --ink: #1b1b1b; --muted: #5c5c5c; --line: #ddd; --mark: #eef4f8;
}
@media (prefers-color-scheme: dark) {
  :root { --paper: #16181b; --ink: #e6e6e6; --muted: #a6a6a6; --line: #3a3d42; --mark: #1f2a33 }
}
body {
  font: 1rem/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); overflow-wrap: anywhere;
  max-width: 84rem; margin: 0 auto; padding: 1rem clamp(.75rem, 3vw, 2rem) 3rem;
}
h1 { font-size: 1.6rem; line-height: 1.25; text-wrap: balance }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem }
p { max-width: 48rem; color: var(--muted) }
.banner { max-width: none; padding: .6rem 1rem; border-radius: .4rem; color: #000; background: #ffd54d }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-size: .85rem; line-height: 1.35; font-variant-numeric: tabular-nums }
th, td { padding: .35rem .6rem; text-align: right; vertical-align: top; border-bottom: 1px solid var(--line) }
th { font-weight: 600 }
thead th { color: var(--muted) }
th, td { white-space: nowrap }
.words { text-align: left }
tr > :first-child { position: sticky; left: 0; background: var(--paper) }
tr.mean > * { background: var(--mark); font-weight: 600 }
small { display: block; color: var(--muted); font-size: .75rem; font-weight: 400 }
img { max-width: max(100%, 34rem); box-sizing: border-box; background: #fff; padding: .4rem; border-radius: .4rem }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 34rem), 1fr)); gap: 1rem }
figure { margin: 0; overflow-x: auto }
figcaption { font-weight: 600; margin: .5rem 0 }
pre { white-space: pre-wrap; padding: .6rem .8rem; border: 1px solid var(--line); border-radius: .4rem }
summary { cursor: pointer; padding: .4rem 0 }
@media print {
  :root { font-size: 9.5px }
  body { max-width: none; padding: 0 }
  .wide, figure { overflow: visible }
  th, td { white-space: normal; overflow-wrap: normal; padding: .2rem .3rem }
  td.words { overflow-wrap: anywhere }
  img { max-width: 100% }
  .grid { grid-template-columns: 1fr 1fr }
  figure, tr, pre { break-inside: avoid }
  h2 { break-after: avoid }
}
"""

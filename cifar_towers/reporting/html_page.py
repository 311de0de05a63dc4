"""Self-contained HTML pages: sections of text, tables, pictures and commands, rendered by one Jinja2 template."""

import base64
from collections.abc import Sequence
from typing import NamedTuple

import jinja2

Cell = str | tuple[str, str]  # a text, or a text and a smaller line below it


class Picture(NamedTuple):
    """A PNG file's bytes, its alternative text, and a caption above it."""

    png: bytes
    alt: str
    caption: str = ""


class Table(NamedTuple):
    """A table, folded below its summary if it has one."""

    headings: Sequence[Cell]
    rows: Sequence[Sequence[Cell]]
    text_columns: int = 1  # number of columns that are aligned left, as text; the others hold numbers
    highlighted: Sequence[int] = ()  # indices of rows
    summary: str = ""


class Section(NamedTuple):
    """Parts of a page in their order. A section without pictures, tables and commands is left out."""

    title: str
    intro: str = ""
    pictures: Sequence[Sequence[Picture]] = ()  # in rows
    tables: Sequence[Table] = ()
    commands: Sequence[tuple[str, str]] = ()  # a line above it or an empty string, a shell command
    note: str = ""


def render(title: str, sections: Sequence[Section], banners: Sequence[str] = ()) -> str:
    """Return the HTML of a page that loads nothing; all texts are escaped."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("cifar_towers.reporting", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["base64"] = lambda content: base64.b64encode(content).decode()
    shown = [section for section in sections if any(section.pictures) or section.tables or section.commands]
    return environment.get_template("report.html.jinja").render(title=title, sections=shown, banners=banners)

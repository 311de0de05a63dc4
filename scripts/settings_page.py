#!/usr/bin/env python3
"""Print docs/settings.md, the table of all flags of `cifar-towers train`; `make docs` writes it."""

import dataclasses
import sys
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cifar_towers.config import TrainConfig
from cifar_towers.config.flags import DEFAULT_RECIPE, flag_settings, parse_command_line
from cifar_towers.config.settings import title_of

INTRODUCTION = f"""
These are the flags of `cifar-towers train`, and the arguments of `cifar_towers.train`;
`cifar-towers train --helpfull` prints them, too. The third column shows where the recipe
`{DEFAULT_RECIPE}` differs from the defaults; the other recipes are the files in
[configs](../configs). A flag whose default is `true` or `false` is turned on by its name, e.g.
`--tta`, and off by the prefix `no`, e.g. `--notta`.
"""


def main() -> None:
    """Print the page."""
    print("\n".join(page_lines()))


def page_lines() -> Iterator[str]:
    """Yield the lines of the page: a table for each section of the settings."""
    yield "# Settings"
    yield ""
    yield from textwrap.wrap(INTRODUCTION.strip(), 120, break_on_hyphens=False)

    recipe = parse_command_line(TrainConfig, [])
    sections = defaultdict(list)
    for field in flag_settings(TrainConfig):
        sections[title_of(TrainConfig, field.name)].append(field)
    for title in sorted(sections):
        yield from ("", f"## {title}", "")
        yield f"| Flag | Default | `{DEFAULT_RECIPE}` | Meaning |"
        yield "| --- | --- | --- | --- |"
        for field in sorted(sections[title], key=lambda field: field.name):
            yield row(field, getattr(recipe, field.name))


def row(field: dataclasses.Field, value: object) -> str:
    """Return the row of a setting, whose value in the recipe is `value`."""
    changed = "" if value == field.default else as_code(value)
    meaning = field.metadata["help"]
    choices = field.metadata["choices"] or ()
    if not all(choice in meaning for choice in choices):
        meaning += f" ({', '.join(choices)})"
    meaning = meaning.replace("<", "&lt;")
    return f"| `--{field.name}` | {as_code(field.default)} | {changed} | {meaning} |"


def as_code(value: object) -> str:
    """Return a value of a flag as code; nothing for an empty one."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return f"`{text}`" if text else ""


if __name__ == "__main__":
    main()

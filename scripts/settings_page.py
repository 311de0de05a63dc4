#!/usr/bin/env python3
"""Print docs/settings.md, the table of all flags of `cifar-towers train`; `make docs` writes it."""

import sys
import textwrap
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
[configs](../configs). Switch a flag whose default is `false` on by its name, e.g. `--tta`, and off
by `no` before the name, e.g. `--notta`.
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
    title = ""
    fields = flag_settings(TrainConfig)
    for field in sorted(fields, key=lambda field: (title_of(TrainConfig, field.name), field.name)):
        if title_of(TrainConfig, field.name) != title:
            title = title_of(TrainConfig, field.name)
            yield from ("", f"## {title}", "")
            yield f"| Flag | Default | `{DEFAULT_RECIPE}` | Meaning |"
            yield "| --- | --- | --- | --- |"
        value = getattr(recipe, field.name)
        changed = "" if value == field.default else as_code(value)
        meaning = field.metadata["help"]
        choices = field.metadata["choices"] or ()
        if not all(choice in meaning for choice in choices):
            meaning += f" ({', '.join(choices)})"
        meaning = meaning.replace("<", "&lt;")
        yield f"| `--{field.name}` | {as_code(field.default)} | {changed} | {meaning} |"


def as_code(value: object) -> str:
    """Return a value of a flag as code; nothing for an empty one."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return f"`{text}`" if text else ""


if __name__ == "__main__":
    main()

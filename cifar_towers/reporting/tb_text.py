"""What a run is, in Markdown: the texts that TensorBoard shows of it."""

import shlex
from collections.abc import Iterable, Mapping, Sequence


def of_run(settings: Mapping, environment: Mapping, banner: str = "") -> dict[str, str]:
    """A run's texts by their tags.

    Args:
      settings, environment: what is in its config.json and environment.json.
      banner: what is to be said of data that is not real.
    """
    variables = (variable.values() for variable in environment["variables"])
    texts = {
        "run/recipe": _table(("setting", "value"), settings.items()),
        "run/command": f"```\n{shlex.join(environment['command'])}\n```",
        "run/environment": _table(("of", "is"), _flat(environment)),
        "run/model": _model_table(environment["model"]),
        "run/variables": _table(("variable", "shape", "bytes", "device"), variables),
    }
    return texts | ({"run/data": banner} if banner else {})


def _table(head: Sequence[str], rows: Iterable) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def _model_table(layers: Sequence[Mapping]) -> str:
    if not layers:
        return "not made of a graph of layers"
    rows = [
        (row["name"], row["kind"], " x ".join(map(str, row["output"])), f"{row['parameters']:,}", f"{row['flops']:,}")
        for row in layers
    ]
    parameters, flops = (sum(row[what] for row in layers) for what in ("parameters", "flops"))
    rows.append(("**all**", "", "", f"**{parameters:,}**", f"**{flops:,}**"))
    return _table(("layer", "kind", "output", "parameters", "FLOPs of one image, forward"), rows)


def _flat(environment: Mapping) -> list[tuple[str, object]]:
    """What of the environment is short enough for a table."""
    rows = []
    for name, value in environment.items():
        if name in ("variables", "model", "command") or not value:
            continue
        if isinstance(value, dict):
            value = ", ".join(f"{key} {content}" for key, content in value.items())
        elif name == "towers":
            value = ", ".join(f"{tower['name']} on {tower['device']}" for tower in value)
        elif isinstance(value, list):
            value = ", ".join(map(str, value))
        rows.append((name, value))
    return rows

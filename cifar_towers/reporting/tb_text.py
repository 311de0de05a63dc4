"""The texts that TensorBoard shows of a run, as Markdown."""

import shlex
from collections.abc import Iterable, Mapping, Sequence


def run_texts(settings: Mapping, environment: Mapping) -> dict[str, str]:
    """The texts of a run by tag, from the contents of its config.json and environment.json."""
    variables = (variable.values() for variable in environment["variables"])
    texts = {
        "run/recipe": _table(("setting", "value"), settings.items()),
        "run/command": f"```\n{shlex.join(environment['command'])}\n```",
        "run/environment": _table(("property", "value"), _short_values(environment)),
        "run/model": _model_table(environment["model"]),
        "run/variables": _table(("variable", "shape", "bytes", "device"), variables),
    }
    if environment["synthetic_data"]:
        texts["run/data"] = environment["synthetic_data"]
    return texts


def _table(headings: Sequence[str], rows: Iterable[Iterable]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def _model_table(layers: Sequence[Mapping]) -> str:
    if not layers:
        return "the model is not a graph of layers"
    rows = []
    for layer in layers:
        output = " x ".join(map(str, layer["output"]))
        rows.append((layer["name"], layer["kind"], output, f"{layer['parameters']:,}", f"{layer['flops']:,}"))
    totals = (f"**{sum(layer[key] for layer in layers):,}**" for key in ("parameters", "flops"))
    rows.append(("**total**", "", "", *totals))
    return _table(("layer", "kind", "output", "parameters", "FLOPs per image, forward"), rows)


def _short_values(environment: Mapping) -> Iterable[tuple[str, object]]:
    """The entries of the environment that fit a row of a table."""
    for name, value in environment.items():
        if name in ("variables", "model", "command") or not value:
            continue
        if isinstance(value, dict):
            value = ", ".join(f"{key} {item}" for key, item in value.items())
        elif isinstance(value, list):
            value = ", ".join(" on ".join(item.values()) if isinstance(item, dict) else str(item) for item in value)
        yield name, value

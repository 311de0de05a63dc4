"""Shared parts of all benchmark reports: facts about the machine, title, table layout, files, pictures."""

import io
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path

from matplotlib.figure import Figure

from cifar_towers.config import TrainConfig
from cifar_towers.errors import RunError, UsageError, error_text
from cifar_towers.files import atomic_io, run_files
from cifar_towers.reporting import environment
from cifar_towers.towers.devices import gpu_names


def make_directory(directory: Path) -> None:
    """Makes the directory for the results, before anything is measured.

    Raises:
      UsageError: it cannot be made.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"train_dir={directory} cannot be made: {error.strerror}") from error


def environment_facts(recipe: TrainConfig, dataset: str) -> dict:
    """Recipe, machine and date of a measurement."""
    return {
        "recipe": recipe.name,
        "model": recipe.model,
        "batch_size": recipe.batch_size,
        "hard_example_pool": recipe.hard_example_pool,
        "dataset": dataset,
        "date": date.today().isoformat(),
        **environment.describe_machine(),
        "gpus": gpu_names(),
    }


def make_title(facts: Mapping, *subjects: str) -> str:
    """`speed94: speednet94, batches of 1,024; Abacus, 2 cores, 1 CPU; 2026-01-01`."""
    machine = [facts["processor"], f"{facts['cores']} cores"]
    machine += [f"{facts['devices']} {facts['kind']}"] if "kind" in facts else []
    machine += sorted(set(facts.get("gpus", ())))
    return f"{facts['recipe']}: {', '.join(subjects)}; {', '.join(machine)}; {facts['date']}"


def format_table(rows: Sequence[Sequence[str]], left: Sequence[int]) -> str:
    """Aligned text of rows with equally many cells; the columns `left` are left-justified."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cell_formats = [f"{{:{'<' if column in left else '>'}{width}}}" for column, width in enumerate(widths)]
    return "\n".join("  ".join(cell_formats).format(*row) for row in rows)


def publish(
    directory: Path,
    name: str,
    results: Mapping,
    parts: Sequence[str],
    extra_files: Mapping[str, str | bytes] = {},
    conclusion: str = "",
) -> None:
    """Prints a report, `conclusion` last, and writes it to <name>.txt and its results to <name>.json.

    Args:
      parts: paragraphs of the report.
      extra_files: contents of further files, by name.

    Raises:
      RunError: the files cannot be written; the report has been printed.
    """
    files = f"in {directory}: {', '.join((f'{name}.txt', f'{name}.json', *extra_files))}"
    text = "\n\n".join(part for part in (*parts, files, conclusion) if part)
    try:  # hours of measurements are written even if they cannot be printed
        print(f"\n{text}", flush=True)
    finally:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            run_files.write_json(directory / f"{name}.json", results)
            for file, content in {f"{name}.txt": text + "\n", **extra_files}.items():
                atomic_io.write_whole(directory / file, content)
        except OSError as error:
            raise RunError(
                f"{directory} cannot be written ({error_text(error)}); the results are only printed above"
            ) from error


def to_png(figure: Figure) -> bytes:
    """A figure as a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=120, facecolor="white")
    return buffer.getvalue()

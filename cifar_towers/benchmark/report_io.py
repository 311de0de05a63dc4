"""Shared parts of all benchmark reports: metadata about the machine, title, table layout, files."""

from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path

from cifar_towers import files
from cifar_towers.config import TrainConfig
from cifar_towers.errors import RunError, UsageError, error_text
from cifar_towers.hardware import gpu_names
from cifar_towers.reporting import environment


def make_directory(directory: Path) -> None:
    """Makes the directory for the results, before anything is measured.

    Raises:
      UsageError: it cannot be made.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"train_dir={directory} cannot be made: {error.strerror}") from error


def collect_metadata(recipe: TrainConfig, dataset: str) -> dict:
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


def make_title(metadata: Mapping) -> str:
    """`speed94: speednet94, batches of 1,024, cifar10; Abacus, 2 cores, 1 CPU; 2026-01-01`."""
    pool = metadata.get("hard_example_pool")
    subjects = [metadata["model"], f"batches of {metadata['batch_size']:,}", f"the hardest of {pool:,}" if pool else ""]
    subjects += [metadata["dataset"], metadata.get("precision", "")]
    machine = [metadata["processor"], f"{metadata['cores']} cores"]
    machine += [f"{metadata['devices']} {metadata['kind']}"] if "kind" in metadata else []
    machine += sorted(set(metadata.get("gpus", ())))
    return f"{metadata['recipe']}: {', '.join(filter(None, subjects))}; {', '.join(machine)}; {metadata['date']}"


def format_table(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """Aligned text of rows with equally many cells; the columns `left` are left-justified."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cell_formats = [f"{{:{'<' if column in left else '>'}{width}}}" for column, width in enumerate(widths)]
    return "\n".join("  ".join(cell_formats).format(*row) for row in rows)


def publish(
    directory: Path,
    name: str,
    metadata: Mapping,
    results: Mapping,
    parts: Sequence[str],
    extra_files: Mapping[str, str | bytes] = {},
    conclusion: str = "",
) -> None:
    """Prints a report, `conclusion` last, and writes it to <name>.txt, and metadata and results to <name>.json.

    Args:
      parts: paragraphs of the report.
      extra_files: contents of further files, by name.

    Raises:
      RunError: the files cannot be written; the report has been printed.
    """
    names = f"in {directory}: {', '.join((f'{name}.txt', f'{name}.json', *extra_files))}"
    text = "\n\n".join(part for part in (make_title(metadata), *parts, names, conclusion) if part)
    try:  # hours of measurements are written even if they cannot be printed
        print(f"\n{text}", flush=True)
    finally:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            files.write_json(directory / f"{name}.json", {**metadata, **results})
            for file, content in {f"{name}.txt": text + "\n", **extra_files}.items():
                files.write_whole(directory / file, content)
        except OSError as error:
            raise RunError(
                f"{directory} cannot be written ({error_text(error)}); the results are only printed above"
            ) from error

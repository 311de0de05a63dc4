"""What all reports of measurements have in common: circumstances, a title, aligned text, files, pictures."""

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


def make_directory(config: TrainConfig) -> None:
    """The place for what is written, before anything is measured.

    Raises:
      UsageError: it cannot be made.
    """
    try:
        config.directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"train_dir={config.directory} cannot be made: {error.strerror}") from error


def circumstances(config: TrainConfig, dataset: str) -> dict:
    """What was measured, on what, and when."""
    return {
        "recipe": config.name,
        "model": config.model,
        "batch_size": config.batch_size,
        "hard_example_pool": config.hard_example_pool,
        "dataset": dataset,
        "date": date.today().isoformat(),
        **environment.describe_machine(),
        "gpus": gpu_names(),
    }


def title(facts: Mapping, *what: str) -> str:
    """`speed94: speednet94, batches of 1,024; Abacus, 2 cores, 1 CPU; 2026-01-01`."""
    machine = [facts["processor"], f"{facts['cores']} cores"]
    machine += [f"{facts['devices']} {facts['kind']}"] if "kind" in facts else []
    machine += sorted(set(facts.get("gpus", ())))
    return f"{facts['recipe']}: {', '.join(what)}; {', '.join(machine)}; {facts['date']}"


def align(lines: Sequence[Sequence[str]], left: Sequence[int]) -> str:
    """Lines of as many cells each, under each other; the columns `left` from the left, the others from the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if index in left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def publish_text(
    directory: Path,
    name: str,
    told: Mapping,
    parts: Sequence[str],
    more: Mapping[str, str | bytes] = {},
    conclusion: str = "",
) -> None:
    """Prints a report, and writes it to name.txt and what it tells to name.json.

    Args:
      more: contents of files beside these two. conclusion: stands at the end.

    Raises:
      RunError: they cannot be written; what was measured has been printed.
    """
    files = f"in {directory}: {', '.join((f'{name}.txt', f'{name}.json', *more))}"
    text = "\n\n".join(part for part in (*parts, files, conclusion) if part)
    try:  # it may have taken hours: what cannot be printed is written all the same, and the other way round
        print(f"\n{text}", flush=True)
    finally:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            run_files.write_json(directory / f"{name}.json", told)
            for file, content in {f"{name}.txt": text + "\n", **more}.items():
                atomic_io.write_whole(directory / file, content)
        except OSError as error:
            raise RunError(
                f"{directory} cannot be written ({error_text(error)}); what is above is all there is"
            ) from error


def png(figure: Figure) -> bytes:
    """A figure as a picture."""
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=120, facecolor="white")
    return buffer.getvalue()

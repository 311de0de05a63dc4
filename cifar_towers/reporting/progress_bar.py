"""The bar of a program that is no training, apart from `console`: a training has no use for the time of its imports."""

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import Progress


@contextlib.contextmanager
def progress_bar(name: str) -> Iterator[Callable[[float], None]]:
    """A bar on standard error, if that is a terminal, that is removed at the end; yields what sets its fraction."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal, redirect_stdout=False) as bar:
        task = bar.add_task(name, total=1.0)
        yield lambda done: bar.update(task, completed=done)

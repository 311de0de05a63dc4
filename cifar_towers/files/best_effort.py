"""Writing of files that training does not depend on."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from cifar_towers.errors import error_text

log = logging.getLogger(__name__)


class BestEffortWrites:
    """Swallows write errors of a file or directory that training does not depend on; warns once.

    Use as `with best_effort():` around each write.
    """

    def __init__(self, path: Path, errors: tuple[type[Exception], ...] = (OSError,)):
        self._path, self._errors, self._warned = path, errors, False

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """A context in which the errors are swallowed."""
        try:
            yield
        except self._errors as error:
            if not self._warned:
                log.warning("%s cannot be written (%s); training continues without it", self._path, error_text(error))
            self._warned = True


def best_effort_writes(path: Path) -> contextlib.AbstractContextManager[None]:
    """`BestEffortWrites` around a single write."""
    return BestEffortWrites(path)()

"""SIGINT and SIGTERM: the first asks the run to save and leave, a second ends it at once."""

import os
import signal

from cifar_towers.errors import Interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Remembers a signal while `deferred`; raises `Interrupted` from wherever the program is otherwise."""

    def __init__(self):
        self.signal: int | None = None
        self.deferred = False

    def listen(self) -> "StopRequest":
        """Installs the handlers; call it in the main thread."""
        for number in SIGNALS:
            signal.signal(number, self._on_signal)
        return self

    def _on_signal(self, number, frame):
        if self.signal is not None:
            os._exit(128 + number)
        self.signal = number
        if not self.deferred:
            raise Interrupted(number, "interrupted before the first step; nothing to save")

"""SIGINT and SIGTERM: the first asks the run to save and leave, a second ends it at once."""

import os
import signal

from cifar_towers.errors import Interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM)
NOTHING_DONE = "before the first step; nothing to save"


class StopRequest:
    """Raises `Interrupted` from wherever the program is, or while `defer`red only remembers the signal."""

    def __init__(self):
        self._deferred = False
        self.signal: int | None = None
        self._message = NOTHING_DONE

    def listen(self) -> "StopRequest":
        """Installs the handlers; call it in the main thread."""
        for number in SIGNALS:
            signal.signal(number, self._on_signal)
        return self

    def defer(self) -> None:
        """From now on somebody looks at `signal` and leaves when all is saved."""
        self._deferred = True

    def leave_at_once(self, message: str) -> None:
        """From now on nothing is lost by leaving, with this message; leaves if a signal has come already."""
        self._deferred, self._message = False, message
        if self.signal is not None:
            raise Interrupted(self.signal, message)

    def _on_signal(self, number, frame):
        if self.signal is not None:
            os._exit(128 + number)
        self.signal = number
        if not self._deferred:
            raise Interrupted(number, self._message)

"""SIGINT, SIGTERM and SIGUSR1: the first one lets a run stop after its step, a second one has its
default action.
"""

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Iterator, Sequence

# USR1: what Slurm sends before the time is up
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
# `timeout` and schedulers signal a process, and at once its group: that is one signal
REPEAT_SECONDS = 0.1

log = logging.getLogger(__name__)


class StopSignals:
    """The first stop signal that this process receives.

    Attributes:
      received: number of that signal, or 0.
    """

    def __init__(self, numbers: Sequence[int] = STOP_SIGNALS):
        self.received = 0
        self._numbers = numbers

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the first signal inside, instead of acting on it. A second signal has the action
        of before.

        Python handles signals in its main thread alone: in another thread this does nothing.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {number: signal.getsignal(number) or signal.SIG_DFL for number in self._numbers}

        def restore() -> None:
            for number, action in previous.items():
                signal.signal(number, action)

        def record(number: int, frame: object) -> None:
            self.received = number
            for stop_signal in self._numbers:
                signal.signal(stop_signal, signal.SIG_IGN)
            time.sleep(REPEAT_SECONDS)
            restore()
            log.info(f"{signal.Signals(number).name}: saving after this step; again: stop at once")

        for number in self._numbers:
            signal.signal(number, record)
        try:
            yield
        finally:
            restore()

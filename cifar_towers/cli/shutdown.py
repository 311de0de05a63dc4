"""SIGINT and SIGTERM: the first asks the run to save and leave, a second ends it at once."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

from cifar_towers.errors import Interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM)
LAUNCH_VARIABLE = "CIFAR_TOWERS_LAUNCH"  # in the environment of a launcher and of what it starts: a name for all of it
NOTHING_DONE = "before the first step; nothing to save"
ONE = 0.1  # seconds within which several are one: `timeout` signals a process, and then its group
ONE_UNDER_LAUNCHER = 1.0  # the same where a launcher passes on what all of its group may have got already


class ShutdownHandler:
    """Raises `Interrupted` from wherever the program is, or while `defer`red only remembers the signal.

    Attributes:
      announce: called with a line for the user when a signal comes that has to wait.
      before_end: called before a second signal ends the process at once.
      asked: the signal that has come, or 0. signal: the same once it counts, or None.
    """

    def __init__(self):
        self.announce: Callable[[str], None] = lambda line: None
        self.before_end: Callable[[], None] = lambda: None
        self.asked, self.signal = 0, None
        self._deferred = self._leaving = self._shared = False
        self._message = NOTHING_DONE

    def listen(self) -> "ShutdownHandler":
        """Installs the handlers; call it in the main thread."""
        self.reinstall_handlers()
        sys.unraisablehook = self._unraisable
        # Python runs handlers between its own instructions, so not inside a long step; this thread hears at once.
        hears, tells = os.pipe()
        os.set_blocking(tells, False)
        signal.set_wakeup_fd(tells, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(hears,), daemon=True).start()
        return self

    def reinstall_handlers(self) -> None:
        """Installs the handlers again, as after a library that has put its own in their place."""
        for number in SIGNALS:
            signal.signal(number, self._on_signal)

    def defer(self) -> None:
        """From now on somebody calls `check` and leaves when all is saved."""
        self._deferred = True

    def share(self) -> None:
        """Makes a signal count only once it comes back through `agree`, until `exit_immediately_from_now`: other
        processes make every step together with this one, and all must stop after the same."""
        self._shared = True

    def agree(self, number: int) -> None:
        """What all processes have heard of: a signal that came to one of them, or 0."""
        self.signal = number or self.signal

    def exit_immediately_from_now(self, message: str) -> None:
        """From now on nothing is lost by leaving, with this message; leaves if a signal has come already."""
        self._deferred, self._shared, self._message = False, False, message
        self.agree(self.asked)
        self.check()

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """What is done inside may be broken off anywhere: leaves it as soon as a signal comes, unless others do it with
        this process."""
        if self._shared:
            yield
            return
        deferred, self._deferred = self._deferred, False
        try:
            self.check()
            yield
            self.check()
        except Exception as error:
            self.interpret(error)
            raise
        finally:
            self._deferred = deferred

    def check(self) -> None:
        """Leaves if a signal has come."""
        if self.signal is not None:
            raise self._interrupted()

    def interpret(self, error: Exception) -> None:
        """Raises `Interrupted` in place of `error` if that is what a library made of it: TensorFlow and Keras turn
        whatever is raised in some of their callbacks into errors of their own."""
        if self.signal is not None and not self._deferred:
            raise self._interrupted() from error

    def end(self) -> None:
        """From now on signals come too late: the program has nothing left to do but to end."""
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def _interrupted(self) -> Interrupted:
        self._leaving = True
        return Interrupted(self.signal, self._message)

    @staticmethod
    def _unraisable(told) -> None:
        """What is raised in a destructor is told and passed over; `check` tells of a signal, so this need not."""
        if not issubclass(told.exc_type, Interrupted):
            sys.__unraisablehook__(told)

    def _on_signal(self, number, frame):
        self.asked = number
        if not self._shared:
            self.signal = number
        if not self._deferred:
            raise self._interrupted()

    def _watch(self, hears: int) -> None:
        first = 0.0
        while number := os.read(hears, 1)[0]:
            if number not in SIGNALS:
                continue
            if first:
                if time.monotonic() - first > (ONE_UNDER_LAUNCHER if LAUNCH_VARIABLE in os.environ else ONE):
                    with contextlib.suppress(Exception):
                        self.before_end()
                    os._exit(128 + number)
                continue
            time.sleep(ONE / 2)  # by then it leaves, if it can
            if self._deferred and not self._leaving:
                name = signal.Signals(number).name
                with contextlib.suppress(Exception):  # whoever hears it, the second must be answered
                    self.announce(f"{name}: saves after this step and leaves; again: leaves at once")
            first = time.monotonic()  # one that came in the meantime is the same

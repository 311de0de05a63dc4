"""Handling of SIGINT, SIGTERM and SIGUSR1: the first lets the run save and stop, a second ends the process at once."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

from cifar_towers.errors import NOTHING_TO_SAVE, STOP_SIGNALS, Interrupted, interrupt_exit_code

SIGNAL_DEBOUNCE_SECONDS = 0.1  # repeated signals within it count once: `timeout` signals a process, then its group


class ShutdownHandler:
    """A handler that raises `Interrupted` in the main thread on a signal, or only records it after `defer_signals`.

    Attributes:
      announce: called with a line for the user when a signal has to wait.
      before_exit: called before a second signal ends the process.
      received_signal: the signal that this process received, or 0.
      signal: the signal to act on, or 0; if processes must agree, only `set_agreed_signal` sets it.
    """

    def __init__(self):
        self.announce: Callable[[str], None] = lambda line: None
        self.before_exit: Callable[[], None] = lambda: None
        self.received_signal = self.signal = 0
        self._deferred = self._exiting = self._needs_consensus = False
        self._message = NOTHING_TO_SAVE

    def install(self) -> "ShutdownHandler":
        """Install the handlers; must be called in the main thread."""
        self.reinstall_handlers()
        sys.unraisablehook = self._ignore_unraisable_interrupt
        # Python runs handlers between its own instructions, so not inside a long step: a thread reads the wakeup pipe.
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(read_end,), daemon=True).start()
        return self

    @contextlib.contextmanager
    def handling_interrupts(self) -> Iterator[None]:
        """Handle SIGINT inside, in a process that goes on afterwards; a second one raises KeyboardInterrupt at once.

        Outside of the main thread, where Python handles no signals, this does nothing.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def on_interrupt(number, frame):
            if self.received_signal:
                raise KeyboardInterrupt
            if self._deferred:
                self.announce("interrupt: saving after this step; interrupt again to stop at once")
            self._on_signal(number, frame)

        previous = signal.signal(signal.SIGINT, on_interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)

    def reinstall_handlers(self) -> None:
        """Install the handlers again after a library has replaced them."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)

    def defer_signals(self, by_consensus: bool = False) -> None:
        """Only record signals from now on; the caller polls `check` between steps.

        With `by_consensus`, only a signal passed to `set_agreed_signal` counts, until `exit_immediately_from_now`:
        processes that train together must stop after the same step.
        """
        self._deferred = True
        self._needs_consensus |= by_consensus

    def set_agreed_signal(self, number: int) -> None:
        """Record the signal that any of the processes received, or 0."""
        self.signal = number or self.signal

    def exit_immediately_from_now(self, message: str) -> None:
        """Let signals raise at once from now on, with this message; raise here if one has been received."""
        self._deferred, self._needs_consensus, self._message = False, False, message
        self.set_agreed_signal(self.received_signal)
        self.check()

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let a signal interrupt the code inside, also after `defer_signals`, unless processes must agree on it."""
        if self._needs_consensus:
            yield
            return
        deferred, self._deferred = self._deferred, False
        try:
            self.check()
            yield
            self.check()
        except Exception as error:
            self.reraise_as_interrupt(error)
            raise
        finally:
            self._deferred = deferred

    def check(self) -> None:
        """Raise `Interrupted` if there is a signal to act on."""
        if self.signal:
            raise self._interrupted()

    def reraise_as_interrupt(self, error: Exception) -> None:
        """Raise `Interrupted` in place of `error` after a signal.

        TensorFlow and Keras wrap what is raised in some of their callbacks in errors of their own.
        """
        if self.signal and not self._deferred:
            raise self._interrupted() from error

    def ignore_signals(self) -> None:
        """Ignore signals from now on, as the program is about to exit."""
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def _interrupted(self) -> Interrupted:
        self._exiting = True
        return Interrupted(self.signal, self._message)

    @staticmethod
    def _ignore_unraisable_interrupt(unraisable) -> None:
        """Print no `Interrupted` that was raised in a destructor and is lost; the next `check` raises it again."""
        if not issubclass(unraisable.exc_type, Interrupted):
            sys.__unraisablehook__(unraisable)

    def _on_signal(self, number, frame):
        self.received_signal = number
        if not self._needs_consensus:
            self.signal = number
        if not self._deferred:
            raise self._interrupted()

    def _watch(self, read_end: int) -> None:
        first = None
        while number := os.read(read_end, 1)[0]:
            if number not in STOP_SIGNALS:
                continue
            if first is not None:
                if time.monotonic() - first > SIGNAL_DEBOUNCE_SECONDS:
                    with contextlib.suppress(Exception):
                        self.before_exit()
                    os._exit(interrupt_exit_code(number))
                continue
            time.sleep(SIGNAL_DEBOUNCE_SECONDS / 2)  # the main thread may exit by itself in the meantime
            if self._deferred and not self._exiting:
                name = signal.Signals(number).name
                with contextlib.suppress(Exception):  # the second signal must work even if this line cannot be printed
                    self.announce(f"{name}: saving after this step, then exiting; send it again to exit at once")
            first = time.monotonic()  # later than the announcement, which may take a while

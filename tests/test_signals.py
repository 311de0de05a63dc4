"""The first stop signal is recorded; a second one does what it did before."""

import signal
import threading

import pytest

from cifar_towers import signals
from cifar_towers.signals import STOP_SIGNALS, StopSignals


@pytest.fixture(autouse=True)
def killed():
    """Take the place of what would end the process; return the signals that have come through."""
    numbers = []
    before = {
        number: signal.signal(number, lambda number, _: numbers.append(number))
        for number in STOP_SIGNALS
    }
    yield numbers
    for number, action in before.items():
        signal.signal(number, action)


@pytest.fixture(autouse=True)
def meanwhile(monkeypatch):
    """Return the signals to raise in the instant after the first one, which takes no time here."""
    numbers = []
    monkeypatch.setattr(
        signals.time, "sleep", lambda _: [signal.raise_signal(number) for number in numbers]
    )
    return numbers


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_the_first_signal_is_recorded_and_announced_and_the_second_kills(killed, caplog, number):
    caplog.set_level("INFO", "cifar_towers")
    stop = StopSignals()
    with stop.recorded():
        assert stop.received == 0
        signal.raise_signal(number)
        assert stop.received == number
        assert killed == []
        assert signal.Signals(number).name in caplog.text
        signal.raise_signal(number)

    assert stop.received == number
    assert killed == [number]
    assert len(caplog.records) == 1


def test_signals_at_once_are_one(killed, meanwhile):
    """`timeout` signals a process, then its group."""
    meanwhile += [signal.SIGTERM, signal.SIGINT]
    stop = StopSignals()
    with stop.recorded():
        signal.raise_signal(signal.SIGTERM)
    assert stop.received == signal.SIGTERM
    assert killed == []


def test_outside_the_context_signals_have_the_action_of_before(killed):
    stop = StopSignals()
    with stop.recorded():
        pass
    for number in STOP_SIGNALS:
        signal.raise_signal(number)
    assert stop.received == 0
    assert killed == list(STOP_SIGNALS)


def test_in_another_thread_nothing_is_recorded():
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def enter():
        with StopSignals().recorded():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()

    assert seen == [before]

"""Signals to a process of its own, also while Python cannot run a handler."""

import hashlib
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from cifar_towers.signals import StopSignals

ROOT = Path(__file__).parents[1]
CHILD = """
import hashlib, logging, signal, sys, time
sys.path.insert(0, ROOT)
from cifar_towers.signals import StopSignals
logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stdout)
signal.signal(signal.SIGINT, signal.SIG_DFL)
signals = StopSignals()
with signals.recorded():
    print("ready", flush=True)
    while not signals.received:
        time.sleep(0.01)
        STEP
    print("saved", signals.received, flush=True)
    time.sleep(2)
print("ended", flush=True)
AFTERWARDS
"""


def busy(seconds):
    """Return code that stays in C for so many seconds, like a step of TensorFlow, or longer on a busy machine."""
    started = time.process_time()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 100_000)
    iterations = int(100_000 * seconds / (time.process_time() - started))
    return f"hashlib.pbkdf2_hmac('sha256', b'', b'', {iterations})"


def send(number, pauses, step="pass", afterwards="pass"):
    """Send the signal after each pause; return exit code and output."""
    code = CHILD.replace("ROOT", repr(str(ROOT))).replace("STEP", step).replace("AFTERWARDS", afterwards)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    for pause in pauses:
        time.sleep(pause)
        process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert "Traceback" not in err
    return process.returncode, out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_the_first_signal_is_recorded_and_announced_and_the_second_kills(number):
    exit_code, out = send(number, (0.1, 0.3))
    announced, saved = out.splitlines()
    assert announced.startswith(f"{signal.Signals(number).name}: saving after this step")
    assert saved == f"saved {int(number)}" and exit_code == -number


@pytest.mark.parametrize(("pause", "is_busy"), [(0.0, True), (0.1, True), (0.0, False)])
def test_signals_at_once_or_during_one_step_are_one(pause, is_busy):
    """`timeout` signals a process, then its group."""
    exit_code, out = send(signal.SIGTERM, (0.1, pause), busy(1) if is_busy else "pass")
    assert out.endswith("saved 15\nended\n") and exit_code == 0


def test_outside_the_context_a_signal_has_its_default_action():
    exit_code, out = send(signal.SIGTERM, (0.1, 5.0), afterwards="time.sleep(30)")
    assert out.endswith("ended\n") and exit_code == -signal.SIGTERM


def test_in_another_thread_nothing_is_recorded():
    before = signal.getsignal(signal.SIGTERM)

    def enter():
        with StopSignals().recorded():
            seen.append(signal.getsignal(signal.SIGTERM))

    seen = []
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [before]

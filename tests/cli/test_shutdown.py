"""What a signal does, in a process of its own: quick ones, and ones that cannot be answered by Python for a while."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cifar_towers.multi_worker.launcher import LAUNCH_VARIABLE

ROOT = Path(__file__).parents[2]
CHILD = """
import hashlib, sys, time, threading
sys.path.insert(0, ROOT)
from cifar_towers.errors import Interrupted
from cifar_towers.cli.shutdown import ShutdownHandler
stop = ShutdownHandler().install()
stop.announce = lambda line: print(line, flush=True)
stop.defer_signals()
print("ready", flush=True)
def step():
    STEP
try:
    step()
    stop.check()
    with stop.interruptible():
        print("nothing", flush=True)
        BROKEN_OFF
except Interrupted as error:
    print("left", flush=True)
    sys.exit(error.exit_code)
"""
BUSY = "hashlib.pbkdf2_hmac('sha256', b'', b'', {}_000_000)"  # in C, as TensorFlow's steps: 2 take a second or so


class Child:
    def __init__(self, step="pass", broken_off="time.sleep(30)"):
        code = CHILD.replace("ROOT", repr(str(ROOT))).replace("STEP", step).replace("BROKEN_OFF", broken_off)
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout.readline() == "ready\n"

    def signalled(self, number, *pauses):
        """Sends the signal after each pause; (exit code, output, seconds from the last signal to the end)."""
        for pause in pauses:
            time.sleep(pause)
            self.process.send_signal(number)
        sent = time.monotonic()
        out, err = self.process.communicate(timeout=60)
        assert "Traceback" not in err
        return self.process.returncode, out, time.monotonic() - sent


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_in_a_step_waits_for_its_end_and_says_so(number, code):
    found, out, _ = Child(BUSY.format(2)).signalled(number, 0.2)
    assert found == code and "saving after this step, then exiting; send it again to exit at once" in out
    assert out.endswith("left\n") and "nothing" not in out


def test_a_second_signal_does_not_wait():
    found, out, seconds = Child(BUSY.format(6)).signalled(signal.SIGTERM, 0.1, 0.3)
    assert found == 143 and "left" not in out and seconds < 1


def test_before_a_second_signal_ends_it_others_are_ended():
    doing = "stop.before_exit = lambda: print('others', flush=True)\n    " + BUSY.format(6)
    found, out, _ = Child(doing).signalled(signal.SIGTERM, 0.1, 0.3)
    assert found == 143 and out.endswith("others\n")


def test_two_signals_at_once_are_one():
    """As of `timeout`, which signals a process and then its group."""
    for _ in range(3):
        found, out, _ = Child(BUSY.format(2)).signalled(signal.SIGTERM, 0.1, 0.002)
        assert found == 143 and "left" in out


def test_two_signals_are_one_however_long_it_takes_to_say_so():
    slow = "stop.announce = lambda line: (time.sleep(0.3), print(line, flush=True))\n    " + BUSY.format(2)
    found, out, _ = Child(slow).signalled(signal.SIGTERM, 0.1, 0.25)
    assert found == 143 and "left" in out


def test_what_a_launcher_passes_on_is_not_a_second_one(monkeypatch):
    """Whose group, as at Ctrl-C, has got the signal already."""
    monkeypatch.setenv(LAUNCH_VARIABLE, "0")
    found, out, _ = Child(BUSY.format(2)).signalled(signal.SIGINT, 0.1, 0.4)
    assert found == 130 and "left" in out


CHANGED = "try: time.sleep(30)\n        except BaseException: raise TypeError('as Keras has it')"
PASSED_OVER = "try: time.sleep(30)\n        except BaseException: pass"
DESTROYED = "class Slow:\n            def __del__(self): time.sleep(30)\n        Slow()"


@pytest.mark.parametrize("broken_off", ["time.sleep(30)", CHANGED, PASSED_OVER, DESTROYED])
def test_what_may_be_broken_off_is(broken_off):
    """Whatever a library that was in the middle makes of it."""
    found, out, seconds = Child(broken_off=broken_off).signalled(signal.SIGTERM, 0.5)
    assert found == 143 and out.endswith("left\n") and seconds < 10

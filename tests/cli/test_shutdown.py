"""Signals to processes of their own, also while Python cannot run a handler."""

import hashlib
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.messages import lines_with

ROOT = Path(__file__).parents[2]
CHILD = """
import hashlib, sys, time, threading
sys.path.insert(0, ROOT)
from cifar_towers.errors import Interrupted
from cifar_towers.shutdown import ShutdownHandler
shutdown = ShutdownHandler().install()
shutdown.announce = lambda line: print(line, flush=True)
shutdown.defer_signals()
print("ready", flush=True)
def step():
    STEP
try:
    step()
    shutdown.check()
    with shutdown.interruptible():
        print("nothing", flush=True)
        INTERRUPTED
except Interrupted as error:
    shutdown.ignore_signals()
    print("interrupted", flush=True)
    sys.exit(error.exit_code)
"""


def busy(seconds):
    """Return code that stays in C for so many seconds, like a step of TensorFlow, or longer on a busy machine."""
    started = time.process_time()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 100_000)
    iterations = int(100_000 * seconds / (time.process_time() - started))
    return f"hashlib.pbkdf2_hmac('sha256', b'', b'', {iterations})"


class Child:
    def __init__(self, step="pass", interrupted="time.sleep(30)"):
        code = CHILD.replace("ROOT", repr(str(ROOT))).replace("STEP", step).replace("INTERRUPTED", interrupted)
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout.readline() == "ready\n"

    def send_signals(self, number, *pauses):
        """Send the signal after each pause; return exit code, output, and seconds from the last signal to the end."""
        for pause in pauses:
            time.sleep(pause)
            self.process.send_signal(number)
        sent = time.monotonic()
        out, err = self.process.communicate(timeout=60)
        assert "Traceback" not in err
        return self.process.returncode, out, time.monotonic() - sent


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_in_a_step_is_announced_and_waits_for_its_end(number, code):
    exit_code, out, _ = Child(busy(1)).send_signals(number, 0.2)
    assert exit_code == code and lines_with(out, "saving", "again")
    assert out.endswith("interrupted\n") and "nothing" not in out


def test_second_signal_exits_at_once():
    doing = "shutdown.before_exit = lambda: print('others', flush=True)\n    " + busy(3)
    exit_code, out, seconds = Child(doing).send_signals(signal.SIGTERM, 0.1, 0.3)
    assert exit_code == 143 and "interrupted" not in out and out.endswith("others\n") and seconds < 1


SLOWLY = "shutdown.announce = lambda line: (time.sleep(0.3), print(line, flush=True))\n    "


@pytest.mark.parametrize(("doing", "pause"), [("", 0.002), ("", 0.002), ("", 0.002), (SLOWLY, 0.25)])
def test_two_signals_at_once_count_once(doing, pause):
    """Send signals as `timeout` does, to a process and then its group; also while the first is announced."""
    exit_code, out, _ = Child(doing + busy(1)).send_signals(signal.SIGTERM, 0.1, pause)
    assert exit_code == 143 and "interrupted" in out


REPLACED = "try: time.sleep(30)\n        except BaseException: raise TypeError('as Keras has it')"
SWALLOWED = "try: time.sleep(30)\n        except BaseException: pass"
IN_DESTRUCTOR = "class Slow:\n            def __del__(self): time.sleep(30)\n        Slow()"


@pytest.mark.parametrize("interrupted", ["time.sleep(30)", REPLACED, SWALLOWED, IN_DESTRUCTOR])
def test_interruptible_code_is_interrupted(interrupted):
    """Also where a library replaces, swallows or loses the exception."""
    exit_code, out, seconds = Child(interrupted=interrupted).send_signals(signal.SIGTERM, 0.5)
    assert exit_code == 143 and out.endswith("interrupted\n") and seconds < 10

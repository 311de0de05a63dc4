"""Files are replaced whole or stay as they were, whatever happens meanwhile; locks end with their process."""

import fcntl
import math
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from cifar_towers import files
from cifar_towers.checkpointing.checkpoint import read_checkpoint
from cifar_towers.errors import DataError

ROOT = Path(__file__).parents[1]


def write_part(file):
    file.write(b"part")
    raise OSError(28, "No space left on device")


def test_a_file_is_replaced_whole_or_stays_as_it_was(tmp_path):
    path = tmp_path / "file"
    for content, expected in (("one", b"one"), (b"two", b"two"), (lambda file: file.write(b"three"), b"three")):
        files.write_whole(path, content)
        assert path.read_bytes() == expected
    for content, error in (("\udc80", UnicodeEncodeError), (write_part, OSError)):
        with pytest.raises(error):
            files.write_whole(path, content)
    assert path.read_bytes() == b"three" and list(tmp_path.iterdir()) == [path]


# Each fork dies, with nothing done after, at a later one of these calls, until one lives; the code is what users run.
FORKS = """
import io, itertools, os, pathlib, sys
import numpy as np
from cifar_towers.checkpointing.checkpoint import write_checkpoint
calls = 0
def dying(function):
    def call(*args, **kwargs):
        global calls
        calls += 1
        if calls == die_at:
            os._exit(9)
        return function(*args, **kwargs)
    return call
class DyingFile(io.BufferedWriter):
    write, seek, flush, close = map(dying, (io.BufferedWriter.write, io.BufferedWriter.seek,
                                            io.BufferedWriter.flush, io.BufferedWriter.close))
for die_at in itertools.count(1):
    path = pathlib.Path(sys.argv[1], str(die_at), "step-7.npz")
    path.parent.mkdir()
    write_checkpoint(path, {"kernel": np.full(5000, 1)}, {"step": 7})
    if not os.fork():
        os.fsync, os.replace, os.open = map(dying, (os.fsync, os.replace, os.open))
        pathlib.Path.open = dying(lambda path, mode: DyingFile(io.FileIO(path, mode)))
        write_checkpoint(path, {"kernel": np.full(5000, 2)}, {"step": 7})
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.wait()[1])
    assert code in (0, 9), code
    if code == 0:
        break
"""


def test_death_at_every_call_of_a_save_leaves_the_old_file_or_the_new(tmp_path):
    subprocess.run([sys.executable, "-c", FORKS, tmp_path], check=True, cwd=ROOT)
    *died, _ = sorted(tmp_path.iterdir(), key=lambda run: int(run.name))
    assert len(died) > 20
    kernels = [read_checkpoint(run / "step-7.npz")[0]["kernel"] for run in died]
    assert {value for kernel in kernels for value in kernel} == {1, 2}
    assert all(files.belongs_to_run(path.name) for run in died for path in run.iterdir())


def test_a_lock_is_one_processs_and_dies_with_it(tmp_path):
    lock = tmp_path / ".lock"
    code = (
        "import sys; from pathlib import Path; from cifar_towers import files\n"
        f"with files.locked(Path({str(lock)!r})) as ours: print(ours, flush=True); sys.stdin.read()"
    )
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    with subprocess.Popen([sys.executable, "-c", code], **options) as holder:
        assert holder.stdout.readline() == "True\n" and files.is_locked(lock)
        with files.locked(lock) as ours:
            assert not ours
        holder.kill()
    assert not files.is_locked(lock)
    with files.locked(lock) as ours:
        assert ours


def test_a_look_at_a_lock_keeps_nobody_from_it(tmp_path):
    path = tmp_path / ".lock"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # the instant in which `is_locked` looks
        threading.Timer(0.1, fcntl.flock, (file, fcntl.LOCK_UN)).start()
        with files.locked(path) as ours:
            assert ours


@pytest.mark.parametrize("content", [b"", b"[1]", b'{"step": ', b"\xff\xfe"])
def test_damaged_json_is_one_error_that_names_the_file(tmp_path, content):
    path = tmp_path / "result.json"
    assert files.read_json_if_any(path) == {}
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"result.json cannot be read .*good copy"):
        files.read_json_if_any(path)


def test_json_has_no_number_that_other_parsers_refuse():
    value = {"loss": math.nan, "norms": (np.float32(math.inf), np.int64(1)), "path": Path("a")}
    assert files.to_json(value) == '{"loss": null, "norms": [null, 1], "path": "a"}'


def test_best_effort_writes_warn_once_and_hide_no_other_error(tmp_path, caplog):
    best_effort = files.BestEffortWrites(tmp_path)
    for _ in range(2):
        with best_effort:
            raise OSError(28, "No space left on device")
    assert len(caplog.records) == 1 and "training continues without it" in caplog.text
    with pytest.raises(ValueError, match="other"), best_effort:
        raise ValueError("other")

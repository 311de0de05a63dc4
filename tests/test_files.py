"""Whatever happens while a directory is committed, there is an old state or a new one, and damage is seen."""

import contextlib
import fcntl
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from cifar_towers import files
from cifar_towers.errors import DataError

ROOT = Path(__file__).parents[1]
CONTENT = {"weights.bin": bytes(range(256)) * 40, "metadata.json": b'{"step": 2}', "empty": b""}


def write(directory):
    for name, content in CONTENT.items():
        (directory / name).write_bytes(content)


def committed(parent, name="step-2"):
    files.commit(parent / name, write)
    return parent / name


def test_what_was_committed_is_there_and_undamaged(tmp_path):
    directory = committed(tmp_path / "checkpoints")
    assert {path.name: path.read_bytes() for path in directory.iterdir() if path.name != files.MANIFEST} == CONTENT
    assert files.validate(directory) == "" and list(directory.parent.iterdir()) == [directory]
    (directory / "weights.bin").write_bytes(bytes(len(CONTENT["weights.bin"])))
    assert "other content" in files.validate(directory) and not files.validate(directory, hashes=False)
    (directory / "weights.bin").write_bytes(CONTENT["weights.bin"][1:])
    assert "bytes, not" in files.validate(directory, hashes=False)


def test_a_file_is_replaced_whole_or_stays_as_it_was(tmp_path):
    path = tmp_path / "file"
    files.write_whole(path, "one")
    files.write_whole(path, b"two")
    with pytest.raises(UnicodeEncodeError):
        files.write_whole(path, "\udc80")
    assert path.read_bytes() == b"two" and list(tmp_path.iterdir()) == [path]


def test_a_directory_that_cannot_be_replaced_stays(tmp_path):
    directory = committed(tmp_path)
    with pytest.raises(FileNotFoundError):
        files.replace(tmp_path / "nowhere", directory)
    assert files.validate(directory) == "" and list(tmp_path.iterdir()) == [directory]


def test_an_error_leaves_nothing(tmp_path):
    def full(directory):
        write(directory)
        raise OSError(28, "No space left on device")

    committed(tmp_path, "step-1")
    with pytest.raises(OSError, match="No space"):
        files.commit(tmp_path / "step-2", full)
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


# Each fork dies, with nothing done after, at a later one of these calls, until one lives; the code is what users run.
FORKS = """
import itertools, os, pathlib, shutil, sys
from cifar_towers import files
calls = 0
def dying(function):
    def call(*args, **kwargs):
        global calls
        calls += 1
        if calls == die_at:
            os._exit(9)
        return function(*args, **kwargs)
    return call
def write(directory):
    for name in ("a", "b"):
        (directory / name).write_bytes(b"new " * 5000)
for die_at in itertools.count(1):
    parent = pathlib.Path(sys.argv[1], str(die_at))
    files.commit(parent / "step-1", write)
    if not os.fork():
        os.fsync, os.rename, os.open, shutil.rmtree = map(dying, (os.fsync, os.rename, os.open, shutil.rmtree))
        for name in ("mkdir", "write_bytes", "write_text", "stat", "iterdir", "open"):
            setattr(pathlib.Path, name, dying(getattr(pathlib.Path, name)))
        files.commit(parent / "step-2", write)
        files.remove(parent / "step-1")
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.wait()[1])
    assert code in (0, 9), code
    if code == 0:
        break
"""


def test_death_at_every_call_of_a_save_leaves_the_old_state_or_the_new(tmp_path):
    subprocess.run([sys.executable, "-c", FORKS, tmp_path], check=True, cwd=ROOT)
    *died, _ = sorted(tmp_path.iterdir(), key=lambda parent: int(parent.name))
    assert len(died) > 20
    seen = set()
    for parent in died:
        files.sweep(parent)
        left = sorted(path.name for path in parent.iterdir())
        assert left in (["step-1"], ["step-1", "step-2"], ["step-2"]), (parent, left)
        assert not any(files.validate(parent / name) for name in left)
        seen.add(tuple(left))
    assert len(seen) == 3


def mutate(directory, random):
    """One fault of a disk in one file of a directory."""
    path = directory / random.choice(sorted(path.name for path in directory.iterdir()))
    content = path.read_bytes()
    place = random.randrange(max(1, len(content)))
    changed = {
        "flip": content[:place]
        + bytes(byte ^ 1 << random.randrange(8) for byte in content[place:][:1])
        + content[place + 1 :],
        "cut": content[:place],
        "zero": bytes(len(content)),
        "grow": content + b"\0",
    }
    kind = random.choice(["delete", "swap", "add", *(kind for kind in changed if changed[kind] != content)])
    if kind == "swap":
        other = random.choice([other for other in directory.iterdir() if other != path])
        path.write_bytes(other.read_bytes())
        other.write_bytes(content)
    elif kind == "add":
        (directory / "stranger").write_bytes(b"")
    elif kind == "delete":
        path.unlink()
    else:
        path.write_bytes(changed[kind])
    return f"{kind} {path.name}"


def test_every_damage_is_seen(tmp_path):
    """Damage files and manifests. A manifest that only gained white space at its end still says the same."""
    dice = random.Random(0)
    for trial in range(300):
        directory = committed(tmp_path, f"step-{trial}")
        mutation = mutate(directory, dice)
        if mutation == f"grow {files.MANIFEST}":
            (directory / files.MANIFEST).write_text((directory / files.MANIFEST).read_text().rstrip("\0") + " ")
            assert not files.validate(directory)
        else:
            assert files.validate(directory), mutation


def test_a_file_that_cannot_be_read_now_is_not_called_damaged(tmp_path, monkeypatch):
    """As on a network drive that is gone for a moment; a folder in the place of a file is damage."""
    directory = committed(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(files, "sha256", Mock(side_effect=OSError(5, "Input/output error")))
        with pytest.raises(OSError, match="Input/output error"):
            files.validate(directory)
    (directory / files.MANIFEST).unlink()
    (directory / files.MANIFEST).mkdir()
    assert files.validate(directory) == f"{files.MANIFEST} cannot be read (IsADirectoryError)"


def test_the_damaged_are_set_aside_under_names_of_their_own(tmp_path):
    names = [files.quarantine(committed(tmp_path)).name for _ in range(3)]
    assert names == ["damaged-step-2", "damaged-step-2-1", "damaged-step-2-2"]


def test_files_are_counted_while_a_run_replaces_them(tmp_path):
    (tmp_path / "config.json").write_bytes(b"1234")
    replace = f"cd {tmp_path}; while :; do mkdir step; : > step/state; rm -r step; done"
    with subprocess.Popen(["sh", "-c", replace], stderr=subprocess.DEVNULL) as writer:
        try:
            assert {files.size_in_bytes(tmp_path) for _ in range(2000)} == {4}
        finally:
            writer.kill()


def test_a_lock_is_one_processs_and_dies_with_it(tmp_path):
    code = (
        "import sys; from pathlib import Path; from cifar_towers import files\n"
        f"with files.locked(Path({str(tmp_path / '.lock')!r})) as ours: print(ours, flush=True); sys.stdin.read()"
    )
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    with subprocess.Popen([sys.executable, "-c", code], **options) as holder:
        assert holder.stdout.readline() == "True\n"
        with files.locked(tmp_path / ".lock") as ours:
            assert not ours
        start = time.monotonic()
        threading.Timer(0.3, holder.kill).start()
        with files.locked(tmp_path / ".lock", wait=True) as ours:
            assert ours and time.monotonic() - start > 0.2
    with files.locked(tmp_path / ".lock") as ours:
        assert ours
    assert os.path.exists(tmp_path / ".lock")


def test_a_look_at_a_lock_neither_takes_it_nor_keeps_others_from_it(tmp_path):
    path = tmp_path / ".lock"
    assert not files.is_locked(path)
    with files.locked(path) as ours:
        assert ours and files.is_locked(path)
    assert not files.is_locked(path)
    with contextlib.ExitStack() as looking:
        file = looking.enter_context(path.open("rb"))
        fcntl.flock(file, fcntl.LOCK_SH)  # the instant in which `is_locked` looks
        threading.Timer(0.1, looking.pop_all().close).start()
        with files.locked(path) as ours:
            assert ours


@pytest.mark.parametrize("content", [b"", b"[1]", b'{"step": ', b"\xff\xfe"])
def test_damaged_json_is_one_error_that_names_the_file(tmp_path, content):
    path = tmp_path / "result.json"
    assert files.read_json_if_any(path) == {}
    with pytest.raises(DataError, match="result.json cannot be read .*No such file"):
        files.read_json(path)
    path.write_bytes(content)
    for read in (files.read_json, files.read_json_if_any):
        with pytest.raises(DataError, match="result.json cannot be read .*good copy") as caught:
            read(path)
        assert "\n" not in str(caught.value)

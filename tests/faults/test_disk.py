"""The simulated disk loses what was not synced, and nothing else; a save that forgets to sync is caught."""

import os
import random

import pytest

from cifar_towers import files
from tests.faults.disk import Disk, write_state


def states(disk, moment=None, tries=300, **options):
    """Return the states that may be left, each once."""
    moment = len(disk) if moment is None else moment
    found = [disk.lose_power(moment, random.Random(seed), **options)[0] for seed in range(tries)]
    return [state for number, state in enumerate(found) if state not in found[:number]]


def contents(*values):
    return [{"file": value} for value in values]


IN_PLACE = (b"", b"2", b"22", b"222", b"2222", b"1111", b"2111", b"2211", b"2221", b"\0\0\0\0")
CASES = {  # operations; a dictionary is what a running system sees after them, a list the states that may be left
    "not synced": (
        *(("create", "file"), ("write", "file", 0, b"ab"), {"file": b"ab"}),
        [{}, *contents(b"", b"a", b"ab", b"\0\0")],
    ),
    "name not synced": (
        *(("create", "file"), ("write", "file", 0, b"old"), ("sync", "file"), [{}, *contents(b"old")]),
        *(("sync", "."), contents(b"old")),
    ),
    "written in place": (
        *(("create", "file"), ("write", "file", 0, b"1111"), ("sync", "file"), ("sync", "."), contents(b"1111")),
        *(("truncate", "file", 0), ("write", "file", 0, b"2222"), contents(*IN_PLACE)),
        *(("sync", "file"), contents(b"2222")),
    ),
    "a shorter file": (
        *(("create", "file"), ("append", "file", b"old."), ("sync", "file"), ("sync", ".")),
        *(("truncate", "file", 0), ("append", "file", b"new"), ("sync", "file"), contents(b"new")),
    ),
    "a rename": (
        *(("create", "new"), ("write", "new", 0, b"new"), ("sync", "new")),
        *(("create", "old"), ("write", "old", 0, b"old"), ("sync", "old"), ("sync", ".")),
        *(("rename", "new", "old"), {"old": b"new"}, [{"old": b"new"}, {"new": b"new", "old": b"old"}]),
        *(("sync", "."), [{"old": b"new"}]),
    ),
    "one name, whichever renames are lost": (
        *(("mkdir", "a"), ("create", "a/one"), ("sync", "a"), ("sync", ".")),
        *(("rename", "a/one", "two"), ("rename", "two", "three")),
        [{"a": None, "a/one": b""}, {"a": None, "two": b""}, {"a": None, "three": b""}],
        ("remove", "three"),
        [{"a": None}, {"a": None, "a/one": b""}, {"a": None, "two": b""}, {"a": None, "three": b""}],
        *(("sync", "."), [{"a": None}]),
    ),
    "in a lost directory": (
        *(("mkdir", "a"), ("create", "a/file"), ("sync", "a/file"), ("sync", "a"), [{}, {"a": None, "a/file": b""}]),
        *(("remove", "a/file"), ("remove", "a"), ("sync", "."), [{}]),
    ),
    "beyond the end": (
        *(("create", "file"), ("write", "file", 2, b"a"), ("truncate", "file", 4), {"file": b"\0\0a\0"}),
    ),
}


@pytest.mark.parametrize("steps", CASES.values(), ids=CASES)
def test_power_loss_loses_what_was_not_synced(steps):
    disk = Disk()
    for step in steps:
        if isinstance(step, tuple):
            disk.do(*step)
        elif isinstance(step, dict):
            assert disk.now() == step
        else:
            assert sorted(states(disk), key=repr) == sorted(step, key=repr)


def test_moment_of_power_loss():
    disk = Disk()
    disk.do("create", "file")
    disk.do("write", "file", 0, b"ab")
    assert states(disk, moment=0) == [{}]
    assert states(disk, settled=2) == [{"file": b"ab"}]


def test_write_state(tmp_path):
    write_state({"a": None, "a/file": b"x", "b": b""}, tmp_path)
    assert (tmp_path / "a" / "file").read_bytes() == b"x"
    assert (tmp_path / "b").read_bytes() == b""


SYNCED = {  # by `files.commit`
    "its files": lambda path: path.is_file(),
    "its directory": lambda path: path.name.startswith(files.TEMPORARY),
    "its parent": lambda path: path.name == "checkpoints",
    "the parent of that": lambda path: (path / "checkpoints").exists(),
}


@pytest.mark.parametrize("forgotten", [None, *SYNCED])
def test_commit_survives_power_loss_unless_it_forgets_to_sync(tmp_path, monkeypatch, forgotten):
    root, disk = tmp_path / "run", Disk()
    root.mkdir()

    def relative(path):
        return str(path.relative_to(root))

    def add_new_files():
        for path in sorted(root.rglob("*")):
            if relative(path) not in disk.now():
                disk.do("mkdir" if path.is_dir() else "create", relative(path))
                if path.is_file():
                    disk.do("append", relative(path), path.read_bytes())

    def sync(path):
        add_new_files()
        if not (forgotten and SYNCED[forgotten](path)):
            disk.do("sync", relative(path))

    def rename(old, new, really=os.rename):
        add_new_files()
        really(old, new)
        disk.do("rename", relative(old), relative(new))

    monkeypatch.setattr(files, "sync", sync)
    monkeypatch.setattr(os, "rename", rename)
    files.commit(root / "checkpoints" / "step-1", lambda directory: (directory / "state").write_bytes(b"state"))

    good = True
    for moment in range(len(disk) + 1):
        for number, state in enumerate(states(disk, moment, tries=100)):
            left = tmp_path / f"{moment}-{number}"
            left.mkdir()
            write_state(state, left)
            step = left / "checkpoints" / "step-1"
            good &= not files.validate(step) if step.exists() else moment < len(disk)
    assert good == (forgotten is None)

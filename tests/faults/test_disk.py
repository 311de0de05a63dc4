"""The simulated disk loses what was not synced, and nothing else; a save that forgets to sync is
caught.
"""

import os
import random

import pytest

from cifar_towers import files
from tests.faults.disk import Disk


def states(disk, moment, **options):
    """Return the states that may be left, each once."""
    found = [disk.lose_power(moment, random.Random(seed), **options) for seed in range(300)]
    return [state for number, state in enumerate(found) if state not in found[:number]]


def contents(*values):
    return [{"file": value} for value in values]


IN_PLACE = (b"", b"2", b"22", b"222", b"2222", b"1111", b"2111", b"2211", b"2221", b"\0\0\0\0")
# operations; a dictionary is what a running system sees after them, a list the states that may be
# left
CASES = {
    "name not synced": (
        ("create", "file"),
        ("write", "file", 0, b"ab"),
        {"file": b"ab"},
        [{}, *contents(b"", b"a", b"ab", b"\0\0")],
        ("sync", "file"),
        [{}, *contents(b"ab")],
        ("sync", "."),
        contents(b"ab"),
    ),
    "written in place": (
        ("create", "file"),
        ("write", "file", 0, b"1111"),
        ("sync", "file"),
        ("sync", "."),
        contents(b"1111"),
        ("truncate", "file", 0),
        ("write", "file", 0, b"2222"),
        contents(*IN_PLACE),
        ("sync", "file"),
        contents(b"2222"),
    ),
    "a rename": (
        ("create", "new"),
        ("write", "new", 0, b"new"),
        ("sync", "new"),
        ("create", "old"),
        ("write", "old", 0, b"old"),
        ("sync", "old"),
        ("sync", "."),
        ("rename", "new", "old"),
        {"old": b"new"},
        [{"old": b"new"}, {"new": b"new", "old": b"old"}],
        ("sync", "."),
        [{"old": b"new"}],
    ),
    "one name, whichever renames are lost": (
        ("mkdir", "a"),
        ("create", "a/one"),
        ("sync", "a"),
        ("sync", "."),
        ("rename", "a/one", "two"),
        ("rename", "two", "three"),
        [{"a": None, "a/one": b""}, {"a": None, "two": b""}, {"a": None, "three": b""}],
        ("remove", "three"),
        [
            {"a": None},
            {"a": None, "a/one": b""},
            {"a": None, "two": b""},
            {"a": None, "three": b""},
        ],
        ("sync", "."),
        [{"a": None}],
    ),
    "in a lost directory": (
        ("mkdir", "a"),
        ("create", "a/file"),
        ("sync", "a/file"),
        ("sync", "a"),
        [{}, {"a": None, "a/file": b""}],
        ("remove", "a/file"),
        ("remove", "a"),
        ("sync", "."),
        [{}],
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
            assert sorted(states(disk, len(disk)), key=repr) == sorted(step, key=repr)

    assert states(disk, moment=0) == [{}]
    assert states(disk, len(disk), settled=len(disk)) == [disk.now()]


@pytest.mark.parametrize("forgotten", ["nothing", "the file", "its directory"])
def test_write_whole_survives_power_loss_unless_it_forgets_to_sync(
    tmp_path, monkeypatch, forgotten
):
    path = tmp_path / "file"
    disk = Disk()
    temporary = files.TEMPORARY + path.name

    def sync_file(_):
        disk.do("create", temporary)
        disk.do("write", temporary, 0, (tmp_path / temporary).read_bytes())
        if forgotten != "the file":
            disk.do("sync", temporary)

    def rename(old, new, really=os.replace):
        really(old, new)
        disk.do("rename", temporary, path.name)

    def sync_directory(_):
        if forgotten != "its directory":
            disk.do("sync", ".")

    monkeypatch.setattr(os, "fsync", sync_file)
    monkeypatch.setattr(os, "replace", rename)
    monkeypatch.setattr(files, "sync", sync_directory)

    files.write_whole(path, b"old")
    first = len(disk)
    files.write_whole(path, b"new")
    meanwhile = set()
    for moment in range(first, len(disk)):
        meanwhile |= {state.get(path.name) for state in states(disk, moment)}
    afterwards = {state.get(path.name) for state in states(disk, len(disk))}
    survives = meanwhile == {b"old", b"new"} and afterwards == {b"new"}

    assert survives == (forgotten == "nothing")

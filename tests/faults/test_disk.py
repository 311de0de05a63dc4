"""A disk that loses power loses what was not synced, and nothing else; who saves without care is caught."""

import os
import random

import pytest

from cifar_towers.files import atomic_io
from tests.faults.disk import Disk, write_state


def states(disk, moment=None, tries=300, **options):
    """What may be left, each state once."""
    moment = len(disk) if moment is None else moment
    found = [disk.lose_power(moment, random.Random(seed), **options)[0] for seed in range(tries)]
    return [state for number, state in enumerate(found) if state not in found[:number]]


def test_what_was_not_synced_may_be_there_in_part_as_zeros_or_not_at_all():
    disk = Disk()
    disk.create("file")
    disk.write("file", 0, b"ab")
    assert disk.now() == {"file": b"ab"}
    left = states(disk)
    assert all(state in left for state in ({}, *({"file": content} for content in (b"", b"a", b"ab", b"\0\0"))))
    assert len(left) == 5
    assert states(disk, moment=0) == [{}]
    assert states(disk, settled=2) == [{"file": b"ab"}]


def test_what_was_synced_is_there():
    disk = Disk()
    disk.create("file")
    disk.write("file", 0, b"old.")
    disk.sync("file")
    assert {repr(state) for state in states(disk)} == {"{}", "{'file': b'old.'}"}  # its name was not synced
    disk.sync(".")
    assert states(disk) == [{"file": b"old."}]
    disk.truncate("file")
    disk.write("file", 0, b"new")
    assert {b"old.", b"", b"new", b"new.", b"\0\0\0."} <= {state["file"] for state in states(disk)}
    disk.sync("file")
    assert states(disk) == [{"file": b"new"}]


def test_a_rename_happens_or_does_not():
    disk = Disk()
    for name in ("new", "old"):
        disk.create(name)
        disk.write(name, 0, name.encode())
        disk.sync(name)
    disk.sync(".")
    disk.rename("new", "old")
    assert disk.now() == {"old": b"new"}
    assert sorted(states(disk), key=len) == [{"old": b"new"}, {"new": b"new", "old": b"old"}]
    disk.sync(".")
    assert states(disk) == [{"old": b"new"}]


def test_a_file_has_one_name_whichever_of_its_renames_are_lost():
    disk = Disk()
    disk.mkdir("a")
    disk.create("a/one")
    disk.sync("a")
    disk.sync(".")
    disk.rename("a/one", "two")
    disk.rename("two", "three")
    assert {tuple(sorted(state)) for state in states(disk)} == {("a", "a/one"), ("a", "two"), ("a", "three")}
    disk.remove("three")
    assert all(len(state) <= 2 for state in states(disk))
    disk.sync(".")
    assert states(disk) == [{"a": None}]


def test_what_is_in_a_lost_directory_is_lost():
    disk = Disk()
    disk.mkdir("a")
    disk.create("a/file")
    disk.sync("a/file")
    disk.sync("a")
    assert sorted(states(disk), key=len) == [{}, {"a": None, "a/file": b""}]
    disk.remove("a/file")
    disk.remove("a")
    disk.sync(".")
    assert states(disk) == [{}]


def test_a_write_beyond_the_end_leaves_zeros_before_it():
    disk = Disk()
    disk.create("file")
    disk.write("file", 2, b"a")
    disk.truncate("file", 4)
    assert disk.now() == {"file": b"\0\0a\0"}


def test_a_state_can_be_laid_out(tmp_path):
    write_state({"a": None, "a/file": b"x", "b": b""}, tmp_path)
    assert (tmp_path / "a" / "file").read_bytes() == b"x"
    assert (tmp_path / "b").read_bytes() == b""


SYNCED = {  # what `storage.commit` has synced
    "its files": lambda path: path.is_file(),
    "its directory": lambda path: path.name.startswith(atomic_io.TEMPORARY),
    "its parent": lambda path: path.name == "checkpoints",
    "the parent of that": lambda path: (path / "checkpoints").exists(),
}


@pytest.mark.parametrize("forgotten", [None, *SYNCED])
def test_a_commit_survives_and_one_that_forgets_to_sync_anything_is_caught(tmp_path, monkeypatch, forgotten):
    root = tmp_path / "run"
    root.mkdir()
    disk = Disk()

    def here(path):
        return str(path.relative_to(root))

    def look():
        for path in sorted(root.rglob("*")):
            if here(path) not in disk.now() and path.is_dir():
                disk.mkdir(here(path))
            elif here(path) not in disk.now():
                disk.create(here(path))
                disk.write(here(path), 0, path.read_bytes())

    def sync(path):
        look()
        if not (forgotten and SYNCED[forgotten](path)):
            disk.sync(here(path))

    def rename(old, new, really=os.rename):
        look()
        really(old, new)
        disk.rename(here(old), here(new))

    monkeypatch.setattr(atomic_io, "sync", sync)
    monkeypatch.setattr(os, "rename", rename)
    atomic_io.commit(root / "checkpoints" / "step-1", lambda directory: (directory / "state").write_bytes(b"state"))

    good = True
    for moment in range(len(disk) + 1):
        for number, state in enumerate(states(disk, moment, tries=100)):
            left = tmp_path / f"{moment}-{number}"
            left.mkdir()
            write_state(state, left)
            step = left / "checkpoints" / "step-1"
            good &= not atomic_io.validate(step) if step.exists() else moment < len(disk)
    assert good == (forgotten is None)


def test_a_file_written_in_place_is_caught():
    disk = Disk()
    disk.create("state")
    disk.write("state", 0, b"1111")
    disk.sync("state")
    disk.sync(".")
    disk.truncate("state")
    disk.write("state", 0, b"2222")
    disk.sync("state")
    left = [state["state"] for moment in range(len(disk) + 1) for state in states(disk, moment) if state]
    assert {b"1111", b"2222", b"", b"22"} <= set(left)

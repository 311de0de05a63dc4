"""Files are replaced whole or stay as they were, whatever happens meanwhile; locks end with their
process.
"""

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cifar_towers import files
from cifar_towers.errors import DataError

ROOT = Path(__file__).parents[1]


def write_part(file):
    file.write(b"part")
    raise OSError(28, "No space left on device")


def test_a_file_is_replaced_whole_or_stays_as_it_was(tmp_path):
    path = tmp_path / "file"
    for content, expected in (
        ("one", b"one"),
        (b"two", b"two"),
        (lambda file: file.write(b"three"), b"three"),
    ):
        files.write_whole(path, content)
        assert path.read_bytes() == expected
    for content, error in (("\udc80", UnicodeEncodeError), (write_part, OSError)):
        with pytest.raises(error):
            files.write_whole(path, content)

    assert path.read_bytes() == b"three"
    assert list(tmp_path.iterdir()) == [path]


def test_death_at_every_call_of_a_save_leaves_the_old_file_or_the_new(tmp_path, monkeypatch):
    """What a process leaves that dies at a call is what is there when it makes the call."""
    path = tmp_path / "result.json"
    found = []
    files.write_whole(path, b"old")

    def dying(function):
        def call(*arguments, **options):
            found.append(path.read_bytes())
            assert all(files.belongs_to_run(each.name) for each in tmp_path.iterdir())
            return function(*arguments, **options)

        return call

    for name in ("open", "fsync", "replace", "close"):
        monkeypatch.setattr(os, name, dying(getattr(os, name)))
    files.write_whole(
        path,
        lambda file: [dying(file.write)(b"half"), file.flush(), dying(file.write)(b" and half")],
    )
    expected = [b"old"] * found.count(b"old") + [b"half and half"] * found.count(b"half and half")

    assert found == expected
    assert found.count(b"old") >= 4
    assert found.count(b"half and half") >= 2


def test_a_lock_is_one_processs_and_dies_with_it(tmp_path):
    lock = tmp_path / ".lock"
    code = (
        "import sys; from pathlib import Path; from cifar_towers import files\n"
        f"with files.locked(Path({str(lock)!r})) as ours: print(ours, flush=True); sys.stdin.read()"
    )
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    with subprocess.Popen([sys.executable, "-c", code], **options) as holder:
        assert holder.stdout.readline() == "True\n"
        with files.locked(lock) as ours:
            assert not ours
        holder.kill()
    with files.locked(lock) as ours:
        assert ours


@pytest.mark.parametrize("content", [b"", b"[1]", b'{"step": ', b"\xff\xfe"])
def test_damaged_json_is_one_error_that_names_the_file(tmp_path, content):
    path = tmp_path / "result.json"
    assert files.read_json(path) == {}
    path.write_bytes(content)
    with pytest.raises(DataError, match="result.json"):
        files.read_json(path)


def test_json_has_no_number_that_other_parsers_refuse():
    value = {"loss": math.nan, "norms": (np.float32(math.inf), np.int64(1)), "path": Path("a")}
    assert files.to_json(value) == '{"loss": null, "norms": [null, 1], "path": "a"}'


def test_best_effort_writes_warn_once_and_hide_no_other_error(tmp_path, caplog):
    best_effort = files.BestEffortWrites(tmp_path)
    for _ in range(2):
        with best_effort:
            raise OSError(28, "No space left on device")

    assert len(caplog.records) == 1
    assert str(tmp_path) in caplog.text

    with pytest.raises(ValueError, match="other"), best_effort:
        raise ValueError("other")

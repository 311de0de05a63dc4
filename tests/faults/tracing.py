"""File system calls of this process, traced by strace and replayed on a `Disk`."""

import contextlib
import os
import re
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.faults.disk import Disk

TRACED = (
    *("openat", "lseek", "write", "pwrite64", "sendfile", "ftruncate", "fsync", "fdatasync"),
    *("rename", "renameat", "renameat2", "unlink", "unlinkat", "rmdir", "mkdir", "mkdirat"),
)
DISK_CALLS = {
    **dict.fromkeys(("fsync", "fdatasync"), "sync"),
    **dict.fromkeys(("renameat", "renameat2"), "rename"),
    **dict.fromkeys(("unlink", "unlinkat", "rmdir"), "remove"),
    "mkdirat": "mkdir",
}
# a name, often after its directory; or a descriptor
_PATH = re.compile(r'(?:\w+<([^>]*)>, )?"([^"]*)"|\w+<([^>]*)>')


class Call(NamedTuple):
    """A call that changed or synced something, was about to, or was on the marker."""

    name: str
    num_operations: int  # of the disk before it
    number: int  # among the thread's calls of this name
    path: str  # relative to the directory


@contextlib.contextmanager
def strace(output: Path, *options: str) -> Iterator[None]:
    """Write the calls of TRACED names by each thread of this process to files `output.<thread>`."""
    trace = "trace=" + ",".join(f"?{name}" for name in TRACED)  # a processor may lack some of them
    command = ["strace", "-ff", "-y", "-xx", "-s", "100000000", "-o", str(output), "-e", trace]
    command += [*options, "-p", str(os.getpid())]
    tracer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    message = tracer.stderr.readline()
    if not re.search(r"Process \d+ attached", message):
        raise RuntimeError(f"strace cannot attach: {message.strip()}")
    try:
        yield
    finally:
        tracer.send_signal(signal.SIGINT)
        tracer.wait()


def replay(trace: Path, root: Path, marker: str) -> tuple[Disk, list[Call]]:
    """Repeat one thread's calls that change or sync something in `root`, which was empty, on an
    empty disk.

    Calls on `root/marker` are listed, and not repeated. A file must be open only once at a time. If
    the directory differs from the disk afterwards, raise a RuntimeError.
    """
    disk = Disk()
    calls = []
    numbers = Counter()
    positions = Counter()
    for line in trace.read_text().splitlines():
        match = re.fullmatch(r"(\w+)\((.*?)\)? *(?:= (.*))?", line)
        if not match:
            continue
        name, arguments, result = match.groups(default="?")  # `?` if it never returned
        numbers[name] += 1
        # what is written is no path
        paths = _paths(arguments.partition(",")[0] if "write" in name else arguments)
        inside = [os.path.relpath(path, root) for path in paths if Path(path).is_relative_to(root)]
        if not inside or (result.startswith("-1 ") and inside != [marker]):
            continue
        if name != "lseek" and (name != "openat" or re.search("O_CREAT|O_TRUNC", arguments)):
            calls.append(Call(name, len(disk), numbers[name], inside[0]))
        if result != "?" and inside != [marker]:
            _repeat(disk, positions, name, inside, arguments.split(", "), result)
    actual = {
        str(path.relative_to(root)): None if path.is_dir() else path.read_bytes()
        for path in root.rglob("*")
    }
    if disk.now() != actual:
        raise RuntimeError("the traced calls do not explain the content of the directory")
    return disk, calls


def _repeat(
    disk: Disk, positions: Counter, name: str, paths: list[str], arguments: list[str], result: str
) -> None:
    """Repeat a call on the disk; `positions` are those in the files, where `write` and `sendfile`
    begin.
    """
    path, *others = paths
    match name:
        case "openat":
            positions[path] = 0
            if "O_CREAT" in arguments[2] and path not in disk.now():
                disk.do("create", path)
            elif "O_TRUNC" in arguments[2]:
                disk.do("truncate", path, 0)
        case "lseek":
            positions[path] = int(result)
        case "write" | "sendfile":
            if name == "write":
                data = _bytes(arguments[1].strip('"'))
            else:
                start = int(re.match(r"\[(\d+)\]", arguments[2])[1])
                data = disk.now()[others[0]][start : start + int(result)]
            disk.do("write", path, positions[path], data)
            positions[path] += int(result)
        case "pwrite64":
            disk.do("write", path, int(arguments[3]), _bytes(arguments[1].strip('"')))
        case "ftruncate":
            disk.do("truncate", path, int(arguments[1]))
        case _:
            disk.do(DISK_CALLS.get(name, name), path, *others)


def _paths(arguments: str) -> list[str]:
    return [
        os.path.join(*map(os.fsdecode, map(_bytes, filter(None, parts))))
        for parts in _PATH.findall(arguments)
    ]


def _bytes(text: str) -> bytes:
    """Decode the hexadecimal text of `strace -xx`; the rest, such as the name of a pipe, is plain
    text.
    """
    return bytes.fromhex(text.replace("\\x", "")) if "\\x" in text else text.encode()

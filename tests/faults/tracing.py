"""File system calls of this process, traced by strace: read, and replayed on a `Disk`."""

import contextlib
import os
import re
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.faults.disk import Disk

CHANGES = (
    *("openat", "write", "pwrite64", "sendfile", "ftruncate", "fsync", "fdatasync"),
    *("rename", "renameat", "renameat2", "unlink", "unlinkat", "rmdir", "mkdir", "mkdirat"),
)
TRACED = (*CHANGES, "lseek")  # which says where the next write begins
_PATH = re.compile(r'(?:\w+<([^>]*)>, )?"([^"]*)"|\w+<([^>]*)>')  # a name, often after its directory; or a descriptor


@contextlib.contextmanager
def strace(output: Path, names: Sequence[str], *options: str) -> Iterator[None]:
    """Write the calls of these names by each thread of this process to files `output.<thread>`."""
    trace = "trace=" + ",".join(f"?{name}" for name in names)  # a processor may lack some of them
    command = ["strace", "-ff", "-o", str(output), "-e", trace, *options, "-p", str(os.getpid())]
    tracer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    message = tracer.stderr.readline()
    if not re.search(r"Process \d+ attached", message):
        raise RuntimeError(f"strace cannot attach: {message.strip()}")
    try:
        yield
    finally:
        tracer.send_signal(signal.SIGINT)
        tracer.wait()


class Call(NamedTuple):
    """A call that changes or syncs something in a directory, or fails to remove a marker there."""

    name: str
    number: int  # among the thread's calls of this name
    paths: list[str]  # relative to the directory
    arguments: list[str]  # as `strace -y -xx` writes them
    result: str  # `?` if it never returned
    position: int  # in the file, where `write` and `sendfile` begin

    def __str__(self) -> str:
        return f"{self.name} {', '.join(self.paths)}"


def read_calls(output: Path, root: Path, marker: str) -> list[Call]:
    """Return one thread's calls that change or sync something in `root`, or fail to remove `<root>/<marker>...`.

    A file must be open only once at a time.
    """
    calls, numbers, positions = [], Counter(), Counter()
    for line in output.read_text().splitlines():
        if match := re.fullmatch(r"(\w+)\((.*?)\)? *(?:= (.*))?", line):
            name, arguments, result = match.groups(default="?")
            numbers[name] += 1
            paths = _paths(arguments.partition(",")[0] if "write" in name else arguments)  # what is written is no path
            inside = [os.path.relpath(path, root) for path in paths if Path(path).is_relative_to(root)]
            marks = inside and inside[0].startswith(marker)
            if not inside or (result.startswith("-1 ") and not marks):
                continue
            file = inside[0]
            if name == "lseek":
                positions[file] = int(result)
            elif name != "openat" or re.search("O_CREAT|O_TRUNC", arguments):
                calls.append(Call(name, numbers[name], inside, arguments.split(", "), result, positions[file]))
            if name in ("write", "sendfile") and result != "?":
                positions[file] += int(result)
            elif name == "openat":
                positions[file] = 0
    return calls


def _paths(arguments: str) -> list[str]:
    return [os.path.join(*map(os.fsdecode, map(_bytes, filter(None, parts)))) for parts in _PATH.findall(arguments)]


def _bytes(text: str) -> bytes:
    """Decode the hexadecimal text of `strace -xx`; the rest, such as the name of a pipe, is plain text."""
    return bytes.fromhex(text.replace("\\x", "")) if "\\x" in text else text.encode()


def replay(calls: Sequence[Call], root: Path, marker: str) -> tuple[Disk, list[tuple[int, int]]]:
    """Repeat these calls on an empty disk.

    Returns:
      The disk; and for each marker that was not removed, the number of operations before and the number it ends with.

    Raises:
      RuntimeError: the directory differs from the disk.
    """
    disk, marks = Disk(), []
    for call in calls:
        path, *others = call.paths
        if path.startswith(marker):
            marks.append((len(disk), int(path.removeprefix(marker))))
            continue
        match call.name:
            case "openat":
                if path not in disk.now():
                    disk.do("create", path)
                elif "O_TRUNC" in call.arguments[2]:
                    disk.do("truncate", path, 0)
            case "write":
                disk.do("write", path, call.position, _bytes(call.arguments[1].strip('"')))
            case "sendfile":
                start = int(re.match(r"\[(\d+)\]", call.arguments[2])[1])
                disk.do("write", path, call.position, disk.now()[others[0]][start : start + int(call.result)])
            case "pwrite64":
                disk.do("write", path, int(call.arguments[3]), _bytes(call.arguments[1].strip('"')))
            case "ftruncate":
                disk.do("truncate", path, int(call.arguments[1]))
            case "fsync" | "fdatasync":
                disk.do("sync", path)
            case "rename" | "renameat" | "renameat2":
                disk.do("rename", path, *others)
            case "unlink" | "unlinkat" | "rmdir":
                disk.do("remove", path)
            case "mkdir" | "mkdirat":
                disk.do("mkdir", path)
    actual = {str(path.relative_to(root)): None if path.is_dir() else path.read_bytes() for path in root.rglob("*")}
    if disk.now() != actual:
        raise RuntimeError("the traced calls do not explain the content of the directory")
    return disk, marks

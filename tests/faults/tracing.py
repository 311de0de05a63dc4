"""What a child asks of the file system, by strace: read, replayed on a `Disk`, or ended by a kill at one of the calls.

A replay refuses what it does not understand; what it made of the rest is compared with the directory itself.
"""

import contextlib
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.faults.disk import Disk

CHANGES = (
    *("openat", "write", "pwrite64", "sendfile", "ftruncate", "fsync", "fdatasync"),
    *("rename", "renameat", "renameat2", "unlink", "unlinkat", "rmdir", "mkdir", "mkdirat"),
)
MARKS = ("access", "faccessat", "faccessat2")  # by which a child says how far it is
UNKNOWN = (
    *("open", "creat", "openat2", "writev", "pwritev", "pwritev2", "copy_file_range", "truncate", "fallocate"),
    *("link", "linkat", "symlink", "symlinkat", "syncfs", "sync_file_range"),
)
REPLAYED = (*CHANGES, *UNKNOWN, *MARKS, "lseek")  # what `replay` needs to see

_DESCRIPTOR = re.compile(r"(\w+)<(.*)>")  # its number and, by `-y`, its path


class Call(NamedTuple):
    """One call of one thread."""

    thread: int
    name: str
    arguments: tuple[str, ...]  # as strace writes them, all strings in hexadecimal
    result: str  # `?` if it never returned

    def failed(self) -> bool:
        """Whether it came back with an error."""
        return self.result.startswith("-1 ")

    def paths(self) -> list[str]:
        """The absolute paths it names, in words, by descriptor, or both, in order."""
        found, directory = [], ""
        for argument in self.arguments[: 1 if "write" in self.name else None]:  # what is written is no path
            if argument.startswith('"'):
                found.append(os.path.join(directory or os.getcwd(), os.fsdecode(_bytes(argument))))
                directory = ""
            elif descriptor := _DESCRIPTOR.fullmatch(argument):
                found += [directory] if directory else []
                directory = os.fsdecode(_bytes(descriptor[2]))
        return [*found, directory] if directory else found

    def changes(self, root: Path) -> bool:
        """Whether it changes, or has synced, something in a directory."""
        makes = self.name != "openat" or "O_CREAT" in self.arguments[2] or "O_TRUNC" in self.arguments[2]
        inside = any(Path(path).is_relative_to(root) for path in self.paths())
        return self.name in CHANGES and makes and inside and not self.failed()

    def told(self, root: Path) -> str:
        """In words."""
        return f"{self.name} {', '.join(os.path.relpath(path, root) for path in self.paths())}"


@contextlib.contextmanager
def traced(child: int, output: Path, names: Sequence[str], *options: str) -> Iterator[None]:
    """strace follows every thread of a child, that must end inside, and writes its calls of these names to a file."""
    trace = "trace=" + ",".join(f"?{name}" for name in names)
    command = ["strace", "-f", "-y", "-xx", "-s", "100000000", "-o", output, "-e", trace, *options, "-p", str(child)]
    strace = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        told = strace.stderr.readline()  # from here on no thread makes a call that strace does not see
        if not re.search(r"Process \d+ attached", told):
            raise RuntimeError(f"strace cannot follow the child: {told.strip()}")
        yield
        strace.wait(60)
    finally:
        strace.kill()
        strace.wait()
        strace.stderr.close()


def calls(output: Path) -> list[Call]:
    """The calls in a file of strace's, in the order in which they were made."""
    begun: dict[str, int] = {}
    lines: list[str] = []
    for line in output.read_text().splitlines():
        thread, rest = line.split(maxsplit=1)
        if resumed := re.match(r"<\.\.\. \w+ resumed>", rest):
            lines[begun.pop(thread)] += rest[resumed.end() :]
        elif not rest.startswith(("+++", "---")):
            if rest.endswith("<unfinished ...>"):
                begun[thread] = len(lines)
                line = line.removesuffix("<unfinished ...>")
            lines.append(line)
    return [_call(line) for line in lines]


def _call(line: str) -> Call:
    found = re.fullmatch(r"(\d+) +(\w+)\((.*?)\)? *(?:= (.*))?", line)
    if not found:
        raise ValueError(f"not a line of strace's: {line[:200]}")
    thread, name, arguments, result = found.groups()
    return Call(int(thread), name, tuple(part.strip() for part in arguments.split(",")), result or "?")


def replay(traced: Sequence[Call], root: Path, marker: str) -> tuple[Disk, list[tuple[int, str]]]:
    """The disk that these calls made of an empty directory; and for each `access` to `<root>/<marker>...`, how many
    operations had been done by then and what followed the marker.

    Raises:
      RuntimeError: a call did to the directory what this module does not know.
      RuntimeError: the directory is not what the calls would have made of it.
    """
    disk, marks, offsets = Disk(), [], {}
    for call in traced:
        paths = [os.path.relpath(path, root) for path in call.paths() if Path(path).is_relative_to(root)]
        if call.name in MARKS:
            marks += [(len(disk), path.removeprefix(marker)) for path in paths if path.startswith(marker)]
        elif paths and not call.failed():
            _do(disk, call, paths, offsets)
    there = {str(path.relative_to(root)): None if path.is_dir() else path.read_bytes() for path in root.rglob("*")}
    if disk.now() != there:
        raise RuntimeError("what was traced does not explain what is in the directory")
    return disk, marks


def _do(disk: Disk, call: Call, paths: Sequence[str], offsets: dict[str, int]) -> None:
    path, descriptor = paths[0], _number(call.arguments[0])
    match call.name:
        case "openat":
            flags = call.arguments[2].split("|")
            if "O_CREAT" in flags and not disk.exists(path):
                disk.create(path)
            elif "O_TRUNC" in flags:
                disk.truncate(path)
            offsets.pop(_number(call.result), None)
            if "O_WRONLY" in flags and "O_APPEND" not in flags:  # else it is not known where a plain write goes
                offsets[_number(call.result)] = 0
        case "lseek":
            if descriptor in offsets:
                offsets[descriptor] = int(call.result)
        case "write" | "sendfile":
            if call.name == "write":
                data = _bytes(call.arguments[1])
            else:  # the third argument is `[from] => [to]`
                start = int(call.arguments[2].split("]")[0].removeprefix("["))
                data = disk.content(paths[1])[start : start + int(call.result)]
            disk.write(path, offsets[descriptor], data)
            offsets[descriptor] += len(data)
        case "pwrite64":
            disk.write(path, int(call.arguments[3]), _bytes(call.arguments[1]))
        case "ftruncate":
            disk.truncate(path, int(call.arguments[1]))
        case "fsync" | "fdatasync":
            disk.sync(path)
        case "rename" | "renameat" | "renameat2":
            disk.rename(*paths)
        case "unlink" | "unlinkat" | "rmdir":
            disk.remove(path)
        case "mkdir" | "mkdirat":
            disk.mkdir(path)
        case name:
            raise RuntimeError(f"{name} in a directory that is recorded")


def _number(descriptor: str) -> str:
    found = _DESCRIPTOR.fullmatch(descriptor)
    return found[1] if found else ""


def _bytes(text: str) -> bytes:
    """What strace's `-xx` wrote; what it leaves in plain, like the name of a pipe, as it is."""
    plain = text.strip('"')
    return bytes.fromhex(plain.replace("\\x", "")) if "\\x" in plain else plain.encode()

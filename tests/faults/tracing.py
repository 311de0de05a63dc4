"""File system calls of a child, traced by strace: read, and replayed on a `Disk`.

A replay raises on calls it does not know, and its result is compared with the directory itself.
"""

import os
import re
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.faults.disk import Disk

CHANGES = (
    *("openat", "write", "pwrite64", "sendfile", "ftruncate", "fsync", "fdatasync"),
    *("rename", "renameat", "renameat2", "unlink", "unlinkat", "rmdir", "mkdir", "mkdirat"),
)
MARKS = ("access", "faccessat", "faccessat2")  # by which a child marks its progress in the trace
UNKNOWN = (
    *("open", "creat", "openat2", "writev", "pwritev", "pwritev2", "copy_file_range", "truncate", "fallocate"),
    *("link", "linkat", "symlink", "symlinkat", "syncfs", "sync_file_range"),
)
REPLAYED = (*CHANGES, *UNKNOWN, *MARKS, "lseek")  # what `replay` needs

_DESCRIPTOR = re.compile(r"(\w+)<(.*)>")  # its number and, by `-y`, its path


class Call(NamedTuple):
    """One call of one thread."""

    thread: int
    name: str
    arguments: tuple[str, ...]  # as strace writes them, all strings in hexadecimal
    result: str  # `?` if it never returned

    def failed(self) -> bool:
        """Whether it returned an error."""
        return self.result.startswith("-1 ")

    def paths(self) -> list[str]:
        """The absolute paths it names, as strings, descriptors or both, in order."""
        paths, directory = [], ""
        for argument in self.arguments[: 1 if "write" in self.name else None]:  # what is written is no path
            if argument.startswith('"'):
                paths.append(os.path.join(directory or os.getcwd(), os.fsdecode(_bytes(argument))))
                directory = ""
            elif descriptor := _DESCRIPTOR.fullmatch(argument):
                paths += [directory] if directory else []
                directory = os.fsdecode(_bytes(descriptor[2]))
        return [*paths, directory] if directory else paths

    def changes(self, root: Path) -> bool:
        """Whether it changes or syncs something in a directory."""
        modifies = self.name != "openat" or "O_CREAT" in self.arguments[2] or "O_TRUNC" in self.arguments[2]
        inside = any(Path(path).is_relative_to(root) for path in self.paths())
        return self.name in CHANGES and modifies and inside and not self.failed()

    def describe(self, root: Path) -> str:
        """Its name and paths, relative to a directory."""
        return f"{self.name} {', '.join(os.path.relpath(path, root) for path in self.paths())}"


class Strace:
    """strace on every thread of a process from `attach` to `detach`; calls of these names are written to a file."""

    def __init__(self, output: Path, names: Sequence[str], *options: str):
        trace = "trace=" + ",".join(f"?{name}" for name in names)  # a processor may lack some of them
        self._command = ["strace", "-f", "-o", str(output), "-e", trace, *options]
        self._process: subprocess.Popen | None = None

    def attach(self, pid: int) -> None:
        """Returns when all threads are traced."""
        self._process = subprocess.Popen([*self._command, "-p", str(pid)], stderr=subprocess.PIPE, text=True)
        message = self._process.stderr.readline()
        if not re.search(r"Process \d+ attached", message):
            raise RuntimeError(f"strace cannot attach: {message.strip()}")

    def wait(self) -> None:
        """Waits until the process has ended."""
        self._process.wait(60)

    def detach(self) -> None:
        """Leaves the process as it was."""
        if self._process and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait()


def read_calls(output: Path) -> list[Call]:
    """The calls in an output file of strace, in the order in which they were made."""
    unfinished: dict[str, int] = {}
    lines: list[str] = []
    for line in output.read_text().splitlines():
        thread, rest = line.split(maxsplit=1)
        if resumed := re.match(r"<\.\.\. \w+ resumed>", rest):
            lines[unfinished.pop(thread)] += rest[resumed.end() :]
        elif not rest.startswith(("+++", "---")):
            if rest.endswith("<unfinished ...>"):
                unfinished[thread] = len(lines)
                line = line.removesuffix("<unfinished ...>")
            lines.append(line)
    return [_call(line) for line in lines]


def _call(line: str) -> Call:
    match = re.fullmatch(r"(\d+) +(\w+)\((.*?)\)? *(?:= (.*))?", line)
    if not match:
        raise ValueError(f"not a line of strace: {line[:200]}")
    thread, name, arguments, result = match.groups()
    return Call(int(thread), name, tuple(part.strip() for part in arguments.split(",")), result or "?")


def replay(traced: Sequence[Call], root: Path, marker: str) -> tuple[Disk, list[tuple[int, str]]]:
    """Repeats these calls on an empty disk.

    Returns:
      The disk; and for each `access` to `<root>/<marker>...`, the number of operations before it and what follows the
      marker.

    Raises:
      RuntimeError: a call that changes the directory is unknown, or the directory differs from the disk.
    """
    disk, marks, offsets = Disk(), [], {}
    for call in traced:
        paths = [os.path.relpath(path, root) for path in call.paths() if Path(path).is_relative_to(root)]
        if call.name in MARKS:
            marks += [(len(disk), path.removeprefix(marker)) for path in paths if path.startswith(marker)]
        elif paths and not call.failed():
            _do(disk, call, paths, offsets)
    actual = {str(path.relative_to(root)): None if path.is_dir() else path.read_bytes() for path in root.rglob("*")}
    if disk.now() != actual:
        raise RuntimeError("the traced calls do not explain the content of the directory")
    return disk, marks


def _do(disk: Disk, call: Call, paths: Sequence[str], offsets: dict[str, int]) -> None:
    path, descriptor = paths[0], _number(call.arguments[0])
    match call.name:
        case "openat":
            flags = call.arguments[2].split("|")
            if "O_CREAT" in flags and path not in disk.now():
                disk.create(path)
            elif "O_TRUNC" in flags:
                disk.truncate(path)
            offsets.pop(_number(call.result), None)
            if "O_WRONLY" in flags and "O_APPEND" not in flags:  # else the offset of a plain write is unknown
                offsets[_number(call.result)] = 0
        case "lseek":
            if descriptor in offsets:
                offsets[descriptor] = int(call.result)
        case "write" | "sendfile":
            if call.name == "write":
                data = _bytes(call.arguments[1])
            else:  # its third argument is `[from] => [to]`
                start = int(call.arguments[2].split("]")[0].removeprefix("["))
                data = disk.now()[paths[1]][start : start + int(call.result)]
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
            raise RuntimeError(f"unknown call {name} in a traced directory")


def _number(descriptor: str) -> str:
    match = _DESCRIPTOR.fullmatch(descriptor)
    return match[1] if match else ""


def _bytes(text: str) -> bytes:
    """Decodes what `strace -xx` wrote in hexadecimal; the rest, such as the name of a pipe, is plain text."""
    plain = text.strip('"')
    return bytes.fromhex(plain.replace("\\x", "")) if "\\x" in plain else plain.encode()

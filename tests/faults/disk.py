"""A disk that may lose, when the power goes, whatever it was not told to sync.

It is harsher than the usual file systems: what was not synced reaches it in any order, in part, or not at all.
"""

import random
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

CHANCES = (0.0, 0.1, 0.5, 0.9, 1.0)  # of an operation to have reached the disk though nobody had it synced
ROOT = 0


class _Place(NamedTuple):
    """A file or directory comes to be here, from wherever it was; nowhere if it is removed. Never half."""

    node: int
    name: tuple[int, str] | None  # in which directory, under which name
    synced_with: frozenset[int]  # directories of which one must be synced to make it last


class _Write(NamedTuple):
    node: int
    offset: int
    data: bytes


class _Truncate(NamedTuple):
    node: int
    size: int


class _Sync(NamedTuple):
    node: int


class _Tree:
    """Names and contents, after some of the operations."""

    def __init__(self):
        self._nodes: dict[tuple[int, str], int] = {}
        self._names: dict[int, tuple[int, str]] = {}
        self._contents: defaultdict[int, bytearray] = defaultdict(bytearray)

    def node(self, path: str) -> int:
        """What is at a path relative to the root, `.` being the root itself; `KeyError` if nothing is."""
        node = ROOT
        for part in Path(path).parts:
            node = self._nodes[node, part]
        return node

    def name(self, node: int) -> tuple[int, str]:
        return self._names[node]

    def size(self, node: int) -> int:
        return len(self._contents[node])

    def do(self, operation: _Place | _Write | _Truncate | _Sync) -> None:
        """Has an operation's effect; to sync has none."""
        match operation:
            case _Place(node, name):
                if node in self._names:
                    del self._nodes[self._names.pop(node)]
                if name in self._nodes:  # what has been there is replaced
                    del self._names[self._nodes[name]]
                if name:
                    self._nodes[name], self._names[node] = node, name
            case _Write(node, offset, data) if data:
                content = self._contents[node]
                content.extend(bytes(max(0, offset - len(content))))
                content[offset : offset + len(data)] = data
            case _Truncate(node, size):
                content = self._contents[node]
                del content[size:]
                content.extend(bytes(size - len(content)))

    def files(self, directories: set[int]) -> dict[str, bytes | None]:
        """Every path that leads somewhere: the content of a file, None for a directory."""
        found = {}
        inside = defaultdict(list)
        for (directory, name), node in self._nodes.items():
            inside[directory].append((name, node))

        def walk(directory: int, path: Path) -> None:
            for name, node in sorted(inside[directory]):
                found[str(path / name)] = None if node in directories else bytes(self._contents[node])
                walk(node, path / name)

        walk(ROOT, Path())
        return found


class Disk:
    """Keeps the operations on a directory tree in order, and tells what may be left if it stops at any of them.

    Paths are relative to the root, which is there from the start, empty. A file has one name.
    """

    def __init__(self):
        self._operations: list[_Place | _Write | _Truncate | _Sync] = []
        self._told: list[str] = []
        self._now = _Tree()
        self._directories: set[int] = set()
        self._count = ROOT

    def __len__(self) -> int:
        return len(self._operations)

    def tell(self, number: int) -> str:
        """One operation in words."""
        return self._told[number]

    def create(self, path: str) -> None:
        """A new empty file."""
        self._count += 1
        self._move(self._count, None, path, f"create {path}")

    def mkdir(self, path: str) -> None:
        """A new empty directory."""
        self._count += 1
        self._directories.add(self._count)
        self._move(self._count, None, path, f"mkdir {path}")

    def rename(self, old: str, new: str) -> None:
        """Moves a file or directory; a file that is there already is replaced."""
        self._move(self._now.node(old), old, new, f"rename {old} to {new}")

    def remove(self, path: str) -> None:
        """Unlinks a file or an empty directory."""
        self._move(self._now.node(path), path, None, f"remove {path}")

    def write(self, path: str, offset: int, data: bytes) -> None:
        """Writes into a file, beyond its end if need be."""
        self._do(_Write(self._now.node(path), offset, data), f"write {len(data)} bytes to {path}")

    def truncate(self, path: str, size: int = 0) -> None:
        """Makes a file shorter, or longer by zeros."""
        self._do(_Truncate(self._now.node(path), size), f"truncate {path} to {size} bytes")

    def sync(self, path: str) -> None:
        """A file's content, or the names in a directory, last from here on; a file's name does not."""
        self._do(_Sync(self._now.node(path)), f"sync {path}")

    def exists(self, path: str) -> bool:
        """Whether there is such a file or directory now."""
        try:
            self._now.node(path)
        except KeyError:
            return False
        return True

    def content(self, path: str) -> bytes:
        """What is in a file now."""
        return self.now()[path] or b""

    def now(self) -> dict[str, bytes | None]:
        """What a running system sees: the content of each file, None for each directory."""
        return self._now.files(self._directories)

    def lose_power(self, moment: int, rng: random.Random, settled: int = 0) -> tuple[dict[str, bytes | None], str]:
        """What is left, as `now` has it, if the power goes before operation `moment`; and in words how it came about.

        What was synced is left, and the first `settled` operations, as if the system had found the time to write them.
        Every other operation has taken effect or has not, by chance, and of a write there may be only the beginning,
        or zeros.
        """
        operations = self._operations[:moment]
        synced = {operation.node: number for number, operation in enumerate(operations) if isinstance(operation, _Sync)}
        chance = {_Place: rng.choice(CHANCES), _Write: (data := rng.choice(CHANCES)), _Truncate: data}
        left, reached, loose = _Tree(), 0, 0
        for number, operation in enumerate(operations):
            if isinstance(operation, _Sync):
                continue
            needs = operation.synced_with if isinstance(operation, _Place) else {operation.node}
            lasts = number < settled or any(synced.get(node, -1) > number for node in needs)
            if lasts or rng.random() < chance[type(operation)]:
                left.do(operation)
                reached += not lasts
            elif isinstance(operation, _Write):
                left.do(operation._replace(data=_part(operation.data, rng)))
            loose += not lasts
        return left.files(self._directories), f"{reached} of {loose} operations that might not have"

    def _move(self, node: int, old: str | None, new: str | None, told: str) -> None:
        directories = frozenset(self._now.node(str(Path(path).parent)) for path in (old, new) if path)
        name = (self._now.node(str(Path(new).parent)), Path(new).name) if new else None
        self._do(_Place(node, name, directories), told)

    def _do(self, operation: _Place | _Write | _Truncate | _Sync, told: str) -> None:
        self._now.do(operation)
        self._operations.append(operation)
        self._told.append(told)


def _part(data: bytes, rng: random.Random) -> bytes:
    """What may be there of a write that was cut short."""
    cut = int(rng.random() * (len(data) + 1))  # takes as much chance whatever the length
    return rng.choice((b"", data[:cut], bytes(len(data))))


def lay_out(state: dict[str, bytes | None], directory: Path) -> None:
    """Makes a state real, in an empty directory."""
    for path, content in state.items():  # a directory comes before what is in it
        if content is None:
            (directory / path).mkdir()
        else:
            (directory / path).write_bytes(content)

"""A simulated disk that may lose everything that was not synced when the power is lost.

It is harsher than the usual file systems: what was not synced reaches it in any order, in part, or not at all.
"""

import itertools
import random
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

REACH_PROBABILITIES = (0.0, 0.1, 0.5, 0.9, 1.0)  # that an operation that was not synced has reached the disk
ROOT = 0
State = dict[str, bytes | None]  # path -> content of a file, None for a directory


class _Move(NamedTuple):
    """A file or directory is created here, moved here or removed: atomically."""

    node: int
    name: tuple[int, str] | None  # (directory, name); None if it is removed
    synced_with: frozenset[int]  # the directories of which one must be synced for it to last


class _Write(NamedTuple):
    node: int
    offset: int
    data: bytes


class _Truncate(NamedTuple):
    node: int
    size: int


class _Sync(NamedTuple):
    node: int


_Operation = _Move | _Write | _Truncate | _Sync


class _Tree:
    """Names and contents after some of the operations."""

    def __init__(self):
        self._nodes: dict[tuple[int, str], int] = {}
        self._names: dict[int, tuple[int, str]] = {}
        self._contents: defaultdict[int, bytearray] = defaultdict(bytearray)

    def node(self, path: str) -> int:
        """The node at a path relative to the root, which is `.`; `KeyError` if there is none."""
        node = ROOT
        for part in Path(path).parts:
            node = self._nodes[node, part]
        return node

    def apply(self, operation: _Operation) -> None:
        """Applies an operation; a sync changes nothing."""
        match operation:
            case _Move(node, name):
                if node in self._names:
                    del self._nodes[self._names.pop(node)]
                if name in self._nodes:  # the file that was there is replaced
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

    def state(self, directories: set[int]) -> State:
        """Everything that has a path; a directory stands before its content."""
        state: State = {}
        children = defaultdict(list)
        for (directory, name), node in self._nodes.items():
            children[directory].append((name, node))

        def walk(directory: int, path: Path) -> None:
            for name, node in sorted(children[directory]):
                state[str(path / name)] = None if node in directories else bytes(self._contents[node])
                walk(node, path / name)

        walk(ROOT, Path())
        return state


class Disk:
    """Records the operations on a directory tree, and returns what may be left if it stops at any of them.

    Paths are relative to the root, which exists from the start. A file has one name.
    """

    def __init__(self):
        self._operations: list[_Operation] = []
        self.descriptions: list[str] = []
        self._now = _Tree()
        self._directories: set[int] = set()
        self._new_nodes = itertools.count(ROOT + 1)

    def __len__(self) -> int:
        return len(self._operations)

    def create(self, path: str) -> None:
        """A new empty file."""
        self._move(next(self._new_nodes), None, path, f"create {path}")

    def mkdir(self, path: str) -> None:
        """A new empty directory."""
        node = next(self._new_nodes)
        self._directories.add(node)
        self._move(node, None, path, f"mkdir {path}")

    def rename(self, old: str, new: str) -> None:
        """Moves a file or directory; replaces a file."""
        self._move(self._now.node(old), old, new, f"rename {old} to {new}")

    def remove(self, path: str) -> None:
        """Removes a file or an empty directory."""
        self._move(self._now.node(path), path, None, f"remove {path}")

    def write(self, path: str, offset: int, data: bytes) -> None:
        """Writes into a file, also beyond its end."""
        self._do(_Write(self._now.node(path), offset, data), f"write {len(data)} bytes to {path}")

    def truncate(self, path: str, size: int = 0) -> None:
        """Shortens a file, or extends it by zeros."""
        self._do(_Truncate(self._now.node(path), size), f"truncate {path} to {size} bytes")

    def sync(self, path: str) -> None:
        """Makes a file's content, or the names in a directory, last; not the file's own name."""
        self._do(_Sync(self._now.node(path)), f"sync {path}")

    def now(self) -> State:
        """The state that a running system sees."""
        return self._now.state(self._directories)

    def lose_power(self, moment: int, rng: random.Random, settled: int = 0) -> tuple[State, str]:
        """The state that is left if the power is lost before operation `moment`, and a description.

        What was synced is left, and the first `settled` operations, as if the system had written them meanwhile. Every
        other operation is applied or not at random; of a write, only the beginning or zeros may be left.
        """
        operations = self._operations[:moment]
        synced = {operation.node: number for number, operation in enumerate(operations) if isinstance(operation, _Sync)}
        move_probability, data_probability = rng.choice(REACH_PROBABILITIES), rng.choice(REACH_PROBABILITIES)
        left, reached, unsynced = _Tree(), 0, 0
        for number, operation in enumerate(operations):
            if isinstance(operation, _Sync):
                continue
            moves = isinstance(operation, _Move)
            needs = operation.synced_with if moves else {operation.node}
            lasts = number < settled or any(synced.get(node, -1) > number for node in needs)
            if lasts or rng.random() < (move_probability if moves else data_probability):
                left.apply(operation)
                reached += not lasts
            elif isinstance(operation, _Write):
                cut = int(rng.random() * (len(operation.data) + 1))  # one draw, whatever the length
                part = rng.choice((b"", operation.data[:cut], bytes(len(operation.data))))
                left.apply(operation._replace(data=part))
            unsynced += not lasts
        return left.state(self._directories), f"{reached} of {unsynced} operations that were not synced"

    def _move(self, node: int, old: str | None, new: str | None, description: str) -> None:
        directories = frozenset(self._now.node(str(Path(path).parent)) for path in (old, new) if path)
        name = (self._now.node(str(Path(new).parent)), Path(new).name) if new else None
        self._do(_Move(node, name, directories), description)

    def _do(self, operation: _Operation, description: str) -> None:
        self._now.apply(operation)
        self._operations.append(operation)
        self.descriptions.append(description)


def write_state(state: State, directory: Path) -> None:
    """Writes a state into an empty directory."""
    for path, content in state.items():
        if content is None:
            (directory / path).mkdir()
        else:
            (directory / path).write_bytes(content)

"""A simulated disk that may lose everything that was not synced when the power is lost.

It is harsher than the usual file systems: what was not synced reaches it in any order, in part, or not at all.
"""

import random
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

REACH_PROBABILITIES = (0.0, 0.1, 0.5, 0.9, 1.0)  # that an operation that was not synced has reached the disk
State = dict[str, bytes | None]  # path -> content of a file, None for a directory


class _Node(NamedTuple):
    number: int
    is_directory: bool


class _Move(NamedTuple):
    """A file or directory is created here, moved here or removed: atomically."""

    node: _Node
    place: tuple[_Node, str] | None  # (directory, name); None if it is removed
    synced_with: set[_Node]  # the directories of which one must be synced for it to last


class _Write(NamedTuple):
    node: _Node
    offset: int
    data: bytes


class _Truncate(NamedTuple):
    node: _Node
    size: int


class _Sync(NamedTuple):
    node: _Node


_Operation = _Move | _Write | _Truncate | _Sync
_ROOT = _Node(0, True)


class _Tree:
    """Names and contents after some of the operations."""

    def __init__(self):
        self._places: dict[_Node, tuple[_Node, str]] = {}
        self.contents: defaultdict[_Node, bytearray] = defaultdict(bytearray)

    def apply(self, operation: _Operation) -> None:
        match operation:
            case _Move(node, place):  # replaces the file that was there
                self._places = {other: at for other, at in self._places.items() if other != node and at != place}
                if place:
                    self._places[node] = place
            case _Write(node, offset, data) if data:
                content = self.contents[node]
                content.extend(bytes(max(0, offset - len(content))))
                content[offset : offset + len(data)] = data
            case _Truncate(node, size):
                self.contents[node] = self.contents[node][:size].ljust(size, b"\0")

    def nodes(self, directory: _Node = _ROOT, path: Path = Path()) -> dict[str, _Node]:
        """Path -> node, of a directory and all in it; a directory stands before its content."""
        nodes = {str(path): directory}
        for node, (parent, name) in self._places.items():
            if parent == directory:
                nodes |= self.nodes(node, path / name)
        return nodes

    def state(self) -> State:
        nodes = ((path, node) for path, node in self.nodes().items() if node != _ROOT)
        return {path: None if node.is_directory else bytes(self.contents[node]) for path, node in nodes}


class Disk:
    """Records the operations on a directory tree, and returns what may be left if it stops at any of them.

    Paths are relative to the root, `.`, which exists from the start. A file has one name.
    """

    def __init__(self):
        self._operations: list[_Operation] = []
        self._now = _Tree()

    def __len__(self) -> int:
        return len(self._operations)

    def do(self, call: str, path: str, *arguments) -> None:
        """Carry out a call.

        `create` and `mkdir` make a file or directory, `rename` moves one to a new path, `remove` removes one, `write`
        writes data at an offset, `truncate` sets a file's size. `sync` makes a file's content, or the names in a
        directory, last; not the file's own name.
        """
        nodes = self._now.nodes()

        def place(path: str) -> tuple[_Node, str]:
            return nodes[str(Path(path).parent)], Path(path).name

        match call, *arguments:
            case ["create" | "mkdir"]:
                node = _Node(len(self) + 1, call == "mkdir")
                operation = _Move(node, place(path), {place(path)[0]})
            case ["rename", new]:
                operation = _Move(nodes[path], place(new), {place(path)[0], place(new)[0]})
            case ["remove"]:
                operation = _Move(nodes[path], None, {place(path)[0]})
            case ["write", offset, data]:
                operation = _Write(nodes[path], offset, data)
            case ["truncate", size]:
                operation = _Truncate(nodes[path], size)
            case ["sync"]:
                operation = _Sync(nodes[path])
        self._now.apply(operation)
        self._operations.append(operation)

    def now(self) -> State:
        """Return the state that a running system sees."""
        return self._now.state()

    def lose_power(self, moment: int, rng: random.Random, settled: int = 0) -> tuple[State, str]:
        """Return the state that is left if the power is lost before operation `moment`, and a description.

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
        return left.state(), f"{reached} of {unsynced} operations that were not synced"


def write_state(state: State, directory: Path) -> None:
    """Write a state into an empty directory."""
    for path, content in state.items():
        if content is None:
            (directory / path).mkdir()
        else:
            (directory / path).write_bytes(content)

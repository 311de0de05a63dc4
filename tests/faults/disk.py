"""A simulated disk that may lose everything that was not synced when the power is lost.

It is harsher than the usual file systems: what was not synced reaches it in any order, in part, or
not at all.
"""

import os
import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

# that an operation that was not synced has reached the disk
REACH_PROBABILITIES = (0.0, 0.1, 0.5, 0.9, 1.0)
State = dict[str, bytes | None]  # path -> content of a file, None for a directory


class _Operation(NamedTuple):
    """What a call does, atomically, to the file or directory of a number: `move`, `write`,
    `truncate` or `sync`.

    It is moved to a path, or made there; if the path is empty, it is removed.
    """

    kind: str
    number: int
    # numbers of files and directories of which one must be synced afterwards for it to last
    needs: set[int]
    path: str = ""
    offset: int = 0  # of a write, or the size of a truncated file
    data: bytes | None = b""  # None makes a directory


class Disk:
    """Records the operations on a directory tree, and returns what may be left if it stops at any
    of them.

    Paths are relative to the root, `.`, which exists from the start. A file has one name. A
    directory keeps its name.
    """

    def __init__(self):
        self._operations: list[_Operation] = []
        self._numbers = {".": 0}  # by path, of what exists now

    def __len__(self) -> int:
        return len(self._operations)

    def do(self, call: str, path: str, *arguments) -> None:
        """Carry out a call.

        `create` and `mkdir` make a file or directory, `rename` moves a file to a new path, `remove`
        removes something, `write` writes data at an offset, `truncate` sets a file's size. `sync`
        makes a file's content, or the names in a directory, last; not the file's own name.
        """
        parent = self._numbers[os.path.dirname(path) or "."]
        number = self._numbers.pop(path, len(self) + 1)
        if call in ("create", "mkdir"):
            operation = _Operation(
                "move", number, {parent}, path, data=b"" if call == "create" else None
            )
        elif call == "rename":
            path = arguments[0]
            operation = _Operation(
                "move", number, {parent, self._numbers[os.path.dirname(path) or "."]}, path
            )
        elif call == "remove":
            operation = _Operation("move", number, {parent})
        else:
            operation = _Operation(call, number, {number}, path, *arguments)
        if call != "remove":
            self._numbers[path] = number
        self._operations.append(operation)

    def now(self) -> State:
        """Return the state that a running system sees."""
        return _state(self._operations)

    def lose_power(self, moment: int, rng: random.Random, settled: int = 0) -> State:
        """Return the state that is left if the power is lost before operation `moment`.

        What was synced is left, and the first `settled` operations, as if the system had written
        them meanwhile. Every other operation is applied or not at random; of a write, only the
        beginning or zeros may be left.
        """
        operations = self._operations[:moment]
        left = []
        synced = {
            operation.number: index
            for index, operation in enumerate(operations)
            if operation.kind == "sync"
        }
        move_probability = rng.choice(REACH_PROBABILITIES)
        data_probability = rng.choice(REACH_PROBABILITIES)
        for index, operation in enumerate(operations):
            kind = operation.kind
            data = operation.data
            lasts = index < settled or any(
                synced.get(number, -1) > index for number in operation.needs
            )
            if lasts or rng.random() < (move_probability if kind == "move" else data_probability):
                left.append(operation)
            elif kind == "write":
                cut = int(rng.random() * (len(data) + 1))  # one draw, whatever the length
                left.append(
                    operation._replace(data=rng.choice((b"", data[:cut], bytes(len(data)))))
                )
        return _state(left)


def _state(operations: Sequence[_Operation]) -> State:
    """Return the names and contents after some operations; what is in no directory is lost."""
    paths = {}
    contents = defaultdict(bytearray)
    for kind, number, _, path, offset, data in operations:
        content = contents[number]
        if kind == "move":  # replaces the file that was there
            paths = {other: at for other, at in paths.items() if other != number and at != path}
            if path:
                paths[number] = path
            if data is None:
                contents[number] = None
        elif kind == "truncate":
            content[offset:] = bytes(max(0, offset - len(content)))
        elif kind == "write" and data:
            content.extend(bytes(max(0, offset - len(content))))
            content[offset : offset + len(data)] = data
    state = {}
    for path, number in sorted((path, number) for number, path in paths.items()):
        if os.path.dirname(path) in ("", *state):
            state[path] = None if contents[number] is None else bytes(contents[number])
    return state


def write_state(state: State, directory: Path) -> None:
    """Write a state into an empty directory."""
    for path, content in state.items():
        if content is None:
            (directory / path).mkdir()
        else:
            (directory / path).write_bytes(content)

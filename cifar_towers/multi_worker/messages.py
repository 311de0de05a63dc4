"""What travels between the workers outside the graph: JSON and arrays, nothing that could be executed."""

import json
import socket
import struct
from typing import Any

import numpy as np

MOST = 2**34  # bytes of a message
_CHUNK = 2**20
_HEAD = struct.Struct("!cQ")  # kind, length


def send(connection: socket.socket, kind: bytes, value: Any = None) -> None:
    """Sends one message: what it is, in one byte, and a value.

    Raises:
      OSError: the other end is gone, or does not take it within the connection's timeout.
    """
    content = pack(value)
    message = memoryview(_HEAD.pack(kind, len(content)) + content)
    for start in range(0, len(message), _CHUNK):  # the timeout is for each
        connection.sendall(message[start : start + _CHUNK])


def receive(connection: socket.socket, most: int = MOST) -> tuple[bytes, Any]:
    """The next message, of at most so many bytes: (kind, value).

    Raises:
      OSError: nothing comes within the connection's timeout, or the connection has ended.
      ValueError: it is no message.
    """
    kind, length = _HEAD.unpack(_read(connection, _HEAD.size))
    if length > most:
        raise ValueError(f"a message of {length} bytes is none of ours")
    return kind, unpack(_read(connection, length))


def pack(value: Any) -> bytes:
    """Numbers, texts, lists, dicts and arrays, one within another, as bytes. A tuple becomes a list."""
    arrays: list[np.ndarray] = []

    def other(thing):
        if isinstance(thing, np.ndarray) and not thing.dtype.hasobject:
            arrays.append(np.ascontiguousarray(thing))
            return {"__array__": [thing.dtype.name, list(thing.shape)]}
        if isinstance(thing, np.generic):
            return thing.item()
        raise TypeError(f"{type(thing).__name__} cannot be sent")

    text = json.dumps(value, default=other).encode()
    return b"".join([struct.pack("!Q", len(text)), text, *(array.tobytes() for array in arrays)])


def unpack(content: bytes) -> Any:
    """What `pack` was given.

    Raises:
      ValueError: `pack` did not make these bytes.
    """
    try:
        (length,) = struct.unpack_from("!Q", content)
        place = 8 + length

        def array(thing: dict):
            nonlocal place
            if "__array__" not in thing:
                return thing
            name, shape = thing["__array__"]
            count = int(np.prod(shape, dtype=np.int64))
            found = np.frombuffer(content, np.dtype(name), count, place).reshape(shape)
            place += found.nbytes
            return found

        value = json.loads(content[8:place], object_hook=array)
    except (struct.error, TypeError, KeyError) as error:
        raise ValueError(f"not one of our messages: {error}") from error
    if place != len(content):
        raise ValueError(f"not one of our messages: {len(content) - place} bytes more than it says")
    return value


def _read(connection: socket.socket, length: int) -> bytes:
    parts, missing = [], length
    while missing:
        part = connection.recv(min(missing, _CHUNK))
        if not part:
            raise ConnectionError("its connection has ended")
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)

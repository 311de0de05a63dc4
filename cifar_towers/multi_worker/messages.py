"""Messages between workers: JSON and arrays, nothing that could be executed."""

import json
import socket
import struct
from typing import Any

import numpy as np

MAX_BYTES = 2**34  # of a message
_CHUNK = 2**20
_HEAD = struct.Struct("!cQ")  # kind, length


def send(connection: socket.socket, kind: bytes, value: Any = None) -> None:
    """Sends a message: its kind, one byte, and a value.

    Raises:
      OSError: the other end has closed, or does not read within the connection's timeout.
    """
    content = pack(value)
    message = memoryview(_HEAD.pack(kind, len(content)) + content)
    for start in range(0, len(message), _CHUNK):  # each has the timeout
        connection.sendall(message[start : start + _CHUNK])


def receive(connection: socket.socket, max_bytes: int = MAX_BYTES) -> tuple[bytes, Any]:
    """The next message as (kind, value).

    Raises:
      OSError: nothing arrives within the connection's timeout, or the connection has closed.
      ValueError: the bytes are no message, or more than `max_bytes`.
    """
    kind, length = _HEAD.unpack(_read(connection, _HEAD.size))
    if length > max_bytes:
        raise ValueError(f"a message of {length} bytes is too long")
    return kind, unpack(_read(connection, length))


def pack(value: Any) -> bytes:
    """Nested numbers, strings, lists, dicts and arrays as bytes. A tuple becomes a list."""
    arrays: list[np.ndarray] = []

    def encode(item):
        if isinstance(item, np.ndarray) and not item.dtype.hasobject:
            arrays.append(np.ascontiguousarray(item))
            return {"__array__": [item.dtype.name, list(item.shape)]}
        if isinstance(item, np.generic):
            return item.item()
        raise TypeError(f"{type(item).__name__} cannot be sent")

    text = json.dumps(value, default=encode).encode()
    return b"".join([struct.pack("!Q", len(text)), text, *(array.tobytes() for array in arrays)])


def unpack(content: bytes) -> Any:
    """The value that `pack` packed.

    Raises:
      ValueError: the bytes are not from `pack`.
    """
    try:
        (length,) = struct.unpack_from("!Q", content)
        offset = 8 + length

        def decode(item: dict):
            nonlocal offset
            if "__array__" not in item:
                return item
            name, shape = item["__array__"]
            count = int(np.prod(shape, dtype=np.int64))
            array = np.frombuffer(content, np.dtype(name), count, offset).reshape(shape)
            offset += array.nbytes
            return array

        value = json.loads(content[8:offset], object_hook=decode)
    except (struct.error, TypeError, KeyError) as error:
        raise ValueError(f"not a packed value: {error}") from error
    if offset != len(content):
        raise ValueError(f"not a packed value: {len(content) - offset} bytes left over")
    return value


def _read(connection: socket.socket, length: int) -> bytes:
    parts, missing = [], length
    while missing:
        part = connection.recv(min(missing, _CHUNK))
        if not part:
            raise ConnectionError("its connection has closed")
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)

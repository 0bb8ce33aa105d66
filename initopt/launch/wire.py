"""What the agent and the process that forks say to each other: JSON and open files over a socket."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Sequence
from typing import Any

_LENGTH = struct.Struct("!I")
_MOST_FILES = 8


def send(connection: socket.socket, message: Any, files: Sequence[int] = ()) -> None:
    """Send a message and the files with these numbers. Raises OSError, BrokenPipeError where nobody is there."""
    text = json.dumps(message).encode(errors="surrogateescape")
    head = _LENGTH.pack(len(text))
    if files:
        socket.send_fds(connection, [head], list(files))
        connection.sendall(text)
    else:
        connection.sendall(head + text)


def receive(connection: socket.socket) -> tuple[Any, list[int]] | None:
    """The next message and its files, None when the other side is gone. Waits for it."""
    try:
        head, files, _, _ = socket.recv_fds(connection, _LENGTH.size, _MOST_FILES)
        head += _exactly(connection, _LENGTH.size - len(head))
        text = _exactly(connection, _LENGTH.unpack(head)[0])
    except (EOFError, ConnectionError):
        return None
    return json.loads(text), files


def _exactly(connection: socket.socket, count: int) -> bytes:
    parts = []
    while count:
        part = connection.recv(count)
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)

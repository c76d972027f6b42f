"""Exchange messages between the two sides of a sandbox; a message is a JSON object followed by byte strings."""

import json
import socket
import struct
from collections.abc import Mapping
from typing import Any

_LENGTH = struct.Struct("!I")


class Closed(ConnectionError):  # noqa: N818 - the other side is gone, which is how every conversation ends
    """The error of a connection that the other side closed, between or within messages."""


def send(connection: socket.socket, header: Mapping[str, Any], *blobs: bytes) -> None:
    """Send one message; ConnectionError if nobody reads it."""
    text = json.dumps({**header, "blobs": [len(blob) for blob in blobs]}).encode()
    connection.sendall(b"".join([_LENGTH.pack(len(text)), text, *blobs]))


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[bytes]]:
    """Receive the next message; raise Closed at its end, or TimeoutError if no byte arrives within its timeout."""
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    header = json.loads(_exactly(connection, length))
    return header, [_exactly(connection, size) for size in header.pop("blobs")]


def _exactly(connection: socket.socket, size: int) -> bytes:
    received = bytearray()
    while len(received) < size:
        chunk = connection.recv(min(size - len(received), 1 << 20))
        if not chunk:
            raise Closed("the connection was closed")
        received += chunk
    return bytes(received)

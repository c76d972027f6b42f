"""Exchange messages between a program and its test code, each in a process of its own, over two pipes."""

import json
import os
import struct
from collections.abc import Mapping
from typing import Any

_LENGTH = struct.Struct("!I")


class Channel:
    """The end of a pair of pipes. Messages are JSON, of at most `limit` bytes when received."""

    def __init__(self, reader: int, writer: int, *, limit: int) -> None:
        self._reader, self._writer, self._limit = reader, writer, limit

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message; BrokenPipeError if nobody reads it."""
        text = json.dumps(message).encode()
        left = memoryview(_LENGTH.pack(len(text)) + text)
        while left:
            left = left[os.write(self._writer, left) :]

    def receive(self) -> dict[str, Any]:
        """Wait for the next message. EOFError at the end of the other side, ValueError for anything but a message."""
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if length > self._limit:
            raise ValueError(f"got a message of {length} bytes, expected at most {self._limit}")
        message = json.loads(self._exactly(length))
        if not isinstance(message, dict):
            raise ValueError(f"got {type(message).__name__}, expected an object")
        return message

    def _exactly(self, size: int) -> bytes:
        received = bytearray()
        while len(received) < size:
            chunk = os.read(self._reader, size - len(received))
            if not chunk:
                raise EOFError("the other side has ended")
            received += chunk
        return bytes(received)

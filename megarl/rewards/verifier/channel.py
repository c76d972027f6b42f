"""Messages over a stream socket: four bytes of length, then the message."""

import socket
import struct

_LENGTH = struct.Struct("!I")
_READ_BYTES = 1 << 16
# Of a worker's reply. A longer one is no reply of ours.
MAX_REPLY_BYTES = 1 << 20


def write_message(connection: socket.socket, message: bytes) -> None:
    """Waits until the other side has room."""
    connection.sendall(_LENGTH.pack(len(message)) + message)


def read_message(connection: socket.socket) -> bytes | None:
    """Waits for a message; None if the other side is gone."""
    header = _read(connection, _LENGTH.size)
    return None if header is None else _read(connection, _LENGTH.unpack(header)[0])


def _read(connection: socket.socket, num_bytes: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < num_bytes:
        part = connection.recv(min(_READ_BYTES, num_bytes - len(parts)))
        if not part:
            return None
        parts += part
    return bytes(parts)


class Channel:
    """The side that never waits, whatever the other side does."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._arrived, self._unsent = bytearray(), bytearray()

    def fileno(self) -> int:
        return self._connection.fileno()

    def close(self) -> None:
        self._connection.close()

    def read_files(self) -> list[int]:
        """Reads a byte, and gives the file descriptors that came with it: none at the end of the stream."""
        try:
            return socket.recv_fds(self._connection, 1, 1)[1]
        except ConnectionError:
            return []

    def send(self, message: bytes) -> None:
        """What the socket has no room for now is sent by `flush`; OSError if the other side is gone."""
        self._unsent += _LENGTH.pack(len(message)) + message
        self.flush()

    def flush(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._connection.send(self._unsent)]
        except BlockingIOError:
            return

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def receive(self) -> list[bytes]:
        """The messages that are complete by now; EOFError if there is none and none can come."""
        ended = self._fill()
        messages = []
        while len(self._arrived) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._arrived)
            if length > MAX_REPLY_BYTES:
                raise EOFError(f"a reply of {length} bytes, expected at most {MAX_REPLY_BYTES}")
            end = _LENGTH.size + length
            if len(self._arrived) < end:
                break
            messages.append(bytes(self._arrived[_LENGTH.size : end]))
            del self._arrived[:end]
        if ended and not messages:
            raise EOFError("the worker process ended")
        return messages

    def _fill(self) -> bool:
        """Takes in what has arrived; says whether the stream has ended."""
        try:
            while len(self._arrived) <= MAX_REPLY_BYTES + _LENGTH.size:
                part = self._connection.recv(_READ_BYTES)
                if not part:
                    return True
                self._arrived += part
        except BlockingIOError:
            return False
        except ConnectionError:
            return True
        return False

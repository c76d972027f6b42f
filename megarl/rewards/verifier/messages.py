"""Exchange messages between a pool and its workers over stream sockets; each message follows its length in 4 bytes."""

import json
import socket
import struct
from dataclasses import dataclass
from typing import get_args

from megarl.errors import ConfigError, DataError, NonFiniteError, RunError
from megarl.rewards.question import Verdict
from megarl.rewards.verifier.types import JobOutcome
from megarl.types import Reward

_LENGTH = struct.Struct("!I")
_READ_BYTES = 1 << 16
# A longer message cannot be a reply of a worker.
MAX_REPLY_BYTES = 1 << 20
# Errors of the pool's user rather than of a response: they are raised where the result is requested.
ERRORS: dict[str, type[Exception]] = {
    error.__name__: error for error in (ConfigError, DataError, NonFiniteError, RunError)
}
# A worker sends READY once, with its process's file descriptor, and STARTED before the first job of a scorer, when
# that is imported.
READY = b"R"
STARTED = b""


def write_message(connection: socket.socket, message: bytes) -> None:
    """Send a message, and wait until the receiver's socket has accepted all of it."""
    connection.sendall(_LENGTH.pack(len(message)) + message)


def read_message(connection: socket.socket) -> bytes | None:
    """Wait for a message and return it, or None if the other process has closed the connection."""
    arrived, num_bytes = bytearray(), _LENGTH.size
    while len(arrived) < num_bytes:
        part = connection.recv(min(_READ_BYTES, num_bytes - len(arrived)))
        if not part:
            return None
        arrived += part
        if len(arrived) == _LENGTH.size:
            num_bytes += _LENGTH.unpack(arrived)[0]
    return bytes(arrived[_LENGTH.size :])


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReply:
    """A worker's answer to a job.

    It is sent as JSON, not as a pickle, because workers process untrusted text from models.

    `error` names one of `ERRORS`; without one, `outcome` and, if the scorer gave them, `reward` or `verdicts` are set.
    is_last: the worker must get no other job.
    """

    outcome: JobOutcome = "crashed"
    reward: Reward | None = None
    verdicts: tuple[Verdict, ...] = ()
    error: str = ""
    reason: str = ""
    resident_mib: float = 0.0
    is_last: bool = False

    @classmethod
    def decode(cls, message: bytes) -> "WorkerReply":
        """Decode a reply from JSON; raise ValueError if the message is malformed."""
        try:
            fields = json.loads(message)
            reward = fields.pop("reward")
            verdicts = tuple(map(Verdict.from_json, fields.pop("verdicts", ())))
            reply = cls(reward=None if reward is None else Reward.from_json(reward), verdicts=verdicts, **fields)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"the worker process sent what is not a reply: {message[:80]!r}") from error
        if reply.outcome not in get_args(JobOutcome) or reply.error not in ("", *ERRORS):
            raise ValueError(f"the worker process replied {reply.outcome!r}, {reply.error!r}")
        return reply


class WorkerChannel:
    """The pool's end of the connection to a worker. Its methods never wait, whatever the worker does."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.unsent, self._arrived = bytearray(), bytearray()

    def send(self, message: bytes) -> None:
        """Append a message to the queue that `flush` sends."""
        self.unsent += _LENGTH.pack(len(message)) + message

    def flush(self) -> None:
        """Send as much of the queue as the socket accepts without waiting; OSError if the worker has ended."""
        try:
            while self.unsent:
                del self.unsent[: self.connection.send(self.unsent)]
        except BlockingIOError:
            return

    def receive(self) -> list[bytes]:
        """Return the messages that have arrived completely; EOFError if there are none and the worker has ended."""
        has_ended, messages = False, []
        try:
            while len(self._arrived) <= MAX_REPLY_BYTES + _LENGTH.size and not has_ended:
                part = self.connection.recv(_READ_BYTES)
                self._arrived += part
                has_ended = not part
        except BlockingIOError:
            has_ended = False
        except ConnectionError:
            has_ended = True
        while len(self._arrived) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._arrived)
            if length > MAX_REPLY_BYTES:
                raise EOFError(f"a reply of {length} bytes, expected at most {MAX_REPLY_BYTES}")
            end = _LENGTH.size + length
            if len(self._arrived) < end:
                break
            messages.append(bytes(self._arrived[_LENGTH.size : end]))
            del self._arrived[:end]
        if has_ended and not messages:
            raise EOFError("the worker process ended")
        return messages

"""Define the jobs, results and options of a verifier pool, and exchange messages between it and its workers over stream
sockets; each message follows its length in 4 bytes.
"""

import json
import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from megarl.errors import ConfigError, DataError, NonFiniteError, RunError
from megarl.rewards.question import Verdict
from megarl.types import Reward

JobOutcome: TypeAlias = Literal["scored", "parse_failed", "timed_out", "crashed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierOptions:
    """The number of workers of a pool, and the limits of a job.

    num_workers: how many jobs are executed at a time.
    num_spares: further workers that are started in advance, each to replace a worker that ends.
    soft_limit_s: CPU time after which a worker interrupts its job.
    deadline_s: time after which the worker of a job is killed, counted from the start of the job's execution. After
        either limit the job has timed out, and the worker is replaced.
    memory_limit_mib: how much a worker's address space may grow after its start.
    recycle_mib: a worker whose resident memory exceeds this after a job is replaced.
    max_response_chars: of a longer response, a scorer gets only this many characters from the end.
    start_limit_s: time limit of a worker's start, and of the import of a scorer that was not preloaded.
    preload: modules that are imported once, before any worker exists: "module", or "module:function" to also call the
        function, without arguments. Modules that start threads cannot be preloaded.
    pass_env: environment variables that workers get besides those of `child_environment`.
    """

    num_workers: int = field(default_factory=lambda: min(8, len(os.sched_getaffinity(0))))
    num_spares: int = 1
    soft_limit_s: float = 1.0
    deadline_s: float = 3.0
    memory_limit_mib: int = 1024
    recycle_mib: int = 384
    max_response_chars: int = 262_144
    start_limit_s: float = 120.0
    preload: tuple[str, ...] = ("math_verify",)
    pass_env: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        least = {"num_workers": 1, "num_spares": 0, "memory_limit_mib": 64, "recycle_mib": 1, "max_response_chars": 1}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ValueError(f"verifier {name} is {getattr(self, name)}, expected at least {bound}")
        if not 0 < self.soft_limit_s < self.deadline_s < self.start_limit_s:
            raise ValueError(
                f"verifier soft_limit_s is {self.soft_limit_s}, deadline_s {self.deadline_s}, start_limit_s "
                f"{self.start_limit_s}; expected 0 < soft_limit_s < deadline_s < start_limit_s"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierJob:
    """A response to be judged by the scorer call `function(response, ground_truth, extra_info, **arguments)`.

    `function` is "module:function" or "path/file.py:function"; workers import it, so a new scorer needs no change of
    the pool. It returns a `Reward` or `Verdict`s, and may raise `DataError` for a malformed ground truth. Its arguments
    must be picklable. `data_source` is for messages. `deadline_s` replaces that of the pool's options.
    """

    data_source: str
    response: str
    ground_truth: str
    function: str
    extra_info: Mapping[str, object] = field(default_factory=dict)
    arguments: Mapping[str, object] = field(default_factory=dict)
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """The result of a job, and the seconds that its execution took.

    `reward` is the scorer's reward if the outcome is "scored" (right or wrong: `reward.correct`) or "parse_failed" (its
    detail `parse_failed` is not 0), and `verdicts` are those of a function that was asked about several rows. If there
    is neither, `reason` says why in one line.
    """

    reward: Reward | None
    outcome: JobOutcome
    seconds: float
    reason: str = ""
    verdicts: tuple[Verdict, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierStatistics:
    """Counts of results since the pool was made. `wrong` counts responses that were judged and found incorrect."""

    jobs: int = 0
    correct: int = 0
    wrong: int = 0
    parse_failed: int = 0
    timed_out: int = 0
    crashed: int = 0
    # Number of responses of which a scorer saw only the end.
    shortened: int = 0
    # Number of workers that were replaced.
    replaced: int = 0
    # Execution time, summed over jobs, and of the longest job.
    seconds: float = 0.0
    max_seconds: float = 0.0


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

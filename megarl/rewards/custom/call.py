"""Call a user's function in a worker process, with the standard streams of an ordinary program, so that what it raises,
prints or returns cannot harm the run.
"""

import asyncio
import fcntl
import inspect
import json
import math
import os
import select
import sys
import threading
import traceback
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from io import TextIOWrapper
from pathlib import Path
from typing import TypeAlias

from megarl.host.user_code import line_of
from megarl.rewards.custom.signatures import (
    BadResultError,
    RewardFunction,
    Signature,
    first_line,
    load_function,
    signature_of,
)
from megarl.rewards.question import Question, Verdict
from megarl.rewards.scorers import PARSE_FAILED
from megarl.rewards.verifier.worker import SoftLimit, retire
from megarl.types import Reward

# The text of a call is kept from its end.
MAX_OUTPUT_CHARS = 4_000
# No character of UTF-8 is longer than 4 bytes.
_MAX_BYTES = 4 * MAX_OUTPUT_CHARS
_READ_BYTES = 1 << 16
# C code that writes more than this, without letting other threads of Python run, would wait for ever.
_PIPE_BYTES = 1 << 20
# Users' code may close or replace the standard streams, but hardly a descriptor this high.
_LOWEST_FD = 100
_DUP = fcntl.F_DUPFD_CLOEXEC


class Output:
    """Standard streams for this process: file descriptors 1 and 2 are a pipe, and 0 is empty.

    A thread empties the pipe, so that neither this process nor one that it starts ever waits to write.
    """

    def __init__(self) -> None:
        read, write = os.pipe()
        fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        os.set_blocking(read, False)
        null = os.open(os.devnull, os.O_RDONLY)
        self._read, self._write, self._null = (fcntl.fcntl(fd, _DUP, _LOWEST_FD) for fd in (read, write, null))
        for fd in (read, write, null):
            os.close(fd)
        self._tail, self._lock = bytearray(), threading.Lock()
        self._streams: tuple[TextIOWrapper, ...] = ()
        threading.Thread(target=self._drain, name="output", daemon=True).start()

    @contextmanager
    def taken(self) -> Iterator[list[str]]:
        """Hold the standard streams during a call. The list then has the end of what was written to them, also by
        processes that the call has started.
        """
        self._take()
        self._tail.clear()
        written = list[str]()
        before, saved = (sys.stdin, sys.stdout, sys.stderr), [fcntl.fcntl(fd, _DUP, _LOWEST_FD) for fd in range(3)]
        for fd, source in enumerate((self._null, self._write, self._write)):
            os.dup2(source, fd)
        # The first call opens them, as streams remember whether they can seek; an earlier call may have closed them.
        if not self._streams or any(stream.closed for stream in self._streams):
            reopened = partial(os.fdopen, encoding="utf-8", closefd=False)
            self._streams = reopened(0), reopened(1, "w", 1), reopened(2, "w", 1)
        for stream in self._streams[1:]:
            # In the encoding that an earlier call may have changed; what it cannot hold is written with backslashes.
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
        sys.stdin, sys.stdout, sys.stderr = self._streams
        try:
            yield written
        finally:
            for stream in self._streams[1:]:
                if not stream.closed:
                    stream.flush()
            for fd, source in enumerate(saved):
                os.dup2(source, fd)
                os.close(source)
            sys.stdin, sys.stdout, sys.stderr = before
            self._take()
            written.append(self._tail.decode("utf-8", "replace")[-MAX_OUTPUT_CHARS:])

    def _drain(self) -> None:
        # Not `select`, which refuses the descriptors above 1023 that a busy process opens.
        written = select.poll()
        written.register(self._read, select.POLLIN)
        while True:
            written.poll()
            self._take()

    def _take(self) -> None:
        """Read what the pipe holds."""
        with self._lock:
            try:
                while part := os.read(self._read, _READ_BYTES):
                    self._tail += part
                    del self._tail[:-_MAX_BYTES]
            except BlockingIOError:
                return


@cache
def output() -> Output:
    """Return the streams that this process holds for its calls; the first call makes them."""
    return Output()


MAX_REASON_CHARS = 500
# Bound on the notes of all rows of a call together: a worker's reply may not exceed a mebibyte.
_MAX_NOTES_CHARS = 400_000
# How often calls that are under way are looked at.
_SLICE_S = 0.1
# The value that a call returned, or the exception that it raised, and its arguments.
_Called: TypeAlias = tuple[object, Mapping[str, object]]


def call_function(
    response: str,
    ground_truth: str,
    extra_info: Mapping[str, object],
    *,
    rows: Sequence[Question],
    path: str,
    name: str,
    arguments: Mapping[str, object],
    together: bool,
    limit_s: float = math.inf,
) -> list[Verdict]:
    """Ask a function of a user's file about `rows`, and return its verdicts on them.

    Workers of the verifier pool import this function by name. Its first three arguments are those that every scorer
    has; they are empty. together: call the function once with lists of all rows, rather than once for each row. Calls
    of an `async def` proceed at the same time, each for at most `limit_s`.
    """
    file = Path(path)
    function = load_function(file, name)
    signature = signature_of(function, file, arguments)
    calls = [rows] if together and signature.takes_rows else [[row] for row in rows]
    with output().taken() as printed:
        results = _results(signature, function, calls, arguments, limit_s)
    verdicts = []
    for call, (result, given) in zip(calls, results, strict=True):
        verdicts += _verdicts(signature, result, given, len(call), printed[0], where=(file, function))
    num_notes = sum(len(each.reward.notes) for each in verdicts if each.reward is not None)
    limit = _MAX_NOTES_CHARS // max(num_notes, 1)
    return [_bounded(each, limit) for each in verdicts]


class _LateError(Exception):
    """The result of a call that took longer than it may."""


def _results(
    signature: Signature,
    function: RewardFunction,
    calls: Sequence[Sequence[Question]],
    arguments: Mapping[str, object],
    limit_s: float,
) -> list[_Called]:
    """Call the function for each list of questions, concurrently if it is a coroutine function."""

    def call(rows: Sequence[Question]) -> _Called:
        given: Mapping[str, object] = {}
        try:
            given = signature.bind(function, rows, arguments)
            return function(**given), given
        except SoftLimit:
            raise
        except BaseException as error:  # the user's code may raise anything, and exit
            return error, given

    if not is_async(function):
        return [call(rows) for rows in calls]

    async def one(rows: Sequence[Question]) -> _Called:
        pending, given = call(rows)
        try:
            return await pending if inspect.isawaitable(pending) else pending, given
        except SoftLimit:
            raise
        except BaseException as error:
            return error, given

    # asyncio.run would wait for whatever a function leaves behind.
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    results, is_clean = loop.run_until_complete(_in_time([one(rows) for rows in calls], limit_s))
    asyncio.set_event_loop(None)
    if is_clean:
        loop.close()
    else:
        retire()
    return results


async def _in_time(calls: Sequence[Coroutine[object, object, _Called]], limit_s: float) -> tuple[list[_Called], bool]:
    """Return the results of the calls, or _LateError of those that take longer than `limit_s`, and whether all that
    they started has ended.

    Time in which one call keeps the loop to itself is not the others'.
    """
    tasks = [asyncio.ensure_future(call) for call in calls]
    pending, left_s = set(tasks), limit_s
    while pending and left_s > 0:
        _, pending = await asyncio.wait(pending, timeout=min(_SLICE_S, left_s))
        left_s -= _SLICE_S
    late = _LateError(f"no answer within {limit_s} s"), dict[str, object]()
    results = [late if task in pending else task.result() for task in tasks]
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    if left:
        # A coroutine may go on in spite of that.
        _, left = await asyncio.wait(left, timeout=_SLICE_S)
    return results, not left and not pending


def is_async(function: RewardFunction) -> bool:
    """Return whether a function, or an object's method `__call__`, was defined by `async def`."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _verdicts(
    signature: Signature,
    result: object,
    given: Mapping[str, object],
    num_rows: int,
    printed: str,
    *,
    where: tuple[Path, RewardFunction],
) -> list[Verdict]:
    (path, function), outcome = where, "failed"
    if isinstance(result, _LateError):
        outcome, reason = "timed_out", str(result)
    elif isinstance(result, BaseException):
        reason = f"{path}:{line_of(result, path)}: {type(result).__name__}: {result}"[:MAX_REASON_CHARS]
        printed = (printed + "".join(traceback.format_exception(result)))[-MAX_OUTPUT_CHARS:]
    else:
        try:
            return [_verdict(reward) for reward in signature.rewards(result, num_rows, given)]
        except BadResultError as error:
            reason = f"{path}:{first_line(function)}: {error}"
    return [Verdict(reward=None, outcome=outcome, reason=reason, output=printed)] * num_rows


def _verdict(reward: Reward | None) -> Verdict:
    if reward is None:
        return Verdict(reward=None, outcome="abstained")
    if reward.details.get(PARSE_FAILED):
        return Verdict(reward=reward, outcome="parse_failed", reason="the function could not read an answer")
    return Verdict(reward=reward, outcome="correct" if reward.correct else "wrong")


def _bounded(verdict: Verdict, max_note_chars: int) -> Verdict:
    """Return a verdict with the notes that are too long as shortened text."""
    if verdict.reward is None:
        return verdict
    texts = {name: json.dumps(value) for name, value in verdict.reward.notes.items()}
    notes = {
        name: verdict.reward.notes[name] if len(text) <= max_note_chars else text[:max_note_chars]
        for name, text in texts.items()
    }
    return replace(verdict, reward=replace(verdict.reward, notes=notes, details=dict(verdict.reward.details)))

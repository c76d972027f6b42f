"""What a worker process does: one job after the other, each interrupted at the soft limit."""

import os
import pickle
import signal
import socket
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any, NoReturn

from megarl.rewards.verifier.channel import read_message, write_message
from megarl.rewards.verifier.containment import die_with_parent, discard_output, limit_memory, resident_mib
from megarl.rewards.verifier.references import resolve
from megarl.rewards.verifier.replies import Reply, failure, reply_to
from megarl.rewards.verifier.types import VerifierOptions

# Said once, with the process's file descriptor, and before the first job of a scorer, when its import is done.
READY = b"R"
STARTED = b""
# Code that swallows the interruption, as destructors do, gets another one.
_REPEAT_S = 0.05

Scorers = dict[str, Callable[..., Any]]


class SoftLimit(BaseException):
    """Raised into a job; not an Exception, because algebra packages catch those."""


def work(connection: socket.socket, options: VerifierOptions, parent: int) -> None:
    """Serves a pool until it closes the connection. Call it in a process made for it, in the main thread."""
    die_with_parent(parent)
    os.setsid()
    discard_output()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    limit_memory(options.memory_limit_mib)
    socket.send_fds(connection, [READY], [os.pidfd_open(os.getpid())])
    scorers: Scorers = {}
    while (message := read_message(connection)) is not None:
        reply = _answer(message, connection, scorers, options.soft_limit_s)
        write_message(connection, replace(reply, resident_mib=resident_mib()).encode())


def _answer(message: bytes, connection: socket.socket, scorers: Scorers, soft_limit_s: float) -> Reply:
    # Whatever a scorer raises, the worker is there for the next job, and the pool says what it was.
    try:
        function, response, ground_truth, extra_info, arguments = pickle.loads(message)
        if function not in scorers:
            scorers[function] = resolve(function)
            write_message(connection, STARTED)
        scorer = scorers[function]
        return interrupted(
            lambda: reply_to(scorer(response, ground_truth, extra_info, **arguments), function), soft_limit_s
        )
    except Exception as error:
        return failure(error)


def interrupted(call: Callable[[], Reply], soft_limit_s: float) -> Reply:
    """The reply of `call`, or that it timed out. Main thread only.

    The limit is on CPU time: what a job is worth must not depend on what else the machine does, and packages that have
    time-outs of their own use the other timer. An earlier job may have changed how the signal is handled, so all of it
    is set anew each time.
    """
    try:
        signal.signal(signal.SIGPROF, _interrupt)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
        signal.setitimer(signal.ITIMER_PROF, soft_limit_s, _REPEAT_S)
        try:
            return call()
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except SoftLimit:
        signal.setitimer(signal.ITIMER_PROF, 0)
        return Reply(outcome="timed_out", reason=f"interrupted after {soft_limit_s} s of CPU time")


def _interrupt(_: int, __: FrameType | None) -> NoReturn:
    raise SoftLimit

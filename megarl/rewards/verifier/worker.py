"""Run a worker process of a verifier pool: it executes one job after another, and interrupts each at the soft limit."""

import ctypes
import importlib.util
import json
import math
import os
import pickle
import resource
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from megarl.errors import ConfigError, NonFiniteError
from megarl.rewards.question import Verdict
from megarl.rewards.scorers import PARSE_FAILED
from megarl.rewards.verifier.types import (
    ERRORS,
    READY,
    STARTED,
    VerifierOptions,
    WorkerReply,
    read_message,
    write_message,
)
from megarl.types import Reward

# Interval at which the interruption is repeated, since code may swallow it, as destructors do.
_REPEAT_S = 0.05
_MAX_REASON_CHARS = 500
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_MIB = 1 << 20

Scorers = dict[str, Callable[..., Any]]


class SoftLimit(BaseException):
    """The interruption of a job at its soft limit. It is not an Exception, because algebra packages catch those."""


_is_retired = False


def retire() -> None:
    """Have this process replaced after its present job, because the job has left something behind."""
    global _is_retired
    _is_retired = True


def work(connection: socket.socket, options: VerifierOptions, parent: int) -> None:
    """Execute the pool's jobs until it closes the connection; run this in the main thread of a new process."""
    die_with_parent(parent)
    adopt_orphans()
    os.setsid()
    # Standard input is empty, and standard output and error are discarded.
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Allocations fail once the process exceeds its present address space by the limit; there are no core files.
    statm = Path("/proc/self/statm")
    most = int(statm.read_text(encoding="utf-8").split()[0]) * resource.getpagesize() + options.memory_limit_mib * _MIB
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    socket.send_fds(connection, [READY], [os.pidfd_open(os.getpid())])
    scorers: Scorers = {}
    while (message := read_message(connection)) is not None:
        reply = _answer(message, connection, scorers, options.soft_limit_s)
        resident_mib = int(statm.read_text(encoding="utf-8").split()[1]) * resource.getpagesize() / _MIB
        reply = replace(reply, resident_mib=resident_mib, is_last=_is_retired)
        write_message(connection, json.dumps(asdict(reply)).encode())


def _answer(message: bytes, connection: socket.socket, scorers: Scorers, soft_limit_s: float) -> WorkerReply:
    """Execute a job and return the reply. An error of the scorer becomes a reply too, so that the worker survives.

    The soft limit is on CPU time: the load of the machine must not change a result, and the timer for real time
    belongs to packages with their own time-outs. The signal handler is set for each job, because an earlier job may
    have changed it.
    """
    try:
        function, response, ground_truth, extra_info, arguments = pickle.loads(message)
        if function not in scorers:
            scorers[function] = resolve(function)
            write_message(connection, STARTED)
        try:
            signal.signal(signal.SIGPROF, _interrupt)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
            signal.setitimer(signal.ITIMER_PROF, soft_limit_s, _REPEAT_S)
            try:
                return _reply_of(scorers[function](response, ground_truth, extra_info, **arguments), function)
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
                # An alarm that the job has left must not ring in the next one.
                signal.setitimer(signal.ITIMER_REAL, 0)
        except SoftLimit:
            signal.setitimer(signal.ITIMER_PROF, 0)
            return WorkerReply(outcome="timed_out", reason=f"interrupted after {soft_limit_s} s of CPU time")
    except Exception as error:
        known = next((name for name, kind in ERRORS.items() if isinstance(error, kind)), "")
        text = str(error) if known else f"{type(error).__name__}: {error}"
        return WorkerReply(error=known, reason=text[:_MAX_REASON_CHARS])


def _interrupt(_: int, __: FrameType | None) -> NoReturn:
    raise SoftLimit


def _reply_of(result: object, function: str) -> WorkerReply:
    """Turn a scorer's return value into a reply; raise ConfigError or NonFiniteError if the value is not a valid
    reward.
    """
    if isinstance(result, list) and all(isinstance(each, Verdict) for each in result):
        return WorkerReply(outcome="scored", verdicts=tuple(result))
    if not isinstance(result, Reward):
        raise ConfigError(f"scorer {function!r} returned {type(result).__name__}, expected a megarl.types.Reward")
    # JSON cannot represent NumPy's numbers.
    details = {str(name): float(value) for name, value in result.details.items()}
    reward = Reward(
        score=float(result.score),
        correct=bool(result.correct),
        details=details,
        notes=dict(result.notes),
        own_score=None if result.own_score is None else float(result.own_score),
        no_opinion=result.no_opinion,
    )
    for score in (reward.score, reward.own_score or 0.0):
        if not math.isfinite(score):
            raise NonFiniteError(f"scorer {function!r} returned a score of {score}; scores are finite numbers")
    return WorkerReply(outcome="parse_failed" if details.get(PARSE_FAILED) else "scored", reward=reward)


def resolve(reference: str) -> Callable[..., Any]:
    """Import the function named "module:function" or "path/file.py:function"; raise ConfigError if there is none."""
    module_name, _, name = reference.rpartition(":")
    if not module_name:
        raise ConfigError('a function is named "module:function" or "path/file.py:function"; the module is missing')
    try:
        if module_name.endswith(".py"):
            path = Path(module_name).resolve()
            spec = importlib.util.spec_from_file_location(path.stem, path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            # The file's dataclasses look up their module in sys.modules.
            sys.modules.setdefault(path.stem, module)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # the user's module may raise anything
        raise ConfigError(f"function {reference!r}: cannot import {module_name!r}: {error!r}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"function {reference!r}: {module_name!r} has no function {name!r}")
    resolved: Callable[..., Any] = function
    return resolved


def die_with_parent(parent: int) -> None:
    """Ask the kernel (Linux) to kill this process when the thread that started it ends, for whatever reason.

    `parent` is the expected parent's process id; it may have ended before this call, which then kills this process.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Ask the kernel to make this process the parent of descendants whose parents have ended."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")

"""Decide what SIGINT, SIGTERM, SIGHUP and SIGUSR1 do to a command.

Outside training steps, each of them ends the process at once with exit code 128 + n. During training steps, the first
SIGTERM, SIGHUP or SIGUSR1 requests a stop at the end of the current step; SIGINT, or a second signal, ends the process
at once. A second one within two seconds counts as the first: `timeout` and `make`, for example, both pass a signal on.
Under `nohup`, SIGHUP stays ignored.
"""

import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

_LEAVING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_STOPPING = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
# Signals that come so soon after the first one are the same request.
SAME_REQUEST_S = 2.0


@dataclass(slots=True)
class StopRequest:
    """The signal that requested a stop of training, or None."""

    signum: signal.Signals | None = None


def leave_on_signals() -> list[int]:
    """Make SIGINT, SIGTERM, SIGHUP and SIGUSR1 end the process at once, by SystemExit, so that clean-up code runs.

    The signal's number is appended to the returned list. Look there and not at the exit code, which Ray may replace if
    the signal arrives during one of its calls. A signal that arrives in a finalizer, or in another callback whose
    exceptions Python drops, is sent again.
    """
    received: list[int] = []
    report = sys.unraisablehook

    def leave(signum: int, _: FrameType | None) -> NoReturn:
        # Another signal must not interrupt the clean-up that this one starts.
        for each in _LEAVING:
            signal.signal(each, signal.SIG_IGN)
        received.append(signum)
        _leave_terminal(signum)
        leaving = SystemExit(128 + signum)

        def send_again(dropped: "sys.UnraisableHookArgs") -> None:
            if dropped.exc_value is not leaving:
                return report(dropped)
            signal.signal(signum, leave)
            # By then the callback has returned, or else its exception is dropped and sent again too.
            threading.Timer(0.05, os.kill, (os.getpid(), signum)).start()

        sys.unraisablehook = send_again
        raise leaving

    for each in _LEAVING:
        if each is not signal.SIGHUP or signal.getsignal(each) is not signal.SIG_IGN:
            signal.signal(each, leave)
    return received


def _leave_terminal(signum: int) -> None:
    """After SIGHUP, drop the output to a terminal that is gone, or to a reader that ends with it, as `tee` does."""
    if signum == signal.SIGHUP:
        for descriptor in (1, 2):
            if not stat.S_ISREG(os.fstat(descriptor).st_mode) and not os.isatty(descriptor):
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


@contextmanager
def keep_handlers() -> Iterator[None]:
    """Restore the signal handlers at the end of this context, in which `ray.init` or a Slurm job replaces them."""
    previous = {each: signal.getsignal(each) for each in _LEAVING}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for each, handler in previous.items():
                signal.signal(each, handler)


# The request of the most recent `stop_on_signals`.
_last = StopRequest()


def last_stop_signal() -> signal.Signals | None:
    """Return the signal that requested a stop during the last training steps, or None.

    A run that had already reached its last step still counts as finished.
    """
    return _last.signum


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """In this context, record the first SIGTERM, SIGHUP or SIGUSR1 in the yielded request, so that training stops
    after its step. A later signal restores the previous handlers and is sent again, so that it ends the process.
    """
    global _last
    request = _last = StopRequest()
    first_s = 0.0

    def restore() -> None:
        for each, handler in previous.items():
            signal.signal(each, handler)

    def note(signum: int, _: FrameType | None) -> None:
        nonlocal first_s
        if request.signum is None:
            request.signum, first_s = signal.Signals(signum), time.monotonic()
            _leave_terminal(signum)
        elif time.monotonic() - first_s >= SAME_REQUEST_S:
            restore()
            signal.raise_signal(signum)

    handlers = {each: signal.getsignal(each) for each in _STOPPING}
    previous = {each: handler for each, handler in handlers.items() if handler is not signal.SIG_IGN}
    for each in previous:
        signal.signal(each, note)
    try:
        yield request
    finally:
        restore()

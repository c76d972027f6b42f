"""Decide what SIGINT, SIGTERM and SIGUSR1 do to a command.

Outside training steps, each of them ends the process at once with exit code 128 + n. During training steps, the first
SIGTERM or SIGUSR1 requests a stop at the end of the current step; SIGINT, or a second signal, ends the process at once.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

_LEAVING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_STOPPING = (signal.SIGTERM, signal.SIGUSR1)


@dataclass(slots=True)
class StopRequest:
    """The signal that requested a stop of training, or None."""

    signum: signal.Signals | None = None


def leave_on_signals() -> list[int]:
    """Make SIGINT, SIGTERM and SIGUSR1 end the process at once, by SystemExit, so that clean-up code runs.

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
        signal.signal(each, leave)
    return received


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
    """In this context, record the first SIGTERM or SIGUSR1 in the yielded request, so that training stops after its
    step.

    The first signal also restores the previous handlers, so that a second one ends the process.
    """
    global _last
    request = _last = StopRequest()

    def restore() -> None:
        for each, handler in previous.items():
            signal.signal(each, handler)

    def note(signum: int, _: FrameType | None) -> None:
        request.signum = signal.Signals(signum)
        restore()

    previous = {each: signal.getsignal(each) for each in _STOPPING}
    for each in _STOPPING:
        signal.signal(each, note)
    try:
        yield request
    finally:
        restore()

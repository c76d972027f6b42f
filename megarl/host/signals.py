"""What SIGINT, SIGTERM and SIGUSR1 do to a command.

Outside training steps each ends the process at once with 128 + n. Around training steps SIGTERM and SIGUSR1 ask for a
stop at the end of the current step, once; SIGINT, and a second signal of any kind, ends the process at once.
"""

import signal
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
    """The signal that asked for a stop, if one has."""

    signum: signal.Signals | None = None


def leave_on_signals() -> list[int]:
    """Every signal ends the process at once, by SystemExit, so that clean-up runs.

    The list will hold the signal that did: where Ray waits, it replaces the exit code by its own.
    """
    received: list[int] = []

    def leave(signum: int, _: FrameType | None) -> NoReturn:
        # Another signal must not interrupt the clean-up that this one starts.
        for each in _LEAVING:
            signal.signal(each, signal.SIG_IGN)
        received.append(signum)
        raise SystemExit(128 + signum)

    for each in _LEAVING:
        signal.signal(each, leave)
    return received


@contextmanager
def keep_handlers() -> Iterator[None]:
    """Around `ray.init`, which would put a handler of its own in place of ours."""
    previous = {each: signal.getsignal(each) for each in _LEAVING}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for each, handler in previous.items():
                signal.signal(each, handler)


# Of the last training steps.
_last = StopRequest()


def last_stop_signal() -> signal.Signals | None:
    """What asked the last training steps for a stop; a run that was at its end is finished all the same."""
    return _last.signum


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Around training steps: the first SIGTERM or SIGUSR1 sets the request and restores the handlers of before."""
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

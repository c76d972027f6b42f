"""Signals: what they set and raise in this process, and that a new process loses none of them."""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest

from megarl.host.signals import last_stop_signal, leave_on_signals, stop_on_signals

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@pytest.fixture(autouse=True)
def _handlers_of_a_command() -> Iterator[None]:
    before = {each: signal.getsignal(each) for each in HANDLED}
    report = sys.unraisablehook
    leave_on_signals()
    yield
    sys.unraisablehook = report
    for each, handler in before.items():
        signal.signal(each, handler)


def send(signum: int) -> None:
    os.kill(os.getpid(), signum)


@pytest.mark.parametrize("signum", HANDLED)
def test_outside_of_training_a_signal_ends_the_process(signum: int) -> None:
    with pytest.raises(SystemExit) as raised:
        send(signum)
    assert raised.value.code == 128 + signum
    # The clean-up that follows is not interrupted.
    assert all(signal.getsignal(each) is signal.SIG_IGN for each in HANDLED)


# Python only prints what is raised in these, and goes on.
DROPS = {
    "finalizer": """
class Late:
    def __del__(self):
        os.kill(os.getpid(), signum)
for _ in range(2):
    Late()
""",
    "weak reference": """
class Target: pass
target = Target()
reference = weakref.ref(target, lambda _: os.kill(os.getpid(), signum))
del target
""",
    "garbage collection": """
gc.callbacks.append(lambda phase, _: phase == "start" and os.kill(os.getpid(), signum))
gc.collect()
gc.callbacks.clear()
""",
    "ctypes callback": """
compare = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(lambda *_: os.kill(os.getpid(), signum))
ctypes.CDLL(None).qsort((ctypes.c_int * 2)(2, 1), 2, 4, compare)
""",
}


@pytest.mark.parametrize("signum", HANDLED)
@pytest.mark.parametrize("place", DROPS)
def test_a_signal_whose_exception_python_drops_still_ends_the_process(place: str, signum: int) -> None:
    program = f"""
import ctypes, gc, os, signal, time, weakref
from megarl.host.signals import leave_on_signals
signum = {int(signum)}
leave_on_signals()
try:
{textwrap.indent(DROPS[place], "    ")}
    time.sleep(600)
finally:
    print("cleaned up")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (128 + signum, "cleaned up\n", "")


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("second", HANDLED)
def test_in_training_the_first_signal_is_a_request_and_the_second_ends(first: int, second: int) -> None:
    with stop_on_signals() as stop:
        assert stop.signum is None
        send(first)
        assert stop.signum == first
        with pytest.raises(SystemExit) as raised:
            send(second)
    assert raised.value.code == 128 + second


def test_interrupt_is_never_a_request() -> None:
    with stop_on_signals() as stop, pytest.raises(SystemExit):
        send(signal.SIGINT)
    assert stop.signum is None


def test_after_training_a_signal_ends_again() -> None:
    with stop_on_signals():
        pass
    with pytest.raises(SystemExit):
        send(signal.SIGTERM)


def test_what_asked_the_last_training_steps_for_a_stop() -> None:
    with stop_on_signals():
        send(signal.SIGTERM)
    assert last_stop_signal() is signal.SIGTERM
    with stop_on_signals():
        pass
    assert last_stop_signal() is None

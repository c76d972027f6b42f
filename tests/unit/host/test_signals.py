"""Signals: what they set and raise in this process, and that a new process loses none of them."""

import contextlib
import os
import pty
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest

from megarl.host import signals
from megarl.host.signals import last_stop_signal, leave_on_signals, stop_on_signals

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@pytest.fixture(autouse=True)
def _handlers_of_a_command() -> Iterator[None]:
    report = sys.unraisablehook
    leave_on_signals()
    yield
    sys.unraisablehook = report


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
    # After a hang-up, nobody reads.
    printed = "" if signum == signal.SIGHUP else "cleaned up\n"
    assert (done.returncode, done.stdout, done.stderr) == (128 + signum, printed, "")


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
@pytest.mark.parametrize("second", HANDLED)
def test_in_training_the_first_signal_is_a_request_and_the_second_ends(
    first: int, second: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signals, "SAME_REQUEST_S", 0.0)
    with stop_on_signals() as stop:
        assert stop.signum is None
        send(first)
        assert stop.signum == first
        with pytest.raises(SystemExit) as raised:
            send(second)
    assert raised.value.code == 128 + second


def test_a_signal_that_two_programs_pass_on_is_one_request() -> None:
    with stop_on_signals() as stop:
        for signum in (signal.SIGTERM, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            send(signum)
    assert stop.signum == signal.SIGTERM


@pytest.mark.parametrize("is_training", [False, True])
def test_under_nohup_a_hang_up_is_ignored(is_training: bool) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    leave_on_signals()
    with stop_on_signals() if is_training else contextlib.nullcontext() as stop:
        send(signal.SIGHUP)
    assert stop is None or stop.signum is None


# A command whose terminal, and the reader of a pipe that ends with it, are gone before it says more.
HUNG_UP = """
import signal, sys
from megarl.host.signals import leave_on_signals, stop_on_signals
leave_on_signals()
with stop_on_signals() as stop:
    print("ready", flush=True)
    while stop.signum is None:
        signal.sigtimedwait([], 0.1)
    print("to nobody", flush=True)
    print("to nobody", file=sys.stderr, flush=True)
raise SystemExit(85)
"""


@pytest.mark.parametrize("output", ["terminal", "pipe"])
def test_a_command_goes_on_without_its_terminal(output: str) -> None:
    reader, writer = pty.openpty() if output == "terminal" else os.pipe()
    with subprocess.Popen([sys.executable, "-c", HUNG_UP], stdout=writer, stderr=writer, start_new_session=True) as run:
        os.close(writer)
        assert os.read(reader, 100).startswith(b"ready")
        os.close(reader)
        run.send_signal(signal.SIGHUP)
        assert run.wait(60) == 85


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

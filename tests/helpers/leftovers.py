"""Parts of a process that the next test in it would depend on, and that a test must not leave changed."""

import os
import resource
import signal
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures.thread import _threads_queues
from contextlib import contextmanager

import pytest

_LIMITS = {name: getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}
# That of pytest-timeout is its own.
_SIGNALS = tuple(set(signal.Signals) - {signal.SIGALRM, signal.SIGKILL, signal.SIGSTOP})


def state() -> Mapping[str, object]:
    mask = os.umask(0o022)
    os.umask(mask)
    found: dict[str, object] = {"working directory": os.getcwd(), "umask": mask}
    return found | {name: resource.getrlimit(limit) for name, limit in _LIMITS.items()}


def holds_up(thread: threading.Thread) -> bool:
    """Whether a process waits for it at its end; pools end theirs by then."""
    return not (thread.daemon or thread in _threads_queues or thread.name == "AnyIO worker thread")


@contextmanager
def unchanged() -> Iterator[None]:
    """The block fails when it leaves the process other than it found it.

    Variables and handlers of signals are put back: commands that tests call set them for the rest of their process.
    """
    variables, handlers = dict(os.environ), {each: signal.getsignal(each) for each in _SIGNALS}
    before, threads = state(), set(threading.enumerate())
    yield
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update({name: value for name, value in variables.items() if os.environ.get(name) != value})
    for each, handler in handlers.items():
        if signal.getsignal(each) is not handler:
            signal.signal(each, handler)
    after = state()
    changed = [f"{name} was {value} and is {after[name]}" for name, value in before.items() if value != after[name]]
    changed += [f"{thread} runs" for thread in set(threading.enumerate()) - threads if holds_up(thread)]
    if changed:
        pytest.fail(f"the test left its process changed: {'; '.join(changed)}", pytrace=False)

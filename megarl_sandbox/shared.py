"""Share one sandbox among all programs of this process that have the same options."""

import atexit
import os
import threading

from megarl_sandbox.options import SandboxOptions
from megarl_sandbox.process import Sandbox

_LOCK = threading.Lock()
_SANDBOXES: dict[tuple[int, SandboxOptions], Sandbox] = {}


def shared_sandbox(options: SandboxOptions) -> Sandbox:
    """Return this process's sandbox for these options; starting one takes longer than running a program."""
    key = os.getpid(), options
    with _LOCK:
        if key not in _SANDBOXES:
            _SANDBOXES[key] = Sandbox(options)
        return _SANDBOXES[key]


@atexit.register
def _close_sandboxes() -> None:
    for (pid, _), sandbox in _SANDBOXES.items():
        if pid == os.getpid():
            sandbox.close()

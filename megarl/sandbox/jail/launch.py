"""Run the sandbox's launcher process, which forks a keeper process for each program that is to be run."""

import json
import os
import signal
import socket
import sys
from typing import Any, NoReturn

from megarl.sandbox import wire
from megarl.sandbox.jail import kernel, syscalls
from megarl.sandbox.jail.kernel import StepError, step
from megarl.sandbox.jail.namespaces import enter_namespaces
from megarl.sandbox.jail.processes import Family
from megarl.sandbox.jail.rights import Bounds
from megarl.sandbox.jail.root import build_root
from megarl.sandbox.jail.scratch import DirectoryScratch, MountedScratch, Scratch
from megarl.sandbox.jail.tasks import serve_tasks


def main() -> None:
    """Serve requests for programs until the outer side closes the connection.

    Arguments: a connected socket's descriptor, and what `megarl.sandbox.process` says of all programs, as JSON.
    """
    control = socket.socket(fileno=int(sys.argv[1]))
    # If memory runs out, the kernel is to end programs before a trainer.
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    setup = json.loads(sys.argv[2])
    # The kernel buries keepers that nobody waits for.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    launcher = os.getpid()
    while True:
        _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not descriptors:
            return
        if os.fork() == 0:
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _keep(socket.socket(fileno=descriptors[0]), setup, launcher)
        os.close(descriptors[0])


def _keep(connection: socket.socket, setup: dict[str, Any], launcher: int) -> NoReturn:
    """Confine one program. This keeper process holds the connection open until nothing of the program is left."""
    bounds = Bounds(**setup["bounds"])
    try:
        wire.send(connection, {"keeper": os.getpid()})
        if os.uname().machine not in syscalls.AUDIT_ARCH:
            raise StepError("system call filter", OSError(0, f"no numbers for {os.uname().machine}"))
        if bounds.is_isolated:
            enter_namespaces()
        _end_with_parent(launcher)
        if bounds.is_isolated and (first := os.fork()):
            os.waitpid(first, 0)
            os._exit(0)
        # From here on it is process 1 of the namespace, or the keeper itself if there is none.
        scratch: Scratch
        if bounds.is_isolated:
            _end_with_parent(0)
            # Programs may not look into this process, nor interrupt it.
            kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            family = Family(build_root(setup["paths"]), is_isolated=True)
            with step("scratch tmpfs"):
                scratch = MountedScratch(mib=bounds.files_mib, files=bounds.files)
        else:
            # Without namespaces orphans of the program become children of this process.
            kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
            family = Family(os.open("/proc", os.O_RDONLY | os.O_DIRECTORY), is_isolated=False)
            with step("scratch directory"):
                scratch = DirectoryScratch(f"{setup['scratch']}-{os.getpid()}")
        wire.send(connection, {"ready": True})
    except StepError as error:
        wire.send(connection, {"refused": error.name, "reason": error.reason})
        os._exit(1)
    serve_tasks(connection, bounds, family, scratch, setup["import_paths"])


def _end_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends, and exit if the parent has already ended."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent of a namespace's first process is outside of it, and so has no number.
    if os.getppid() != parent:
        os._exit(1)

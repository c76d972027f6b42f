"""Run the sandbox's launcher process, which forks a keeper process for each program that is to be run."""

import json
import os
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import replace
from typing import Any, NoReturn

from megarl_sandbox import wire
from megarl_sandbox.jail import kernel, landlock, syscalls
from megarl_sandbox.jail.kernel import StepError, step
from megarl_sandbox.jail.namespaces import NOBODY, enter_namespaces
from megarl_sandbox.jail.processes import ProcessFamily
from megarl_sandbox.jail.rights import Bounds
from megarl_sandbox.jail.root import build_root
from megarl_sandbox.jail.scratch import DirectoryScratch, MountedScratch, Scratch
from megarl_sandbox.jail.tasks import Tasks
from megarl_sandbox.options import Isolation


def main() -> None:
    """Serve requests for programs until the outer side closes the connection.

    Arguments: a connected socket's descriptor, and what `megarl_sandbox.process` says of all programs, as JSON.
    """
    control = socket.socket(fileno=int(sys.argv[1]))
    # If memory runs out, the kernel is to end programs before a trainer.
    with suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="utf-8") as file:
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
    bounds = Bounds(**setup["bounds"], paths=setup["paths"], isolation=Isolation(setup["isolation"]))
    table = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    try:
        wire.send(connection, {"keeper": os.getpid()})
        with step("system call filter"):
            if os.uname().machine not in syscalls.AUDIT_ARCH:
                raise OSError(0, f"no numbers for {os.uname().machine}")
        if bounds.isolation is Isolation.NAMESPACES:
            scratch = _enter_namespaces(bounds, launcher)
        else:
            bounds, scratch = _stay(bounds, launcher, f"{setup['scratch']}/{os.getpid()}")
        family = ProcessFamily(table, kills_all=bounds.isolation is Isolation.NAMESPACES, user=bounds.user)
        wire.send(connection, {"ready": True})
    except StepError as error:
        wire.send(connection, {"refused": error.name, "reason": error.reason})
        os._exit(1)
    Tasks(
        connection=connection, bounds=bounds, family=family, scratch=scratch, import_paths=setup["import_paths"]
    ).serve()


def _enter_namespaces(bounds: Bounds, launcher: int) -> Scratch:
    """Enter new namespaces whose root file system shows only the paths of `bounds`, and fork.

    Only the child, the first process in the new namespaces, returns.
    """
    enter_namespaces()
    _end_with_parent(launcher)
    if first := os.fork():
        os.waitpid(first, 0)
        os._exit(0)
    _end_with_parent(0)
    # Programs may not look into this process, nor interrupt it.
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    build_root(bounds.paths, bounds.files_mib if bounds.may_execute else 0)
    with step("scratch tmpfs"):
        return MountedScratch(mib=bounds.files_mib, files=bounds.files)


def _stay(bounds: Bounds, launcher: int, directory: str) -> tuple[Bounds, Scratch]:
    """Prepare what programs need without namespaces: a directory of the host, and if possible a user without rights."""
    _end_with_parent(launcher)
    # Orphans of a program become children of this process.
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    if bounds.isolation is Isolation.LANDLOCK:
        with step("landlock"):
            landlock.version()
        if os.geteuid() == 0 and landlock.is_readable_by_all([*bounds.paths, os.path.dirname(directory)]):
            bounds = replace(bounds, user=NOBODY)
    with step("scratch directory"):
        scratch = DirectoryScratch(directory, mib=bounds.files_mib, files=bounds.files, user=bounds.user)
    return bounds, scratch


def _end_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends, and exit if the parent has already ended."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent of a namespace's first process is outside of it, and so has no number.
    if os.getppid() != parent:
        os._exit(1)

"""Create the Linux namespaces of a program, and map the users inside them."""

import os

from megarl_sandbox.jail import kernel
from megarl_sandbox.jail.kernel import StepError, step

# The user that programs are inside. Any but 0, so that no file they run gives them capabilities.
PROGRAM_ID = 1000
# Whom root makes them outside: the kernel does not limit the processes of root.
NOBODY = 65534

NAMESPACES = {
    "mount namespace": kernel.CLONE_NEWNS,
    "pid namespace": kernel.CLONE_NEWPID,
    "network namespace": kernel.CLONE_NEWNET,
    "ipc namespace": kernel.CLONE_NEWIPC,
    "uts namespace": kernel.CLONE_NEWUTS,
    "cgroup namespace": kernel.CLONE_NEWCGROUP,
}


def enter_namespaces() -> None:
    """Enter new namespaces; the next child of this process becomes process 1 of the pid namespace.

    Raises:
        StepError: this machine refuses one of them, which the error names.
    """
    reader, writer = os.pipe()
    keeper = os.getpid()
    # Only a process that is still outside may map users other than its own.
    helper = os.fork()
    if helper == 0:
        os.close(writer)
        os._exit(_map_when_told(reader, keeper))
    os.close(reader)
    try:
        with step("user namespace"):
            kernel.unshare(kernel.CLONE_NEWUSER)
            os.write(writer, b"1")
    finally:
        os.close(writer)
        _, status = os.waitpid(helper, 0)
    if code := os.waitstatus_to_exitcode(status):
        raise StepError("user mapping", OSError(code, os.strerror(code)))
    for name, flag in NAMESPACES.items():
        with step(name):
            kernel.unshare(flag)


def become(user: int) -> None:
    """Become this user and the group of the same number, and belong to no other groups, unless this is the user."""
    if os.getuid() != user:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)


def _map_when_told(reader: int, keeper: int) -> int:
    """Wait until the keeper is in its user namespace, and map its users; return the number of the error, or 0."""
    if not os.read(reader, 1):
        return 0
    try:
        if os.geteuid() == 0:
            users = groups = f"0 0 1\n{PROGRAM_ID} {NOBODY} 1\n"
        else:
            users = f"{PROGRAM_ID} {os.geteuid()} 1\n"
            groups = f"{PROGRAM_ID} {os.getegid()} 1\n"
            # The kernel asks for this of whoever has no right to choose groups.
            _write(f"/proc/{keeper}/setgroups", "deny")
        _write(f"/proc/{keeper}/uid_map", users)
        _write(f"/proc/{keeper}/gid_map", groups)
    except OSError as error:
        return error.errno or 1
    return 0


def _write(path: str, text: str) -> None:
    file = os.open(path, os.O_WRONLY)
    try:
        os.write(file, text.encode())
    finally:
        os.close(file)

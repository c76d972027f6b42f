"""What to do where a step of shutting a program in is refused."""

from collections.abc import Mapping

_NAMESPACES = (
    "allow user namespaces: sysctl user.max_user_namespaces=15000, kernel.unprivileged_userns_clone=1 (Debian), "
    "kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu); in Docker --security-opt seccomp=unconfined "
    "--security-opt apparmor=unconfined"
)
_MOUNTS = "in Docker allow mounts: --security-opt apparmor=unconfined --security-opt seccomp=unconfined"
_REMEDIES: Mapping[str, str] = {
    "user namespace": _NAMESPACES,
    "user mapping": "as root in a container, keep the capabilities SETUID and SETGID and map user 65534",
    "mount namespace": _NAMESPACES,
    "private mounts": _MOUNTS,
    "tmpfs": _MOUNTS,
    "pivot_root": "run where the root directory is a mount point, not in a chroot or an initramfs",
    "read-only binds": "run on Linux 5.14 or newer",
    "proc": "in Docker unmask /proc: --security-opt systempaths=unconfined",
    "system call filter": "run on x86_64 or aarch64",
}


def remedy(step: str) -> str:
    """Advice for a step of `jail/`, in a few words."""
    return _REMEDIES.get(step, "run on Linux 5.14 or newer that allows user, mount, network, pid and ipc namespaces")

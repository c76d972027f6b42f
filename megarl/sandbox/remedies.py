"""What to do where a step of shutting a program in is refused."""

from collections.abc import Mapping

_NAMESPACES = (
    "allow user namespaces: sysctl user.max_user_namespaces=15000, kernel.unprivileged_userns_clone=1 (Debian), "
    "kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu); in Docker --security-opt seccomp=unconfined "
    "--security-opt apparmor=unconfined"
)
_MOUNTS = "allow mounts, in Docker: --security-opt seccomp=unconfined --security-opt apparmor=unconfined"
_KERNEL = "run on Linux 5.14 or newer"

# By the names that the modules of `jail/` give their steps.
REMEDIES: Mapping[str, str] = {
    "user namespace": _NAMESPACES,
    "user mapping": "as root in a container, keep the capabilities SETUID and SETGID, and map user 65534",
    "mount namespace": _NAMESPACES,
    "pid namespace": _NAMESPACES,
    "network namespace": _NAMESPACES,
    "ipc namespace": _NAMESPACES,
    "uts namespace": _NAMESPACES,
    "cgroup namespace": _NAMESPACES,
    "private mounts": _MOUNTS,
    "tmpfs": _MOUNTS,
    "pivot_root": "run where the root directory is a mount point, not in a chroot or an initramfs",
    "read-only binds": _KERNEL,
    "proc": "let /proc be mounted, in Docker: --security-opt systempaths=unconfined",
    "detach the old root": _KERNEL,
    "scratch tmpfs": _MOUNTS,
    "scratch directory": "make the directory for temporary files writable",
    "system call filter": "run on x86_64 or aarch64",
}

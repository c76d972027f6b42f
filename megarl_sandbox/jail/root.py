"""Build the directory tree that a program sees: Python's files, read-only, and a writable /tmp (see `scratch.py`)."""

import os
from collections.abc import Sequence

from megarl_sandbox.jail import kernel
from megarl_sandbox.jail.kernel import step

_OLD = "/old"
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
SAFE = kernel.MS_NOSUID | kernel.MS_NODEV


def build_root(paths: Sequence[str], writable_mib: int = 0) -> None:
    """Make a tree of `paths` the root of this mount namespace, and detach the old root.

    writable_mib: how much programs may write outside of these paths and of /tmp.

    There is no /proc in it: through /proc/self/exe programs could change the interpreter's file where it lies on the
    host, and a container that masks parts of its own /proc may not mount another.
    """
    with step("private mounts"):
        kernel.mount("none", "/", "none", kernel.MS_REC | kernel.MS_PRIVATE)
    with step("tmpfs"):
        # The directory is hidden only until this becomes the root, and only in this namespace.
        mode = "1777" if writable_mib else "755"
        kernel.mount("tmpfs", "/tmp", "tmpfs", SAFE, f"size={writable_mib or 1}m,mode={mode}")
        os.mkdir(f"/tmp{_OLD}")
    with step("pivot_root"):
        kernel.pivot_root("/tmp", f"/tmp{_OLD}")
        os.chdir("/")
    if writable_mib:
        # Directories that lead to the paths are as writable as the root.
        os.umask(0)
    with step("read-only binds"):
        for path in paths:
            _show(path, kernel.MS_RDONLY | SAFE)
        for device in _DEVICES:
            _show(device, kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NOEXEC)
    with step("detach the old root"):
        kernel.unmount(_OLD)
        os.rmdir(_OLD)
        os.mkdir("/tmp")
        if not writable_mib:
            kernel.restrict_mounts("/", kernel.MS_RDONLY)


def _show(path: str, flags: int) -> None:
    """Bind-mount a file or directory of the old root at the same path, with everything below it."""
    source = _OLD + path
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.islink(source):
        os.symlink(os.readlink(source), path)
        return
    if os.path.isdir(source):
        os.makedirs(path, exist_ok=True)
    else:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o444))
    kernel.mount(source, path, "none", kernel.MS_BIND | kernel.MS_REC)
    kernel.restrict_mounts(path, flags)

"""Manage the directories that programs may write to. Each task finds its directory empty."""

import os
import shutil
from contextlib import suppress
from typing import TypeAlias

from megarl.sandbox.jail import kernel
from megarl.sandbox.jail.root import SAFE


class MountedScratch:
    """A file system in memory, at /tmp, of bounded size, that ends with its namespace."""

    path = "/tmp"

    def __init__(self, *, mib: int, files: int) -> None:
        # The directory itself counts too.
        self._options = f"size={mib}m,nr_inodes={files + 1},mode=1777"
        kernel.mount("tmpfs", self.path, "tmpfs", SAFE | kernel.MS_NOEXEC, self._options)

    def renew(self) -> None:
        """Mount an empty /tmp in place of the one that the last task used."""
        kernel.unmount(self.path)
        kernel.mount("tmpfs", self.path, "tmpfs", SAFE | kernel.MS_NOEXEC, self._options)

    def is_full(self) -> bool:
        """Return False, because the kernel keeps the bounds."""
        return False

    def remove(self) -> None:
        """Do nothing, because the kernel removes the mount with its namespace."""


class DirectoryScratch:
    """A directory of the host, whose size is looked at. `user`: whose it is, None for the user of this process."""

    def __init__(self, path: str, *, mib: int, files: int, user: int | None) -> None:
        self.path = path
        self._bytes, self._files, self._user = mib << 20, files, user
        self._make()

    def renew(self) -> None:
        """Empty the directory."""
        self.remove()
        self._make()

    def is_full(self) -> bool:
        """Return whether it holds more files, or larger ones in total, than a program may have."""
        size = count = 0
        for directory, inner, names in os.walk(self.path):
            for name in (*inner, *names):
                with suppress(OSError):
                    size += os.lstat(os.path.join(directory, name)).st_blocks * 512
            count += len(inner) + len(names)
            if count > self._files or size > self._bytes:
                return True
        return False

    def _make(self) -> None:
        os.mkdir(self.path, 0o700)
        if self._user is not None:
            os.chown(self.path, self._user, self._user)

    def remove(self) -> None:
        """Delete the directory after the last task."""
        shutil.rmtree(self.path)


Scratch: TypeAlias = MountedScratch | DirectoryScratch

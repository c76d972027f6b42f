"""Manage the directories that programs may write to. Each task finds its directory empty."""

import os
import shutil
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

    def remove(self) -> None:
        """Do nothing, because the kernel removes the mount with its namespace."""


class DirectoryScratch:
    """A directory of the host. Only the size of each of its files is bounded."""

    def __init__(self, path: str) -> None:
        self.path = path
        os.mkdir(path, 0o700)

    def renew(self) -> None:
        """Empty the directory."""
        self.remove()
        os.mkdir(self.path, 0o700)

    def remove(self) -> None:
        """Delete the directory after the last task."""
        shutil.rmtree(self.path)


Scratch: TypeAlias = MountedScratch | DirectoryScratch

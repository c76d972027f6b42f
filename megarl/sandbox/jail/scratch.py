"""Where a program may write. Each task finds it empty."""

import os
import shutil
from typing import Protocol

from megarl.sandbox.jail import root


class Scratch(Protocol):
    """An empty directory for each task."""

    @property
    def path(self) -> str: ...

    def renew(self) -> None:
        """Empty it."""

    def remove(self) -> None:
        """After the last task."""


class MountedScratch:
    """A file system in memory, of bounded size, that ends with its namespace."""

    path = "/tmp"

    def __init__(self, *, mib: int, files: int) -> None:
        self._mib = mib
        self._files = files
        root.mount_scratch(mib=mib, files=files)

    def renew(self) -> None:
        root.renew_scratch(mib=self._mib, files=self._files)

    def remove(self) -> None:
        pass


class DirectoryScratch:
    """A directory of the host. Only the size of each of its files is bounded."""

    def __init__(self, path: str) -> None:
        self.path = path
        os.mkdir(path, 0o700)

    def renew(self) -> None:
        self.remove()
        os.mkdir(self.path, 0o700)

    def remove(self) -> None:
        shutil.rmtree(self.path)

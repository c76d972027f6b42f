"""Manage the directories that programs may write to. Each task finds its directory empty."""

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TypeAlias

from megarl_sandbox.jail import kernel
from megarl_sandbox.jail.processes import ProcessFamily, Sizes
from megarl_sandbox.jail.root import SAFE


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

    def is_full(self, family: ProcessFamily) -> bool:
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

    def is_full(self, family: ProcessFamily) -> bool:
        """Return whether it holds more files, or larger ones in total, than a program may have, with the deleted files
        that the processes of `family` hold.

        It is also full if it cannot be looked through: a program may take its own right to list a directory, or nest
        directories until their path is too long.
        """
        sizes: Sizes = {}
        hidden: list[OSError] = []
        for directory, inner, names in os.walk(self.path, onerror=hidden.append):
            for name in (*inner, *names):
                with suppress(OSError):
                    file = os.lstat(os.path.join(directory, name))
                    sizes[file.st_dev, file.st_ino] = file.st_blocks * 512
            if self._is_beyond(sizes):
                return True
        # Last: files lose names, but get none. The program may also remove a directory meanwhile.
        deleted = family.deleted_files(self.path)
        return (
            deleted is None
            or self._is_beyond(sizes | deleted)
            or any(not isinstance(error, FileNotFoundError) for error in hidden)
        )

    def _is_beyond(self, sizes: Sizes) -> bool:
        return len(sizes) > self._files or sum(sizes.values()) > self._bytes

    def _make(self) -> None:
        os.mkdir(self.path, 0o700)
        if self._user is not None:
            os.chown(self.path, self._user, self._user)

    def remove(self) -> None:
        """Delete the directory after the last task."""
        delete_tree(self.path)


def delete_tree(path: str) -> None:
    """Delete a directory that no program uses any more, however deep its tree, and without the right to list parts of
    it. OSError if that fails, or if `path` is a link.

    Whatever is put in the place of a directory meanwhile, nothing outside of the tree is touched.
    """
    new = (f"{os.getpid()}-{os.urandom(8).hex()}-{number}" for number in itertools.count())
    with _opened(path, None) as top:
        # Moved up, directories are deleted without recursion, and no path gets long.
        while entries := os.listdir(top):
            for entry in entries:
                try:
                    with _opened(entry, top) as directory:
                        for inner in os.listdir(directory):
                            # Only who may write to a directory may move it.
                            with suppress(NotADirectoryError), _opened(inner, directory):
                                pass
                            os.rename(inner, next(new), src_dir_fd=directory, dst_dir_fd=top)
                    os.rmdir(entry, dir_fd=top)
                except NotADirectoryError:
                    os.unlink(entry, dir_fd=top)
    os.rmdir(path)


@contextmanager
def _opened(name: str, parent: int | None) -> Iterator[int]:
    """Take every right to a directory, and open it; NotADirectoryError if a link or a file has this name."""
    place = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    try:
        os.chmod(f"/proc/self/fd/{place}", 0o700)
        directory = os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_DIRECTORY)
    finally:
        os.close(place)
    try:
        yield directory
    finally:
        os.close(directory)


Scratch: TypeAlias = MountedScratch | DirectoryScratch

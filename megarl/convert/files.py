"""Read and write files at explicit offsets, without memory maps, so that a process holds only memory it allocates."""

import contextlib
import fcntl
import io
import os
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megarl.errors import ConfigError, DataError

# How long a new conversion waits for the workers of a killed one, which end as soon as they notice.
_LOCK_WAIT_S = 10.0


class FileReader:
    """A reader of byte ranges of a directory's files. It counts the bytes read, in `num_bytes`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._descriptors: dict[str, int] = {}
        self.num_bytes = 0

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes of `file` from `offset` on. Raise DataError if the file ends too early."""
        descriptor = self._open(file)
        self.num_bytes += len(buffer)
        while buffer:
            count = os.preadv(descriptor, [buffer], offset)
            if count == 0:
                raise DataError(f"{self._directory / file}: ends at byte {offset}; copy the checkpoint again")
            buffer, offset = buffer[count:], offset + count

    def check_range(self, file: str, offset: int, length: int) -> None:
        """Raise DataError if `file` ends before offset + length. Call it before torch or zipfile reads the range."""
        size = os.fstat(self._open(file)).st_size
        if size < offset + length:
            raise DataError(f"{self._directory / file}: ends at byte {size}; copy the checkpoint again")

    def _open(self, file: str) -> int:
        if file not in self._descriptors:
            try:
                self._descriptors[file] = os.open(self._directory / file, os.O_RDONLY)
            except FileNotFoundError:
                raise DataError(f"{self._directory / file}: does not exist; copy the checkpoint again") from None
        return self._descriptors[file]


class FileWindow(io.RawIOBase):
    """A byte range of a file, presented as a seekable read-only stream (for torch.load and zipfile)."""

    def __init__(self, reader: FileReader, file: str, offset: int, length: int) -> None:
        super().__init__()
        self._reader, self._file, self._offset, self._length = reader, file, offset, length
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        self._position = start + offset
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        view = memoryview(buffer).cast("B")
        view = view[: max(0, self._length - self._position)]
        self._reader.read_into(self._file, self._offset + self._position, view)
        self._position += len(view)
        return len(view)


class WindowWriter(io.RawIOBase):
    """A stream that fills a byte range of an existing file in order, from the start of the range (for torch.save).

    `checksum` is the CRC-32 of the bytes written so far; `num_left` counts the bytes of the range still to be written.
    """

    def __init__(self, descriptor: int, offset: int, length: int) -> None:
        super().__init__()
        self._descriptor, self._offset, self.num_left = descriptor, offset, length
        self.checksum = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        assert len(view) <= self.num_left, "a piece is larger than planned"
        self.checksum = zlib.crc32(view, self.checksum)
        num_bytes = len(view)
        self.num_left -= num_bytes
        while view:
            count = os.pwrite(self._descriptor, view, self._offset)
            view, self._offset = view[count:], self._offset + count
        return num_bytes


def range_checksum(file: Path, offset: int, length: int) -> int:
    """Compute the CRC-32 of a byte range of a file, reading 1 MiB at a time."""
    checksum = 0
    with file.open("rb", buffering=0) as stream:
        stream.seek(offset)
        while length > 0 and (data := stream.read(min(1 << 20, length))):
            checksum, length = zlib.crc32(data, checksum), length - len(data)
    return checksum


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return a view of the bytes of a contiguous CPU tensor, without copying them."""
    assert tensor.is_contiguous()
    return tensor.reshape(-1).view(torch.uint8).numpy().data


@contextlib.contextmanager
def exclusive(file: Path) -> Iterator[None]:
    """Wait until no worker of an earlier conversion, which was killed, writes to the directory of the file `file`.

    Forked workers hold the lock until they end; they are on this host, so storage without such locks needs none.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", encoding="utf-8") as stream:
        deadline = time.monotonic() + _LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"{file.parent}: workers of a conversion that was killed still write here; wait for them to end"
                    ) from None
                time.sleep(0.05)
            except OSError:
                break
        yield

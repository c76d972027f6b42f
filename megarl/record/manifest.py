"""Record what a checkpoint consists of once it is complete, and find out cheaply whether all of that is still there.

The marker file lists every other file of the checkpoint with its size and a CRC-32: of all bytes while the files
together are small, of blocks spread evenly over each file if they are large. So lost, cut off, replaced and zero-filled
files are noticed, but not a few wrong bytes in the midst of a large one.
"""

import json
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from megarl.record.metrics import MARKER

# How many bytes are read of a checkpoint, and at least of each of its files.
_TOTAL_BYTES, _FILE_BYTES = 256 << 20, 512 << 10
_BLOCK_BYTES = 64 << 10
# Shared storage answers slowly, but many at a time.
_NUM_THREADS = 16
# Damaged files that a message names.
_MAX_NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The files of a checkpoint: by path within it, the size in bytes and the CRC-32 of up to `sampled_bytes`."""

    sampled_bytes: int
    files: Mapping[str, tuple[int, int]]

    @classmethod
    def of(cls, directory: Path) -> Self:
        """Read the files that are in a directory now, except its marker."""
        files = [file for file in directory.rglob("*") if file.is_file() and not file.name.startswith(MARKER)]
        sampled = max(_FILE_BYTES, _TOTAL_BYTES // max(1, len(files)))
        with ThreadPoolExecutor(_NUM_THREADS) as threads:
            found = threads.map(lambda file: (file.stat().st_size, _checksum(file, sampled)), files)
            return cls(
                sampled_bytes=sampled,
                files={str(file.relative_to(directory)): each for file, each in zip(files, found, strict=True)},
            )

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)


def damage_of(directory: Path) -> str | None:
    """Return what is wrong with a complete checkpoint, in words that name the files; None if nothing is.

    Markers of earlier versions are empty: they say nothing about their checkpoint.
    """
    try:
        text = (directory / MARKER).read_bytes()
        manifest = Manifest(**json.loads(text)) if text else Manifest(sampled_bytes=0, files={})
        expected = {name: (int(size), int(checksum)) for name, (size, checksum) in manifest.files.items()}
    except OSError as error:
        return f"{MARKER}: {error.strerror}"
    except (ValueError, TypeError, AttributeError):
        return f"{MARKER}: is not what megarl wrote"

    def damage(name: str) -> str | None:
        size, checksum = expected[name]
        file = directory / name
        try:
            if (got := file.stat().st_size) != size:
                return f"{name}: got {got} bytes, expected {size}"
            if _checksum(file, manifest.sampled_bytes) != checksum:
                return f"{name}: its bytes are not those that were written"
        except FileNotFoundError:
            return f"{name}: is missing"
        except OSError as error:
            return f"{name}: {error.strerror}"
        return None

    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        found = [each for each in threads.map(damage, sorted(expected)) if each is not None]
    more = f"; and {len(found) - _MAX_NAMED} more files" if len(found) > _MAX_NAMED else ""
    return "; ".join(found[:_MAX_NAMED]) + more if found else None


def _checksum(file: Path, num_bytes: int) -> int:
    """Compute the CRC-32 of a file, or of `num_bytes` of it in blocks that are spread from its start to its end."""
    checksum = 0
    with file.open("rb") as stream:
        for offset, length in _blocks(file.stat().st_size, num_bytes):
            stream.seek(offset)
            checksum = zlib.crc32(stream.read(length), checksum)
    return checksum


def _blocks(size: int, num_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield the offsets and lengths of the blocks of a file that are read.

    >>> list(_blocks(100, 512))
    [(0, 100)]
    >>> [offset for offset, _ in _blocks(1 << 20, 4 * _BLOCK_BYTES)]
    [0, 327680, 655360, 983040]
    """
    if size <= num_bytes:
        yield from ((offset, min(_BLOCK_BYTES, size - offset)) for offset in range(0, size, _BLOCK_BYTES))
    else:
        count = num_bytes // _BLOCK_BYTES
        yield from ((i * (size - _BLOCK_BYTES) // (count - 1), _BLOCK_BYTES) for i in range(count))

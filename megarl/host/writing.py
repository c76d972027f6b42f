"""Write the files of a run; a storage error names the path, the space left there and the remedy."""

import contextlib
import errno
import math
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

from megarl.errors import StorageError
from megarl.host.masking import masked_text
from megarl.host.streams import print_lines

_MIB = 2**20
# The remedy for each error of a storage.
_REMEDIES: Mapping[int, str] = {
    errno.ENOSPC: "free space there",
    errno.EDQUOT: "free space within your quota (`quota -s`)",
    errno.EROFS: "mount it writable, or choose another run.dir",
    errno.EIO: "look at the health of this storage (dmesg)",
    errno.ESTALE: "mount this network storage again",
    errno.EACCES: "let this user write there, or choose another run.dir",
    errno.EPERM: "let this user write there, or choose another run.dir",
    errno.ENAMETOOLONG: "choose a shorter run.name or run.dir",
    errno.EFBIG: "raise the limit of a file's size (`ulimit -f`)",
    errno.EMFILE: "raise the limit of open files (`ulimit -n`)",
    errno.ENFILE: "end other programs, which have too many files open",
}
# The same for errors that only mean the storage where a file is written.
_PATH_REMEDIES: Mapping[int, str] = {
    errno.ENOENT: "do not remove what a run that goes on has written",
    errno.ENOTDIR: "choose another run.dir",
    errno.EEXIST: "choose another run.dir",
    errno.EISDIR: "remove this directory",
}
# The errors of storages that cannot flush a directory.
_NO_FSYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)
_warned: set[str] = set()


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Within this context, the file or directory `path` is written; StorageError says why it could not be."""
    try:
        yield
    except OSError as failure:
        raise StorageError(f"cannot write {path}: {problem(failure, path)}") from failure
    except RuntimeError as failure:
        # That of torch.save has the storage's error as its context.
        if type(failure) is not RuntimeError or (cause := storage_cause(failure)) is None:
            raise
        raise StorageError(f"cannot write {path}: {problem(cause, path)}") from failure


def fsync(path: Path) -> None:
    """Flush a file or a directory to disk, as far as its storage can: some, such as CIFS, cannot flush directories."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FSYNC or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path to write to, which takes the place of `path` at the end: readers see the old file or the new one.

    After an error `path` is as it was, and nothing is left beside it. Several processes may replace a file at the same
    time: the last one wins. Raises StorageError as `writing` does.
    """
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.partial")
    with writing(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            yield partial
            partial.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def replacing_directory(path: Path) -> Iterator[Path]:
    """Yield a new directory, which takes the place of the directory `path` at the end, as `put_directory` does it.

    Otherwise as `replacing`.
    """
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.partial")
    with writing(path):
        try:
            partial.mkdir(parents=True)
            yield partial
            put_directory(partial, path)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


def put_directory(new: Path, path: Path) -> None:
    """Rename the directory `new` to `path`, and remove what was there: readers see either, and never half of one.

    A directory cannot replace another in one operation, so between two renames there is none.
    """
    old = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.old")
    while True:
        with contextlib.suppress(FileNotFoundError):
            path.rename(old)
        try:
            new.rename(path)
            break
        except OSError as error:
            # Another process has put its own there.
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
        finally:
            shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def dispensable(what: str, *others: type[Exception], done: str = "written") -> Iterator[None]:
    """Within this context, a run does what it can do without: what fails becomes a warning, once, and the next call of
    the same kind tries again.

    others: further errors than those of a storage, such as those of a library or a service. done: for the warning.
    """
    errors: tuple[type[Exception], ...] = (StorageError, OSError, *others)
    try:
        yield
    except errors as error:
        if what not in _warned:
            _warned.add(what)
            reason = masked_text(" ".join(str(error).split())) or type(error).__name__
            print_lines(f"warning: {what} cannot be {done}, and the run goes on without: {reason}")


def storage_cause(failure: BaseException | None) -> OSError | None:
    """Find the error of the storage that `failure` is or came from; None if it came from elsewhere."""
    while failure is not None:
        if isinstance(failure, OSError) and failure.errno in _REMEDIES:
            return failure
        failure = failure.__cause__ or failure.__context__
    return None


def problem(error: OSError, path: Path) -> str:
    """Return what is wrong with the storage of `path`, the space that is left there, and the remedy, for a message that
    has named the path.
    """
    remedies, code = {**_REMEDIES, **_PATH_REMEDIES}, error.errno or 0
    places = (path, *path.absolute().parents)
    if astray := next((each for each in places if each.is_symlink() and not each.exists()), None):
        return f"{astray} is a link to {astray.readlink()}, which is not there; mount that storage, or remove the link"
    remedy = remedies.get(code, "look at the health of this storage")
    # Libraries' own words, as Arrow's, may be long.
    what = os.strerror(code) if code in remedies else str(error)
    if code == errno.ENOSPC:
        found = os.statvfs(_nearest(path))
        if found.f_files > 0 and found.f_favail == 0:
            return f"{what}; {room(path)}, but no further file can be made: remove some there"
    return f"{what}; {room(path)}; {remedy}"


def free_bytes(path: Path) -> float:
    """Return how much space is left on the storage where `path` is, or would be; infinity if it does not say."""
    try:
        return shutil.disk_usage(_nearest(path)).free
    except OSError:
        return math.inf


def room(path: Path) -> str:
    """Say how much space is left on the storage where `path` is, or would be."""
    try:
        usage = shutil.disk_usage(_nearest(path))
    except OSError as error:
        return f"the space left there is not known ({error.strerror})"
    return f"{usage.free / _MIB:,.0f} of {usage.total / _MIB:,.0f} MiB are free"


def _nearest(path: Path) -> Path:
    return next(each for each in (path, *path.absolute().parents) if each.exists())

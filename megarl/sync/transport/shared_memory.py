"""Carry messages between processes of one host in segments of memory that both map, with flags in another segment."""

import functools
import mmap
import os
import stat
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Protocol, TypeAlias

import torch

from megarl.errors import WeightSyncError
from megarl.host.device.platform import platform
from megarl.host.streams import print_lines
from megarl.sync.plan.build import WeightMessage
from megarl.sync.plan.links import Rates
from megarl.sync.transport.flags import FLAG_BYTES, Flag
from megarl.sync.transport.rendezvous import unless_given_up
from megarl.sync.transport.transports import (
    DEPTH,
    Arrival,
    ProcessPlan,
    ReceivingEnd,
    SendingEnd,
    Staging,
    Transport,
    pack,
)

_FLAGS = ("sent", "taken")
_FOREIGN = "another process has meddled with it: remove it, and start the run again"


class Memory(Protocol):
    """A kind of memory of which segments are made: see `HostMemory`."""

    def create(self, path: Path, num_bytes: int) -> torch.Tensor: ...

    def open(self, path: Path, num_bytes: int) -> torch.Tensor: ...

    def copying(self) -> AbstractContextManager[None]: ...

    def synchronize(self) -> None: ...


class HostMemory:
    """Shared memory of the host: files that only this user can open."""

    def create(self, path: Path, num_bytes: int) -> torch.Tensor:
        """Create a file, map it as uint8 [num_bytes], and reserve its space: full memory would kill the process."""
        try:
            # Never what lies there already: it may be a link, or a file that others have open.
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except FileExistsError as error:
            raise WeightSyncError(
                f"weight sync cannot create {path}: another process has put something there; remove it"
            ) from error
        with os.fdopen(descriptor, "r+b"):
            try:
                os.posix_fallocate(descriptor, 0, num_bytes)
            except OSError as error:
                path.unlink(missing_ok=True)
                raise WeightSyncError(
                    f"weight sync needs {num_bytes / 2**30:.2f} GiB in {path.parent} for {path.name}: "
                    f"{error.strerror}; enlarge it, or remove what other runs left there"
                ) from error
            return self.map(descriptor, num_bytes)

    def open(self, path: Path, num_bytes: int) -> torch.Tensor:
        """Map a file that another process of this user created as uint8 [num_bytes].

        Raises:
            WeightSyncError: it is a link, belongs to another user, or has another size.
        """
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise WeightSyncError(f"weight sync cannot open {path}: {error.strerror}; {_FOREIGN}") from error
        with os.fdopen(descriptor, "r+b"):
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_size != num_bytes:
                raise WeightSyncError(
                    f"weight sync cannot use {path}: it belongs to user {found.st_uid} and has {found.st_size} bytes, "
                    f"expected a file of user {os.geteuid()} with {num_bytes} bytes; {_FOREIGN}"
                )
            return self.map(descriptor, num_bytes)

    def map(self, descriptor: int, num_bytes: int) -> torch.Tensor:
        """Map an open file as uint8 [num_bytes]."""
        return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)

    def copying(self) -> AbstractContextManager[None]:
        """Let copies into segments run beside the device's other work; they have finished at the end."""
        return platform().copying()

    def synchronize(self) -> None:
        """Wait until this process's copies out of segments have finished, as the other process may overwrite them."""
        platform().synchronize()


class PageLockedMemory(HostMemory):
    """Shared memory of the host that devices copy to and from directly, where they can."""

    def map(self, descriptor: int, num_bytes: int) -> torch.Tensor:
        """Map a file as uint8 [num_bytes] that is page-locked as long as the tensor exists."""
        segment = super().map(descriptor, num_bytes)
        if (reason := platform().page_lock(segment)) is not None:
            _warn_of_pageable(reason)
        return segment


@functools.cache
def _warn_of_pageable(reason: str) -> None:
    rates = Rates()
    print_lines(
        f"warning: weight sync cannot page-lock shared memory: {reason}. Copies between devices and the host's memory "
        f"reach about {rates.pageable / 1e9:.0f} instead of {rates.pcie / 1e9:.0f} GB/s; let the run lock more memory "
        "(ulimit -l, or the limits of its container), or set sync.host_group=device"
    )


# Source, receiver and turn % DEPTH.
_Slot: TypeAlias = tuple[int, int, int]


def slot_bytes(messages: Iterable[WeightMessage]) -> dict[_Slot, int]:
    """Return the lengths of segments: `DEPTH` per (source, receiver) pair, each as long as its longest message."""
    sizes = defaultdict[_Slot, int](int)
    for message in messages:
        slot = _slot(message)
        sizes[slot] = max(sizes[slot], message.num_bytes)
    return sizes


def segment_bytes(messages: Sequence[WeightMessage], process: int) -> int:
    """Return the length of all segments that a process creates: those from which its messages are read."""
    return sum(size for (source, _, _), size in slot_bytes(messages).items() if source == process)


def _slot(message: WeightMessage) -> _Slot:
    return message.source, message.receiver, message.turn % DEPTH


class _Segments:
    """A process's segments, and its flags: for each (source, receiver) pair, what has been sent and what has been
    taken.
    """

    def __init__(self, process_plan: ProcessPlan, memory: Memory) -> None:
        self._prefix, self._timeout_s = process_plan.segments, process_plan.rendezvous.timeout_s
        self._store = process_plan.rendezvous.connect()
        self._sizes = {self._path(*slot): size for slot, size in slot_bytes(process_plan.messages).items()}
        self._memory = memory
        self._maps = dict[Path, torch.Tensor]()
        self._flags = dict[Path, dict[str, Flag]]()
        self._transfer = 0

    def start(self, transfer: int) -> None:
        """Begin the weight sync number `transfer`."""
        self._transfer = transfer

    def _path(self, *name: int | str) -> Path:
        return Path("-".join(map(str, (self._prefix, *name))))

    def _bytes_of(self, message: WeightMessage) -> torch.Tensor:
        path = self._path(*_slot(message))
        if path not in self._maps:
            self._maps[path] = self._memory.open(path, self._sizes[path])
        return self._maps[path][: message.num_bytes]

    def _flag(self, what: str, message: WeightMessage, *, creates: bool = False) -> Flag:
        path = self._path("flags", message.source, message.receiver)
        if path not in self._flags:
            get = HostMemory().create if creates else HostMemory().open
            flags = get(path, len(_FLAGS) * FLAG_BYTES).split(FLAG_BYTES)
            self._flags[path] = {name: Flag(part, is_new=creates) for name, part in zip(_FLAGS, flags, strict=True)}
        return self._flags[path][what]

    def _say(self, what: str, message: WeightMessage) -> None:
        self._memory.synchronize()
        self._flag(what, message).advance(self._transfer, message.turn + 1)

    def _wait(self, what: str, message: WeightMessage) -> None:
        """Wait until the other process says that a message was `sent` or `taken`."""
        wait = partial(self._flag(what, message).wait, self._transfer, message.turn + 1)
        if not unless_given_up(wait, self._store, self._transfer, self._timeout_s):
            raise WeightSyncError(
                f"message {message.turn} of trainer rank {message.source} to engine worker {message.receiver} was not "
                f"{what} within {self._timeout_s:.0f} s; see what the other process says in RUN/logs"
            )


class SharedMemorySender(_Segments, SendingEnd):
    """The sender of messages through shared segments; it creates them, and `close` removes them."""

    def __init__(self, process_plan: ProcessPlan, memory: Memory) -> None:
        super().__init__(process_plan, memory)
        for path, size in self._sizes.items():
            self._maps[path] = memory.create(path, size)
        for message in process_plan.messages:
            self._flag("sent", message, creates=True)
        self._under_way = list[WeightMessage]()

    def start(self, transfer: int) -> None:
        """Begin the weight sync number `transfer`; pending messages of a failed earlier one are dropped."""
        super().start(transfer)
        self._under_way.clear()

    def send(self, message: WeightMessage, parts: Iterable[torch.Tensor]) -> None:
        """Copy tensors into a segment, after its previous message has been read, and signal that they are sent."""
        slot = _slot(message)
        for earlier in [each for each in self._under_way if _slot(each) == slot]:
            self._wait_taken(earlier)
        with self._memory.copying():
            pack(parts, self._bytes_of(message), non_blocking=True)
        self._say("sent", message)
        self._under_way.append(message)

    def flush(self) -> None:
        """Wait until the receivers have read every message."""
        for message in list(self._under_way):
            self._wait_taken(message)

    def close(self) -> None:
        """Remove the files of all shared-memory segments."""
        for path in (*self._sizes, *self._flags):
            path.unlink(missing_ok=True)

    def _wait_taken(self, message: WeightMessage) -> None:
        self._wait("taken", message)
        self._under_way.remove(message)


class SharedMemoryReceiver(_Segments, ReceivingEnd):
    """The receiver of messages from a `SharedMemorySender`."""

    def receive(self, message: WeightMessage) -> Arrival:
        """Wait until a message has been sent, and return its segment for reading."""
        self._wait("sent", message)
        return Arrival(self._bytes_of(message), message.num_bytes, stays=True)

    def release(self, message: WeightMessage) -> None:
        """Signal to the sender that a message has been read, so that its segment may be reused."""
        self._say("taken", message)


SHARED_MEMORY = Transport(
    name="shared memory",
    fits=lambda link: link.same_host and not link.is_grouped,
    sender=lambda process_plan, _: SharedMemorySender(process_plan, PageLockedMemory()),
    receiver=lambda process_plan, _: SharedMemoryReceiver(process_plan, PageLockedMemory()),
    staging=lambda messages, process: Staging(host=segment_bytes(messages, process)),
)

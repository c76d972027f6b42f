"""The wire between processes of one host: segments of shared memory, and a store in which ends tell each other.

Segments are in the host's memory, or with `cuda_ipc` on the device where both ends share one.
"""

import os
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import torch

from megarl.errors import WeightSyncError
from megarl.sync.plan.build import Message
from megarl.sync.wire.cuda_ipc import DeviceSegments
from megarl.sync.wire.meetings import is_said
from megarl.sync.wire.wires import DEPTH, Arrival, Share, Staged, pack


class _Segments:
    """The segments of a process's pairs: each as large as the largest message that uses it, mapped on first use."""

    def __init__(self, share: Share) -> None:
        meeting, self._prefix, self._timeout_s = share.meeting, share.segments, share.meeting.timeout_s
        self._store = meeting.connect()
        self.sizes, self.on_device = defaultdict[Path, int](int), set[Path]()
        self._paths = dict[tuple[int, int, int], Path]()
        for message in share.messages:
            path = self.path(message)
            self.sizes[path] = max(self.sizes[path], message.num_bytes)
            if share.cuda_ipc and message.local:
                self.on_device.add(path)
        self.device = DeviceSegments(self._store)
        self.maps: dict[Path, torch.Tensor] = {}
        self._transfer = 0

    def start(self, transfer: int) -> None:
        self._transfer = transfer

    def path(self, message: Message) -> Path:
        pair = (message.source, message.sink, message.turn % DEPTH)
        if pair not in self._paths:
            self._paths[pair] = Path("-".join(map(str, (self._prefix, *pair))))
        return self._paths[pair]

    def bytes_of(self, message: Message) -> torch.Tensor:
        path = self.path(message)
        if path not in self.maps:
            self.maps[path] = self._open(path)
        return self.maps[path][: message.num_bytes]

    def _open(self, path: Path) -> torch.Tensor:
        if path in self.on_device:
            return self.device.open(path)
        return torch.from_file(str(path), shared=True, size=self.sizes[path], dtype=torch.uint8)

    def say(self, what: str, message: Message) -> None:
        if self.path(message) in self.on_device:
            self.device.synchronize()
        self._store.set(self._key(what, message), "")

    def wait(self, what: str, message: Message) -> None:
        """For the other end to say it."""
        key = self._key(what, message)
        if not is_said(self._store, key, self._transfer, self._timeout_s):
            raise WeightSyncError(
                f"message {message.turn} of trainer rank {message.source} to engine worker {message.sink} was not "
                f"{what} within {self._timeout_s:.0f} s; see what the other process says in RUN/logs"
            )
        self._store.delete_key(key)

    def _key(self, what: str, message: Message) -> str:
        return f"{self._transfer}/{message.source}/{message.sink}/{message.turn}/{what}"


class SharedMemorySender:
    """`SendingEnd` that makes the segments; they live until `close`."""

    def __init__(self, share: Share) -> None:
        self._segments = _Segments(share)
        for path, size in self._segments.sizes.items():
            if path in self._segments.on_device:
                self._segments.maps[path] = self._segments.device.create(path, size)
            else:
                create_segment(path, size)
        self._under_way = list[Message]()

    def start(self, transfer: int) -> None:
        # What an earlier transfer left behind when it failed is not waited for.
        self._under_way.clear()
        self._segments.start(transfer)

    def send(self, message: Message, parts: Iterable[torch.Tensor]) -> None:
        path = self._segments.path(message)
        for earlier in [each for each in self._under_way if self._segments.path(each) == path]:
            self._wait_taken(earlier)
        pack(parts, self._segments.bytes_of(message))
        self._segments.say("sent", message)
        self._under_way.append(message)

    def flush(self) -> None:
        for message in list(self._under_way):
            self._wait_taken(message)

    def close(self) -> None:
        """Unlink the segments."""
        for path in self._segments.sizes:
            path.unlink(missing_ok=True)

    def _wait_taken(self, message: Message) -> None:
        self._segments.wait("taken", message)
        self._under_way.remove(message)


class SharedMemoryReceiver:
    """`ReceivingEnd` of a `SharedMemorySender`."""

    def __init__(self, share: Share) -> None:
        self._segments = _Segments(share)

    def start(self, transfer: int) -> None:
        self._segments.start(transfer)

    def expect(self, messages: Iterable[Message]) -> None:
        """Senders need not be told."""

    def receive(self, message: Message) -> Arrival:
        self._segments.wait("sent", message)
        return Staged(self._segments.bytes_of(message))

    def release(self, message: Message) -> None:
        self._segments.say("taken", message)


def create_segment(path: Path, num_bytes: int) -> None:
    """Reserve shared memory now: touching a page for which there is no room would kill the process."""
    with path.open("wb") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise WeightSyncError(
                f"weight sync needs {num_bytes / 2**30:.2f} GiB in {path.parent} for {path.name}: {error.strerror}; "
                f"enlarge it, or remove what other runs left there"
            ) from error

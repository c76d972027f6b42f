"""Send messages as differences from the last weight sync, by wrapping any sender and its receiver.

Sender and receiver keep the last version of each message in host memory. For each message, the sender announces the
current length through the TCPStore; full length means that it is sent in full.
"""

from collections.abc import Iterable
from functools import partial

import torch

from megarl.errors import WeightSyncError
from megarl.sync.plan.build import Parcel
from megarl.sync.wire.delta import Span, apply, encode
from megarl.sync.wire.meetings import unless_given_up
from megarl.sync.wire.wires import Arrival, Key, ReceivingEnd, SendingEnd, Share, Wire, key_of, pack, unpack
from megarl.weights.boxes import num_elements


class _Versions:
    """The last sent data of each message. Senders compute differences from it, and receivers add differences to it."""

    def __init__(self, share: Share) -> None:
        self._specs, meeting = share.specs, share.meeting
        self._timeout_s = meeting.timeout_s
        self._store = meeting.connect()
        self.kept = dict[Key, torch.Tensor]()
        self.transfer = 0

    def spans(self, message: Parcel) -> list[Span]:
        widths = {part.tensor: self._specs[part.tensor].dtype.itemsize for part in message.parts}
        return [
            (part.tensor, part.offset, part.offset + num_elements(part.box) * widths[part.tensor], widths[part.tensor])
            for part in message.parts
        ]

    def keep(self, message: Parcel, data: torch.Tensor) -> None:
        if (kept := self.kept.get(key_of(message))) is None:
            self.kept[key_of(message)] = data.clone()
        else:
            kept.copy_(data)

    def say_length(self, message: Parcel) -> None:
        self._store.set(self._name(message), str(message.num_bytes))

    def with_length(self, message: Parcel) -> Parcel:
        """Wait for the sender's announcement of a message's size in this transfer; return it with that size."""
        name = self._name(message)
        length = unless_given_up(partial(self._store.get, name), self._store, self.transfer, self._timeout_s)
        if length is None:
            raise WeightSyncError(
                f"trainer rank {message.source} did not send message {message.turn} to engine worker {message.sink} "
                f"within {self._timeout_s:.0f} s; see what it says in RUN/logs"
            )
        self._store.delete(name)
        return message._replace(num_bytes=int(length))

    def _name(self, message: Parcel) -> str:
        return f"length/{self.transfer}/{message.source}/{message.sink}/{message.turn}"


class DeltaSender(SendingEnd):
    """A sender that transmits only the elements that changed since the last sync, if this is shorter."""

    def __init__(self, share: Share, wire: SendingEnd) -> None:
        self._wire, self._versions = wire, _Versions(share)
        largest = max((message.num_bytes for message in share.messages), default=0)
        self._packed = torch.empty(largest, dtype=torch.uint8)

    def forget(self) -> None:
        self._versions.kept.clear()

    def start(self, transfer: int) -> None:
        self._versions.transfer = transfer
        self._wire.start(transfer)

    def post(self, before: int) -> None:
        self._wire.post(before)

    def send(self, message: Parcel, parts: Iterable[torch.Tensor]) -> None:
        """Send what has changed of a message, or all of it if that is not longer."""
        current, last = self._packed[: message.num_bytes], self._versions.kept.get(key_of(message))
        pack(parts, current)
        delta = None if last is None else encode(last.numpy(), current.numpy(), self._versions.spans(message))
        self._versions.keep(message, current)
        # Send the kept copy, which does not change before the next transfer; the packing buffer does with each message.
        payload = self._versions.kept[key_of(message)] if delta is None else torch.from_numpy(delta)
        sent = message._replace(num_bytes=payload.nbytes)
        self._versions.say_length(sent)
        self._wire.send(sent, [payload])

    def flush(self) -> None:
        self._wire.flush()

    def close(self) -> None:
        self._wire.close()


class DeltaReceiver(ReceivingEnd):
    """The receiver of messages from a `DeltaSender`; it reconstructs the full messages."""

    def __init__(self, share: Share, wire: ReceivingEnd) -> None:
        self._wire, self._versions = wire, _Versions(share)
        # The messages of this transfer, with their current lengths, by the keys of the planned ones.
        self._sent = dict[Key, Parcel]()

    def start(self, transfer: int) -> None:
        self._versions.transfer = transfer
        self._sent.clear()
        self._wire.start(transfer)

    def expect(self, messages: Iterable[Parcel]) -> None:
        """Wait for the lengths of the next messages, and announce these."""
        self._wire.expect([self._shortened(message) for message in messages])

    def _shortened(self, message: Parcel) -> Parcel:
        """Return a message of the plan with the length that it has in this weight sync."""
        if key_of(message) not in self._sent:
            self._sent[key_of(message)] = self._versions.with_length(message)
        return self._sent[key_of(message)]

    def receive(self, message: Parcel) -> Arrival:
        """Wait for what is sent of a message, and return all of it."""
        sent = self._shortened(message)
        (payload,) = unpack(self._wire.receive(sent).data, [torch.empty(sent.num_bytes, dtype=torch.uint8)])
        if sent.num_bytes == message.num_bytes:
            self._versions.keep(message, payload)
        else:
            assert key_of(message) in self._versions.kept, "changes of a message that was never sent in full"
            kept = self._versions.kept[key_of(message)]
            apply(payload.numpy(), kept.numpy(), self._versions.spans(message))
        return Arrival(self._versions.kept[key_of(message)], sent.num_bytes)

    def release(self, message: Parcel) -> None:
        self._wire.release(self._shortened(message))

    def close(self) -> None:
        self._wire.close()


def differences_over(wire: Wire) -> Wire:
    """Return the wire that sends over another one what has changed since the last sync."""
    return Wire(
        name=f"differences over {wire.name}",
        # Differences are made in host memory, and would take longer than a copy on the device.
        fits=lambda link: link.delta and not link.same_device and wire.fits(link),
        sender=lambda share, device: DeltaSender(share, wire.sender(share, device)),
        receiver=lambda share, device: DeltaReceiver(share, wire.receiver(share, device)),
        members=wire.members,
    )

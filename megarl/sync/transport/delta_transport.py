"""Send messages as differences from the last weight sync, by wrapping any sender and its receiver.

Sender and receiver keep the last version of each message in host memory. A payload begins with its length; full length
means that the message is sent in full. The transport below must take messages shorter than planned.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from megarl.errors import WeightSyncError
from megarl.sync.plan.build import WeightMessage
from megarl.sync.transport.delta import Span, apply, encode
from megarl.sync.transport.transports import (
    Arrival,
    Key,
    ProcessPlan,
    ReceivingEnd,
    SendingEnd,
    Staging,
    Transport,
    key_of,
    pack,
)
from megarl.weights.boxes import num_elements

# The length of what follows, as int64.
_HEAD_BYTES = 8


class _Versions:
    """The last sent data of each message. Senders compute differences from it, and receivers add differences to it."""

    def __init__(self, process_plan: ProcessPlan) -> None:
        self._specs = process_plan.specs
        self.kept = dict[Key, torch.Tensor]()

    def spans(self, message: WeightMessage) -> list[Span]:
        widths = {part.tensor: self._specs[part.tensor].dtype.itemsize for part in message.parts}
        return [
            (part.tensor, part.offset, part.offset + num_elements(part.box) * widths[part.tensor], widths[part.tensor])
            for part in message.parts
        ]

    def keep(self, message: WeightMessage, data: torch.Tensor) -> None:
        if (kept := self.kept.get(key_of(message))) is None:
            self.kept[key_of(message)] = data.clone()
        else:
            kept.copy_(data)


class DeltaSender(SendingEnd):
    """A sender that transmits only the elements that changed since the last sync, if this is shorter."""

    def __init__(self, process_plan: ProcessPlan, transport: SendingEnd) -> None:
        self._transport, self._versions = transport, _Versions(process_plan)
        largest = max((message.num_bytes for message in process_plan.messages), default=0)
        self._packed = torch.empty(largest, dtype=torch.uint8)

    def forget(self) -> None:
        self._versions.kept.clear()

    def start(self, transfer: int) -> None:
        self._transport.start(transfer)

    def post(self, before: int) -> None:
        self._transport.post(before)

    def send(self, message: WeightMessage, parts: Iterable[torch.Tensor]) -> None:
        """Send what has changed of a message, or all of it if that is not longer."""
        current, last = self._packed[: message.num_bytes], self._versions.kept.get(key_of(message))
        pack(parts, current)
        delta = None if last is None else encode(last.numpy(), current.numpy(), self._versions.spans(message))
        self._versions.keep(message, current)
        # Send the kept copy, which does not change before the next transfer; the packing buffer does with each message.
        payload = self._versions.kept[key_of(message)] if delta is None else torch.from_numpy(delta)
        sent = message._replace(num_bytes=_HEAD_BYTES + payload.nbytes)
        self._transport.send(sent, [torch.tensor([payload.nbytes]), payload])

    def flush(self) -> None:
        self._transport.flush()

    def close(self) -> None:
        self._transport.close()


class DeltaReceiver(ReceivingEnd):
    """The receiver of messages from a `DeltaSender`; it reconstructs the full messages."""

    def __init__(self, process_plan: ProcessPlan, transport: ReceivingEnd) -> None:
        self._transport, self._versions = transport, _Versions(process_plan)

    def start(self, transfer: int) -> None:
        self._transport.start(transfer)

    def expect(self, messages: Iterable[WeightMessage]) -> None:
        self._transport.expect(map(_with_head, messages))

    def receive(self, message: WeightMessage) -> Arrival:
        """Wait for what is sent of a message, and return all of it."""
        data = self._transport.receive(_with_head(message)).data
        length = int(data[:_HEAD_BYTES].view(torch.int64))
        if not 0 <= length <= message.num_bytes:
            raise WeightSyncError(
                f"message {message.turn} of trainer rank {message.source} to engine worker {message.receiver} says "
                f"that it has {length} bytes, expected at most {message.num_bytes}: somebody else has written there"
            )
        payload = data[_HEAD_BYTES : _HEAD_BYTES + length].clone()
        if length == message.num_bytes:
            self._versions.keep(message, payload)
        else:
            assert key_of(message) in self._versions.kept, "changes of a message that was never sent in full"
            kept = self._versions.kept[key_of(message)]
            apply(payload.numpy(), kept.numpy(), self._versions.spans(message))
        return Arrival(self._versions.kept[key_of(message)], length)

    def release(self, message: WeightMessage) -> None:
        self._transport.release(_with_head(message))

    def close(self) -> None:
        self._transport.close()


def _with_head(message: WeightMessage) -> WeightMessage:
    return message._replace(num_bytes=_HEAD_BYTES + message.num_bytes)


def _below(process_plan: ProcessPlan) -> ProcessPlan:
    """Return the process plan of the transport that carries the differences."""
    return replace(process_plan, messages=tuple(map(_with_head, process_plan.messages)))


def differences_over(transport: Transport) -> Transport:
    """Return the transport that sends over another one what has changed since the last sync."""

    def staging(messages: Sequence[WeightMessage], process: int) -> Staging:
        """Count what is kept too."""
        below = transport.staging(list(map(_with_head, messages)), process)
        packed = max((message.num_bytes for message in messages if message.source == process), default=0)
        return replace(below, host=below.host + packed + sum(message.num_bytes for message in messages))

    return Transport(
        name=f"differences over {transport.name}",
        # Differences are made in host memory, and would take longer than a copy on the device.
        fits=lambda link: link.delta and not link.same_device and transport.fits(link),
        sender=lambda process_plan, device: DeltaSender(process_plan, transport.sender(_below(process_plan), device)),
        receiver=lambda process_plan, device: DeltaReceiver(
            process_plan, transport.receiver(_below(process_plan), device)
        ),
        staging=staging,
        members=transport.members,
    )

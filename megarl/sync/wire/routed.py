"""Open the wires of a share, and route each message of a weight sync to the end of the wire chosen for it."""

from collections.abc import Iterable

import torch

from megarl.config.plugins import activate
from megarl.sync.plan.build import Parcel
from megarl.sync.wire.table import WIRES
from megarl.sync.wire.wires import NEVER, ReceivingEnd, Share, key_of


class RoutedSender:
    """The sending ends of all wires of a trainer rank."""

    def __init__(self, share: Share, device: torch.device) -> None:
        activate(share.plugins)
        ends = {name: WIRES.get(name).sender(share.over(name), device) for name in share.wires}
        self._ends = list(ends.values())
        self._end_of = {key_of(m): ends[name] for name, messages in share.wires.items() for m in messages}

    def start(self, transfer: int) -> None:
        """Begin the weight sync number `transfer` on all wires."""
        for end in self._ends:
            end.start(transfer)

    def forget(self) -> None:
        """Forget what earlier syncs have sent, so that all messages of the next one are sent in full."""
        for end in self._ends:
            end.forget()

    def send(self, message: Parcel, parts: Iterable[torch.Tensor]) -> None:
        """Send tensors as one message, after what earlier buckets send on other wires."""
        its_end = self._end_of[key_of(message)]
        for end in self._ends:
            end.post(before=message.bucket)
        for end in self._ends:
            if end is not its_end:
                end.pass_on()
        its_end.send(message, parts)

    def flush(self) -> None:
        """Wait until the tensors sent in this weight sync are no longer read, so that they may change."""
        for end in self._ends:
            end.post(before=NEVER)
        for end in self._ends:
            end.pass_on()
        for end in self._ends:
            end.flush()

    def close(self) -> None:
        """Remove the shared memory, and leave the process groups."""
        for end in self._ends:
            end.close()


class RoutedReceiver:
    """The receiving ends of all wires of an engine worker."""

    def __init__(self, share: Share, device: torch.device) -> None:
        activate(share.plugins)
        ends = {name: WIRES.get(name).receiver(share.over(name), device) for name in share.wires}
        self._ends = list(ends.values())
        self._end_of = {key_of(m): ends[name] for name, messages in share.wires.items() for m in messages}

    def start(self, transfer: int) -> None:
        """Begin the weight sync number `transfer` on all wires."""
        for end in self._ends:
            end.start(transfer)

    def expect(self, messages: Iterable[Parcel]) -> None:
        """Announce the next messages to be received, so that their transmission may begin."""
        expected = list(messages)
        for end in self._ends:
            end.expect(message for message in expected if self.end_of(message) is end)

    def end_of(self, message: Parcel) -> ReceivingEnd:
        """Return the end at which a message arrives."""
        return self._end_of[key_of(message)]

    def close(self) -> None:
        """Leave the process groups, which closes the connections between hosts."""
        for end in self._ends:
            end.close()

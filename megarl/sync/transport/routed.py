"""Open the transports of a process plan, and route each message of a weight sync to the end of the transport chosen for
it.
"""

from collections.abc import Iterable

import torch

from megarl.config.plugins import activate
from megarl.sync.plan.build import WeightMessage
from megarl.sync.transport.table import TRANSPORTS
from megarl.sync.transport.transports import NEVER, ProcessPlan, ReceivingEnd, key_of


class RoutedSender:
    """The sending ends of all transports of a trainer rank."""

    def __init__(self, process_plan: ProcessPlan, device: torch.device) -> None:
        activate(process_plan.plugins)
        ends = {name: TRANSPORTS.get(name).sender(process_plan.over(name), device) for name in process_plan.transports}
        self._ends = list(ends.values())
        self._end_of = {key_of(m): ends[name] for name, messages in process_plan.transports.items() for m in messages}

    def start(self, transfer: int) -> None:
        """Begin the weight sync number `transfer` on all transports."""
        for end in self._ends:
            end.start(transfer)

    def forget(self) -> None:
        """Forget what earlier syncs have sent, so that all messages of the next one are sent in full."""
        for end in self._ends:
            end.forget()

    def send(self, message: WeightMessage, parts: Iterable[torch.Tensor]) -> None:
        """Send tensors as one message, after what earlier buckets send on other transports."""
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
    """The receiving ends of all transports of an engine worker."""

    def __init__(self, process_plan: ProcessPlan, device: torch.device) -> None:
        activate(process_plan.plugins)
        ends = {
            name: TRANSPORTS.get(name).receiver(process_plan.over(name), device) for name in process_plan.transports
        }
        self._ends = list(ends.values())
        self._end_of = {key_of(m): ends[name] for name, messages in process_plan.transports.items() for m in messages}

    def start(self, transfer: int) -> None:
        """Begin the weight sync number `transfer` on all transports."""
        for end in self._ends:
            end.start(transfer)

    def expect(self, messages: Iterable[WeightMessage]) -> None:
        """Announce the next messages to be received, so that their transmission may begin."""
        expected = list(messages)
        for end in self._ends:
            end.expect(message for message in expected if self.end_of(message) is end)

    def end_of(self, message: WeightMessage) -> ReceivingEnd:
        """Return the end at which a message arrives."""
        return self._end_of[key_of(message)]

    def close(self) -> None:
        """Leave the process groups, which closes the connections between hosts."""
        for end in self._ends:
            end.close()

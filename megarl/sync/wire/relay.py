"""Carry messages over NCCL to workers that share a device with a rank, through that rank.

NCCL takes no device twice, so engines that use the trainer's devices cannot join its process group. The group has the
trainer's ranks only: the rank on an engine worker's device receives that worker's messages from other devices, and
passes them on to it in memory that both share.
"""

from collections import defaultdict
from dataclasses import replace

import torch

from megarl.sync.plan.build import Parcel
from megarl.sync.wire.point_to_point import Exchange
from megarl.sync.wire.wires import Link, Members, Share, Wire


class Relay(Exchange):
    """A trainer rank's membership in the group. It sends own messages, and passes those of others on by `onward`."""

    def __init__(self, share: Share, device: torch.device, onward: Wire) -> None:
        super().__init__(share, device)
        self._via = share.beside
        passed = [message for message in share.messages if message.source != share.meeting.rank]
        self._onward = onward.sender(replace(share, messages=tuple(passed)), device)
        self._passed = defaultdict[int, list[Parcel]](list)
        for message in passed:
            self._passed[message.bucket].append(message)
        self._buckets = sorted({message.bucket for message in share.messages})
        self._num_posted, self._arriving = 0, list[Parcel]()

    def start(self, transfer: int) -> None:
        super().start(transfer)
        self._num_posted, self._arriving = 0, []
        self._onward.start(transfer)

    def post(self, before: int) -> None:
        """Post the groups of all buckets up to one; while a bucket comes in, the one before is passed on."""
        while self._num_posted < len(self._buckets) and self._buckets[self._num_posted] < before:
            arriving = self._passed[self._buckets[self._num_posted]]
            self._num_posted += 1
            for message in arriving:
                self.stage(message)
            self.post_staged()
            self.pass_on()
            self._arriving = arriving

    def pass_on(self) -> None:
        """Pass on the last bucket that was posted.

        Receivers read in the order of buckets: until they get what came before, they free no memory for other messages.
        """
        for message in self._arriving:
            self._onward.send(message, [self.receive(message).data])
        self._arriving = []

    def flush(self) -> None:
        super().flush()
        self._onward.flush()

    def close(self) -> None:
        super().close()
        self._onward.close()


def relayed_to(onward: Wire) -> Wire:
    """Return the wire over NCCL to the rank on the worker's device, and from there on over `onward`."""

    def fits(link: Link) -> bool:
        on_device = replace(link, same_host=True, same_device=True)
        return link.is_grouped and link.beside_rank and onward.fits(on_device)

    return Wire(
        name=f"NCCL, then {onward.name}",
        fits=fits,
        sender=lambda share, device: Relay(share, device, onward),
        receiver=onward.receiver,
        members=Members.RANKS,
    )

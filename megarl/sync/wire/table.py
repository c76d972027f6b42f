"""List the wires that can carry a weight sync's messages, and choose one for each link between two processes."""

import functools

from megarl.errors import WeightSyncError
from megarl.sync.wire.cuda_ipc import CUDA_IPC
from megarl.sync.wire.delta_wire import differences_over
from megarl.sync.wire.point_to_point import GLOO, NCCL
from megarl.sync.wire.relay import relayed_to
from megarl.sync.wire.shared_memory import SHARED_MEMORY
from megarl.sync.wire.wires import Link, Wire

# The first that fits a link carries its messages.
WIRES = (
    CUDA_IPC,
    differences_over(SHARED_MEMORY),
    SHARED_MEMORY,
    relayed_to(CUDA_IPC),
    relayed_to(SHARED_MEMORY),
    NCCL,
    differences_over(GLOO),
    GLOO,
)
BY_NAME = {wire.name: wire for wire in WIRES}


@functools.cache
def wire_for(link: Link) -> Wire:
    """Choose the wire of a link.

    Raises:
        WeightSyncError: no wire fits.
    """
    for wire in WIRES:
        if wire.fits(link):
            return wire
    raise WeightSyncError(
        f"no wire can carry weights from a trainer rank to an engine worker: got {link}, expected a link that one of "
        f"{', '.join(BY_NAME)} fits; set sync.delta=false or sync.host_group=gloo"
    )

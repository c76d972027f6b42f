"""Register the wires that can carry a weight sync's messages, and choose one for each link between two processes."""

from megarl.errors import WeightSyncError
from megarl.registry import Registry
from megarl.sync.wire.cuda_ipc import CUDA_IPC
from megarl.sync.wire.delta_wire import differences_over
from megarl.sync.wire.point_to_point import GLOO, NCCL
from megarl.sync.wire.relay import relayed_to
from megarl.sync.wire.shared_memory import SHARED_MEMORY
from megarl.sync.wire.wires import Link, Wire

WIRES: Registry[Wire] = Registry("wire", key="sync")


def register_wire(wire: Wire) -> Wire:
    """Register a wire under its name. Among the wires that fit a link, the last one registered carries its messages."""
    return WIRES.register(wire.name)(wire)


for _wire in (
    GLOO,
    differences_over(GLOO),
    NCCL,
    relayed_to(SHARED_MEMORY),
    relayed_to(CUDA_IPC),
    SHARED_MEMORY,
    differences_over(SHARED_MEMORY),
    CUDA_IPC,
):
    register_wire(_wire)


def wire_for(link: Link) -> Wire:
    """Choose the wire of a link.

    Raises:
        WeightSyncError: no wire fits.
    """
    wires = WIRES.entries()
    for wire in reversed(wires.values()):
        if wire.fits(link):
            return wire
    raise WeightSyncError(
        f"no wire can carry weights from a trainer rank to an engine worker: got {link}, expected a link that one of "
        f"{', '.join(reversed(wires))} fits; set sync.delta=false or sync.host_group=gloo"
    )

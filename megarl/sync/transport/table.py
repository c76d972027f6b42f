"""Register the transports that can carry messages of a weight sync, and choose one for each link of two processes."""

from megarl.errors import WeightSyncError
from megarl.registry import Registry
from megarl.sync.transport.cuda_ipc import CUDA_IPC
from megarl.sync.transport.delta_transport import differences_over
from megarl.sync.transport.point_to_point import GLOO, NCCL, relayed_to
from megarl.sync.transport.shared_memory import SHARED_MEMORY
from megarl.sync.transport.transports import Link, Transport

TRANSPORTS: Registry[Transport] = Registry("transport", key="sync")


def register_transport(transport: Transport) -> Transport:
    """Register a transport under its name. Among the transports that fit a link, the last one registered carries its
    messages.
    """
    return TRANSPORTS.register(transport.name)(transport)


for _transport in (
    GLOO,
    differences_over(GLOO),
    NCCL,
    relayed_to(SHARED_MEMORY),
    relayed_to(CUDA_IPC),
    SHARED_MEMORY,
    differences_over(SHARED_MEMORY),
    CUDA_IPC,
):
    register_transport(_transport)


def transport_for(link: Link) -> Transport:
    """Choose the transport of a link.

    Raises:
        WeightSyncError: no transport fits.
    """
    transports = TRANSPORTS.entries()
    for transport in reversed(transports.values()):
        if transport.fits(link):
            return transport
    raise WeightSyncError(
        f"no transport can carry weights from a trainer rank to an engine worker: got {link}, expected a link that "
        f"one of {', '.join(reversed(transports))} fits; set sync.delta=false or sync.host_group=gloo"
    )

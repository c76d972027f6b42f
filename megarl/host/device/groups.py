"""Make, list and abort torch's process groups, beside its default one."""

import contextlib
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


def gloo_group(store: "dist.Store", rank: int, size: int, timeout: timedelta) -> "dist.ProcessGroup":
    """Make a gloo process group beside torch's default one. All members must call it together."""
    import torch.distributed as dist

    from megarl.host.device.gloo import close_gloo

    close_gloo()
    # torch's stubs do not say that it is one.
    return cast("dist.ProcessGroup", dist.ProcessGroupGloo(store, rank, size, timeout))


def backends_of_groups(name: str, device: "torch.device") -> list[Any]:
    """List the backends with a name, such as nccl, of all groups that this process is in, in the order of their making.

    torch's default group is the first of them.
    """
    import torch.distributed as dist

    groups = [group for group in dist.distributed_c10d._world.pg_map if dist.get_backend(group) == name]
    return [group._get_backend(device) for group in groups]


def abort_group(group: "dist.ProcessGroup") -> None:
    """Let all operations of a group fail, those that other threads wait for too; gloo's also in other processes."""
    import torch
    import torch.distributed as dist

    if not isinstance(group, dist.ProcessGroupGloo):
        group.abort()
        return
    # Gloo's groups ignore `abort`, but close all connections when an operation is late. Nothing has the highest tag.
    with contextlib.suppress(RuntimeError):
        late = group.recv([torch.empty(1)], (group.rank() + 1) % group.size(), (1 << 31) - 1)
        late.wait(timedelta(milliseconds=1))

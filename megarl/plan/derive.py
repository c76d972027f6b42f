"""Derive what a run with engines uses for settings that are null, from the memory of its devices and hosts."""

import math
from collections.abc import Iterator, Mapping, Sequence

from megarl.config.derived import Derived
from megarl.config.generation import PlacementConfig
from megarl.config.layout import LayoutConfig
from megarl.config.models import FUSED_SINCE, ActorConfig, MoeConfig, fusion_obstacle, transformer_engine_version
from megarl.config.target import known_devices
from megarl.plan.devices import most_bytes, plan_devices
from megarl.plan.run_plan import ShardPlan
from megarl.types.messages import RoleSpec
from megarl.weights.dims import Experts

# Share of a device's memory that a plan may fill: it leaves out what libraries take.
FILL = 0.9
# An H100 of 80 GiB reports 79.1. The CUDA context of a process and NCCL's buffers take so many bytes; an
# engine keeps as many while it sleeps.
REPORTED, PROCESS_BYTES = 79.1 / 80, int(1.8 * 2**30)
# Memory of a GPU where none is known: that of an H100.
H100_BYTES = 80 << 30
# Share that an engine takes where nothing else is.
ENGINE_SHARE = 0.85


def moe_kernels(moe: MoeConfig, experts: Experts | None) -> Iterator[Derived]:
    """Derive which of Transformer Engine's kernels for experts (`actor.moe.fuse_…`) are used."""
    if experts is None:
        return
    engine, num_groups = transformer_engine_version(), experts.routing.num_groups if experts.routing is not None else 1
    for name in FUSED_SINCE:
        obstacle = fusion_obstacle(name, moe, engine=engine, num_groups=num_groups)
        reason = obstacle or "Transformer Engine has the kernel"
        yield Derived(key=f"actor.moe.{name}", value=obstacle is None, reason=reason)


def overlaps(actor: ActorConfig) -> Iterator[Derived]:
    """Derive which of the actor's communication overlaps with computation, if any does."""
    if actor.layout.overlaps_p2p:
        reason = "interleaved stages compute while they send"
        yield Derived(key="actor.layout.overlap_p2p", value=True, reason=reason)
    if actor.optimizer.overlaps_param_gather:
        reason = "on CUDA replicas gather their shards in the next forward pass"
        yield Derived(key="actor.optimizer.overlap_param_gather", value=True, reason=reason)


def engine_share(
    placement: PlacementConfig,
    layouts: Mapping[LayoutConfig, Sequence[RoleSpec]],
    shards: Sequence[ShardPlan],
    device_bytes: int | None,
) -> Derived | None:
    """Derive `rollout.engine.gpu_memory_utilization`; None without a device of known size, such as on CPUs."""
    if device_bytes is None:
        return None
    value, reason = ENGINE_SHARE, "engines have devices of their own"
    if layouts and placement.mode == "colocated":
        reason = "nothing else is on the devices while engines generate"
        if not placement.offload:
            most, phase = most_bytes(plan_devices(layouts, shards, None, offload=False))
            # If this is too little, vLLM says so.
            value = max(0.05, share_beside(most, device_bytes))
            reason = f"the trainer, which stays, takes {most / 2**30:.2f} of {device_bytes / 2**30:.2f} GiB ({phase})"
    return Derived(key="rollout.engine.gpu_memory_utilization", value=value, reason=reason)


def usable_bytes(device_bytes: int, *, shared: bool) -> int:
    """Return what a device has for a plan's bytes beside its processes' own; shared: an engine is there too.

    Never less than `FILL`.
    """
    return max(int(FILL * device_bytes), int(REPORTED * device_bytes) - (1 + shared) * PROCESS_BYTES)


def share_beside(num_bytes: int, device_bytes: int) -> float:
    """Return the share of a device's memory that is left to an engine beside that many bytes, in steps of 0.05."""
    return min(ENGINE_SHARE, math.floor((FILL * device_bytes - num_bytes) / device_bytes * 20) / 20)


def smallest_device() -> int | None:
    """Return the memory of this machine's smallest device in bytes; None if it has none."""
    return min((int(device.memory_gib * 2**30) for device in known_devices()), default=None)

"""Derive what a run uses for settings that are null, from the memory of its devices: engines' share of it, and what
backward has to compute again for a plan to fit.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from megarl.config.derived import Derived
from megarl.config.generation import PlacementConfig
from megarl.config.layout import LayoutConfig
from megarl.config.models import (
    FUSED_SINCE,
    ActorConfig,
    MoeConfig,
    fusion_obstacle,
    groups_experts,
    transformer_engine_version,
)
from megarl.config.recompute import RecomputeConfig, RecomputedModule
from megarl.config.target import known_devices
from megarl.host.device.platform import platform
from megarl.plan.devices import most_bytes, plan_devices
from megarl.plan.run_plan import EnginePlan, ShardPlan
from megarl.record.performance import attended, forward_flops
from megarl.types.messages import Role, RoleSpec
from megarl.weights.dims import Experts
from megarl.weights.families import Dims, ModelSpec

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
    placement: PlacementConfig, roles: Sequence[RoleSpec], shards: Sequence[ShardPlan], device_bytes: int | None
) -> Derived | None:
    """Derive `rollout.engine.gpu_memory_utilization`; None without a device of known size, such as on CPUs."""
    if device_bytes is None:
        return None
    value, reason = ENGINE_SHARE, "engines have devices of their own"
    if roles and placement.mode == "colocated":
        reason = "nothing else is on the devices while engines generate"
        if not placement.offload:
            most, phase = most_bytes(plan_devices(roles, shards, None, offload=False))
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


# Parts of layers that backward may compute again, if the model has them.
_PARTS: tuple[tuple[RecomputedModule, ...], ...] = (
    ("moe_act", "layernorm"),
    ("mla_up_proj",),
    ("mlp",),
    ("moe",),
    ("moe", "mla_up_proj"),
)


def fitting_ways(
    dims: Dims, layout: LayoutConfig, fits: Callable[[RecomputeConfig], bool], *, groups_experts: bool = True
) -> list[RecomputeConfig]:
    """List the ways to recompute that fit and may be the cheapest: nothing; else parts of layers, or the fewest layers.

    groups_experts: whether experts are multiplied in one product, within which alone Megatron recomputes moe_act.
    """
    if fits(nothing := RecomputeConfig()):
        return [nothing]
    if not fits(full := RecomputeConfig(recompute="full")):
        return []
    most = max(map(max, layout.chunk_layers(dims.num_layers)))
    fewer = [replace(full, recompute_layers=count) for count in range(1, most)]
    fewest = bisect_left(fewer, True, key=fits)
    present = {"mlp": dims.experts is None, "mla_up_proj": dims.latent is not None}
    present["moe_act"] = dims.experts is not None and groups_experts
    parts = [
        RecomputeConfig(recompute="selective", recompute_modules=each)
        for each in _PARTS
        if all(present.get(part, dims.experts is not None) for part in each)
    ]
    return [full, *fewer[fewest : fewest + 1], *filter(fits, parts)]


def recomputed_share(recompute: RecomputeConfig, dims: Dims, *, num_tokens: int, chunk_layers: float) -> float:
    """Return the share of the layers' forward pass over rows of `num_tokens` tokens that backward computes again.

    chunk_layers: the layers of a model chunk. Norms and other element-wise work cost nothing.
    """
    if recompute.recompute == "full":
        return min(1.0, (recompute.recompute_layers or chunk_layers) / chunk_layers)
    experts, latent = dims.experts, dims.latent
    num_sparse = len(experts.layers) if experts else 0
    # Multiplications per token in all layers.
    products = {"mlp": 3 * dims.hidden * dims.ffn * (dims.num_layers - num_sparse)}
    if experts is not None:
        products["shared_experts"] = 3 * dims.hidden * experts.shared_ffn * num_sparse
        routed = dims.hidden * (3 * experts.per_token * experts.ffn + experts.num) * num_sparse
        products["moe"] = routed + products["shared_experts"]
    if latent is not None:
        heads = latent.q_latent * dims.dim("q") + latent.kv_latent * dims.dim("keys_and_values")
        products["mla_up_proj"] = heads * dims.num_layers
    products["core_attn"] = dims.dim("q") * attended(dims, num_tokens) // num_tokens
    modules = recompute.modules_of(has_dense=num_sparse < dims.num_layers, has_experts=num_sparse > 0)
    flops = 2 * num_tokens * sum(products.get(name, 0) for name in modules)
    return flops / forward_flops(dims, num_tokens=num_tokens, num_head_tokens=0)


def with_way(roles: Iterable[RoleSpec], way: RecomputeConfig) -> tuple[RoleSpec, ...]:
    """Return roles of which those that leave it open recompute in this way."""
    return tuple(
        replace(role, settings=replace(role.settings, **way.recompute_settings()))
        if role.settings.recompute == "auto"
        else role
        for role in roles
    )


def choose_recompute(
    roles: Sequence[RoleSpec],
    specs: Mapping[Role, ModelSpec],
    shards_of: Callable[[Sequence[RoleSpec]], list[ShardPlan]],
    device_bytes: int | None,
    engine_beside: Callable[[list[ShardPlan], int], EnginePlan | None] | None = None,
    *,
    offload: bool = False,
) -> Iterator[Derived]:
    """Derive `actor.recompute` and what it takes, where that is auto: the least that fits, or everything.

    shards_of: plans what the roles hold. engine_beside: plans an engine that stays on the devices; None if it lacks
    room. offload: whether other roles leave the devices.
    """
    open_ = next((role for role in roles if role.trainable and role.settings.recompute == "auto"), None)
    if open_ is None:
        return
    if device_bytes is None and platform().name == "cuda":
        device_bytes = H100_BYTES
    way, reason = RecomputeConfig(recompute="full"), "no device is known whose memory would tell what fits"
    if (size := device_bytes) is not None:
        dims, peaks = specs[open_.role].dims, dict[RecomputeConfig, tuple[int, str]]()

        def fits(way: RecomputeConfig) -> bool:
            settled = with_way(roles, way)
            shards = shards_of(settled)
            engine = None if engine_beside is None else engine_beside(shards, size)
            peaks[way] = most_bytes(plan_devices(settled, shards, engine, offload=offload))
            return peaks[way][0] <= FILL * size and (engine is not None or engine_beside is None)

        found = fitting_ways(dims, open_.layout, fits, groups_experts=groups_experts(open_.settings.moe))
        tokens, chunk = open_.settings.micro_batch_tokens, max(map(max, open_.layout.chunk_layers(dims.num_layers)))
        # The first of equals: whole layers come before parts of them.
        way = min(found or [way], key=lambda each: recomputed_share(each, dims, num_tokens=tokens, chunk_layers=chunk))
        most, phase = peaks[way]
        verdict = "the least that fits" if found else "even so too much"
        reason = f"{verdict}: {most / 2**30:.1f} of {size / 2**30:.0f} GiB ({phase})"
    for name, value in way.recompute_settings().items():
        if value != getattr(RecomputeConfig(), name) or name == "recompute":
            yield Derived(key=f"actor.{name}", value=value, reason=reason)

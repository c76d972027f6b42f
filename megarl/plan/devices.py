"""Estimate the memory of every device in each phase of a step, from the shards that the models of a run have there."""

from collections.abc import Iterable, Sequence
from itertools import product

from megarl.cluster.offloading import ENGINE, KV_CACHE, SYNC, WEIGHTS, Resident, forward, step_phases, updating
from megarl.cluster.roles import by_layout
from megarl.plan import memory as bytes_of
from megarl.plan.memory import DTYPE_BYTES
from megarl.plan.run_plan import DevicePlan, EnginePlan, PhasePlan, ShardPlan
from megarl.types.messages import Head, Part, Role, RoleSpec
from megarl.weights.families import ModelSpec
from megarl.weights.shards import (
    num_local_experts,
    num_stage_layers,
    num_stage_parameters,
    num_trained_parameters,
    padded_vocab,
    place_of,
)


def plan_shard(
    role: RoleSpec, spec: ModelSpec, stage: int, *, num_micro_batches: int, computes_pair_kl: bool = False
) -> ShardPlan:
    """Plan a role's shard of one pipeline stage.

    num_micro_batches: micro-batches of one optimizer step on one replica. computes_pair_kl: whether a pass computes the
    KL between rows and their hinted copies, so that both share a micro-batch.
    """
    settings, layout, dtype_bytes = role.settings, role.layout, DTYPE_BYTES[role.model.dtype]
    scalar, multiple = role.head is Head.SCALAR, role.model.vocab_multiple
    num = num_stage_parameters(spec, layout, stage, vocab_multiple=multiple, scalar_head=scalar)
    trained = num_trained_parameters(
        spec, layout, stage, vocab_multiple=multiple, scalar_head=scalar, lora=settings.lora
    )
    num_held = num.total if role.base_of is None else 0
    num_held += 0 if settings.lora is None else trained.total
    num_ranks, num_tokens = layout.world_size // layout.pp, settings.micro_batch_tokens // layout.cp
    resident = {Part.PARAMS: bytes_of.weight_bytes(num_held, dtype_bytes)} if role.has_memory else {}
    if role.update_rate is not None:
        resident[Part.PARAMS] += bytes_of.average_bytes(trained.total, dtype_bytes)
    activations = on_host = 0
    if role.trainable:
        shards = (layout.dp * layout.cp, layout.expert_dp) if settings.optimizer.distributed else (1, 1)
        resident[Part.GRADS] = bytes_of.gradient_bytes(trained.total, dtype_bytes, settings.optimizer)
        resident[Part.OPTIMIZER] = sum(
            bytes_of.optimizer_bytes(count, dtype_bytes, num_shards, settings.optimizer)
            for count, num_shards in zip((trained.others, trained.experts), shards, strict=True)
        )
        on_host = sum(
            bytes_of.optimizer_host_bytes(count, num_shards, settings.optimizer)
            for count, num_shards in zip((trained.others, trained.experts), shards, strict=True)
        ) + role.kept_versions * bytes_of.weight_bytes(trained.total, dtype_bytes)
        activations = bytes_of.activation_bytes(
            spec.dims,
            layout,
            stage,
            recompute=settings,
            num_tokens=num_tokens,
            num_micro_batches=num_micro_batches,
            dtype_bytes=dtype_bytes,
        )
        activations += _image_bytes(role, spec, stage, num_tokens, num_backward=min(layout.pp, num_micro_batches))
    return ShardPlan(
        role=role.role.value,
        stage=stage,
        ranks=tuple(range(stage * num_ranks, (stage + 1) * num_ranks)),
        num_layers=num_stage_layers(layout, spec.dims.num_layers)[stage],
        num_parameters=num.total,
        num_expert_parameters=num.experts,
        num_experts=num_local_experts(spec, layout),
        num_trained_parameters=trained.total if role.changes else 0,
        num_trained_expert_parameters=trained.experts if role.changes else 0,
        resident={part.value: size for part, size in resident.items()},
        on_host=on_host,
        activations=activations,
        head=_head_bytes(role, spec, stage, num_tokens, backward=True) if role.trainable else 0,
        forward=_forward_bytes(role, spec, stage, num_tokens, paired=computes_pair_kl),
    )


def _forward_bytes(role: RoleSpec, spec: ModelSpec, stage: int, num_tokens: int, *, paired: bool) -> int:
    # Without gradients one layer's activations live at a time.
    one_layer = bytes_of.layer_activation_bytes(
        spec.dims, role.layout, num_tokens=num_tokens, dtype_bytes=DTYPE_BYTES[role.model.dtype]
    )
    images = _image_bytes(role, spec, stage, num_tokens)
    return max(one_layer, images) + _head_bytes(role, spec, stage, num_tokens, backward=False, paired=paired)


def _image_bytes(role: RoleSpec, spec: ModelSpec, stage: int, num_tokens: int, *, num_backward: int = 0) -> int:
    """Return what a tower takes for micro-batches of images alone; it is whole on each rank. num_backward: those that
    wait for backward.
    """
    if spec.tower is None or stage:
        return 0
    part = spec.tower.part if num_backward else "none"
    return DTYPE_BYTES[role.model.dtype] * spec.tower.work.num_kept(num_tokens, part, max(1, num_backward))


def _head_bytes(
    role: RoleSpec, spec: ModelSpec, stage: int, num_tokens: int, *, backward: bool, paired: bool = False
) -> int:
    if stage != role.layout.pp - 1 or role.head is not Head.LM:
        return 0
    dtype_bytes = DTYPE_BYTES[role.model.dtype]
    # The output weights of versions that sampled wait on the device while it compares with them.
    versions = 1 + role.kept_versions if backward and role.kept_versions else 0
    rows = padded_vocab(spec.dims.vocab, role.layout, role.model.vocab_multiple) // role.layout.tp
    sums_float32 = role.settings.optimizer.grad_reduce_in_fp32 or dtype_bytes == bytes_of.GRADIENT_BYTES
    return versions * bytes_of.weight_bytes(rows * spec.dims.hidden, dtype_bytes) + bytes_of.head_bytes(
        spec.dims,
        role.layout,
        vocab_multiple=role.model.vocab_multiple,
        head=role.settings.head,
        num_tokens=num_tokens,
        dtype_bytes=dtype_bytes,
        backward=backward,
        paired=paired,
        sums_apart=backward and not sums_float32 and role.settings.lora is None,
    )


def checkpoint_host_bytes(
    roles: Sequence[RoleSpec], shards: Sequence[ShardPlan], ranks: Iterable[int], *, portable: bool
) -> int:
    """Estimate the host memory in bytes that a node needs while its trainer ranks write a checkpoint.

    shards: one plan for each role and pipeline stage. ranks: the global ranks on this node. portable: whether the
    checkpoint can be read under another layout. A portable one takes more memory, as some ranks gather the state of
    others.
    """
    by_place = {(shard.role, shard.stage): shard for shard in shards}
    total = 0
    for rank, (layout, hosted) in product(ranks, by_layout(roles).items()):
        if rank >= layout.world_size:
            continue
        place, num_ranks = place_of(layout, rank), layout.world_size // layout.pp
        for role in (role for role in hosted if role.changes):
            held, dtype_bytes = by_place[role.role.value, place.pp], DTYPE_BYTES[role.model.dtype]
            experts = held.num_trained_expert_parameters
            # Ranks of a stage that have the same expert shard come together, and its replicas after each other.
            parts = (
                (held.num_trained_parameters - experts, layout.dp * layout.cp, place.dp * layout.cp + place.cp),
                (experts, layout.expert_dp, rank % num_ranks // (layout.ep * layout.etp)),
            )
            for count, num_replicas, replica in parts:
                if role.update_rate is not None:
                    total += bytes_of.weight_bytes(count, bytes_of.AVERAGE_BYTES) if replica == 0 else 0
                    continue
                total += bytes_of.checkpoint_bytes(count, dtype_bytes, num_replicas, shard=replica, portable=portable)
                total += role.kept_versions * bytes_of.weight_bytes(count, dtype_bytes) if replica == 0 else 0
    return total


def plan_devices(
    roles: Sequence[RoleSpec],
    shards: Sequence[ShardPlan],
    engine: EnginePlan | None,
    staged: int = 0,
    *,
    offload: bool,
) -> list[DevicePlan]:
    """Estimate the memory of the actor's devices (rank i uses device i); equal devices share an entry.

    engine: None leaves the engines out. staged: bytes of messages on a device while weights are sent.
    """
    layouts = by_layout(roles)
    by_place = {(shard.role, shard.stage): i for i, shard in enumerate(shards)}
    held: dict[tuple[int, ...], list[int]] = {}
    for device in range(next(iter(layouts)).world_size):
        present = tuple(
            by_place[role.role.value, place_of(layout, device).pp]
            for layout, hosted in layouts.items()
            if device < layout.world_size
            for role in hosted
        )
        held.setdefault(present, []).append(device)
    ordered = [role for hosted in layouts.values() for role in hosted]
    return [
        _device(ordered, [shards[i] for i in present], engine, devices, staged, offload=offload)
        for present, devices in held.items()
    ]


def _device(
    roles: Sequence[RoleSpec],
    shards: Sequence[ShardPlan],
    engine: EnginePlan | None,
    devices: Sequence[int],
    staged: int,
    *,
    offload: bool,
) -> DevicePlan:
    sizes = {Resident(shard.role, part): size for shard in shards for part, size in shard.resident.items()}
    resident = sum(sizes.values())
    offloaded = resident - sum(size for part, size in sizes.items() if part.part == Part.GRADS)
    if engine is not None and engine.shares_devices:
        sizes |= {Resident(ENGINE, WEIGHTS): engine.weights, Resident(ENGINE, KV_CACHE): engine.kv_cache or 0}
    added = {SYNC.name: staged}
    for shard in shards:
        added[forward(Role(shard.role)).name] = shard.forward
        added[updating(Role(shard.role)).name] = shard.activations + shard.head
    for shard in (s for role in roles if role.in_update_of is Role.ACTOR for s in shards if s.role == role.role.value):
        added[updating(Role.ACTOR).name] += shard.forward
    phases = {}
    for phase in step_phases(roles):
        present = phase.needs if offload else sizes.keys()
        held = {part: size for part, size in sizes.items() if part in present}
        of_engine = sum(size for part, size in held.items() if part.owner == ENGINE)
        phases[phase.name] = PhasePlan(
            trainer=sum(held.values()) - of_engine, activations=added.get(phase.name, 0), engine=of_engine
        )
    on_host = sum(shard.on_host for shard in shards)
    return DevicePlan(devices=tuple(devices), resident=resident, offloaded=offloaded, phases=phases, on_host=on_host)


def most_bytes(devices: Iterable[DevicePlan]) -> tuple[int, str]:
    """Return the bytes on the fullest device, and in which phase."""
    return max((phase.total, name) for device in devices for name, phase in device.phases.items())

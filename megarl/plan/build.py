"""A run's plan: layout, roles, steps, memory by phase, bytes per sync. Starts nothing and opens no weights or data."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megarl.algos.build import build_algorithm
from megarl.config.check import check_model, check_train
from megarl.config.schema import Config
from megarl.data.packing import plan_micro_batches
from megarl.memory import ENGINE, KV_CACHE, WEIGHTS, Resident, scoring, step_phases, updating
from megarl.parallel.messages import Head, Part, Role, RoleSpec
from megarl.parallel.weights.families import ModelSpec, read_model_spec
from megarl.placement import plan_placement
from megarl.plan import memory as bytes_of
from megarl.plan.memory import DTYPE_BYTES
from megarl.plan.run_plan import EnginePlan, NodePlan, PhasePlan, RolePlan, RunPlan, StagePlan, StepPlan
from megarl.plan.shards import groups_of, num_stage_layers, num_stage_parameters
from megarl.roles import roles_of


def plan_run(config: Config, *, device_bytes: int | None = None) -> RunPlan:
    """Check a configuration as a run would, and work out what it means. Raises ConfigError.

    Args:
        device_bytes: memory of one device; without it the plan has no size of vLLM's own choice of cache.
    """
    check_train(config)
    algorithm = build_algorithm(config.algo, max_response_tokens=config.rollout.max_response_tokens)
    spec = planned_model(config)
    check_model(config, spec.hf_config)
    roles = roles_of(config, algorithm)
    steps = _steps(config)
    layout = config.actor.layout
    engine = _engine(config, spec, device_bytes)
    stages = tuple(_stage(config, spec, roles, steps, engine, stage) for stage in range(layout.pp))
    return RunPlan(
        run=str(Path(config.run.dir) / config.run.name),
        model_config=str(spec.path / "config.json"),
        layout=asdict(layout),
        nodes=_nodes(config, stages),
        groups={axis: tuple(map(tuple, groups_of(layout, axis))) for axis in ("tp", "cp", "dp", "pp")},
        roles=tuple(_role(role, spec) for role in roles),
        steps=steps,
        stages=stages,
        engine=engine,
        sync_bytes=_model_parameters(spec, Head.LM) * DTYPE_BYTES[config.model.dtype],
        device_bytes=device_bytes,
    )


def planned_model(config: Config) -> ModelSpec:
    """The model at `model.path`, or the published sizes at `model.config_path` while the former is not there."""
    instead = config.model.config_path
    use_instead = instead is not None and not (Path(config.model.path) / "config.json").is_file()
    return read_model_spec(instead if use_instead and instead is not None else config.model.path)


def _model_parameters(spec: ModelSpec, head: Head) -> int:
    shapes = spec.expected_tensors(scalar_head=head is Head.SCALAR).values()
    return sum(map(math.prod, shapes))


def _nodes(config: Config, stages: Sequence[StagePlan]) -> tuple[NodePlan, ...]:
    """The nodes of the trainer, then those that engines have to themselves."""
    placement = plan_placement(config, {"CPU": 1.0}, with_engines=True)
    held = {rank: sum(stage.resident.values()) for stage in stages for rank in stage.ranks}
    nodes = []
    for name, group in placement.groups.items():
        for node in range(group.num_nodes):
            ranks, engines = (
                tuple(
                    i
                    for i, seat in enumerate(seats)
                    if seat.group == name and seat.bundle // group.bundles_per_node == node
                )
                for seats in (placement.ranks, placement.engines)
            )
            offloaded = sum(held[rank] for rank in ranks) if config.placement.offload else 0
            nodes.append(NodePlan(ranks=ranks, engines=engines, offloaded=offloaded))
    return tuple(nodes)


def _role(role: RoleSpec, spec: ModelSpec) -> RolePlan:
    return RolePlan(
        name=str(role.role),
        model_path=role.model.path,
        family=spec.family.name,
        trainable=role.trainable,
        num_parameters=_model_parameters(spec, role.head),
    )


def _steps(config: Config) -> StepPlan:
    trainer, layout = config.trainer, config.actor.layout
    mini = trainer.mini_batch_prompts or trainer.prompts_per_step
    per_step = trainer.num_epochs * (trainer.prompts_per_step // mini)
    rows = mini * config.rollout.num_samples
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    multiple = layout.pp if layout.virtual_pp > 1 else 1
    plan = plan_micro_batches([longest] * rows, layout.dp, config.actor.micro_batch_tokens, multiple=multiple)
    return StepPlan(
        rows_per_step=trainer.prompts_per_step * config.rollout.num_samples,
        rows_per_optimizer_step=rows,
        optimizer_steps_per_step=per_step,
        optimizer_steps=trainer.total_steps * per_step,
        max_row_tokens=longest,
        micro_batch_tokens=config.actor.micro_batch_tokens,
        micro_batches_at_full_length=max(len(batches) for batches in plan),
    )


def _stage(
    config: Config, spec: ModelSpec, roles: Sequence[RoleSpec], steps: StepPlan, engine: EnginePlan, stage: int
) -> StagePlan:
    layout = config.actor.layout
    held = _held(config, spec, roles, stage)
    engine_parts = {Resident(ENGINE, WEIGHTS): engine.weights, Resident(ENGINE, KV_CACHE): engine.kv_cache or 0}
    sizes = held | (engine_parts if engine.shares_devices else {})
    added: dict[str, int] = {}
    passes = {role.role: _pass_bytes(config, role, spec, steps, stage) for role in roles}
    for role, of_pass in passes.items():
        added[scoring(role).name] = of_pass.score
        added[updating(role).name] = of_pass.activations + of_pass.head
    num_ranks = layout.world_size // layout.pp
    return StagePlan(
        stage=stage,
        ranks=tuple(range(stage * num_ranks, (stage + 1) * num_ranks)),
        num_layers=num_stage_layers(layout, spec.dims.num_layers)[stage],
        num_parameters=num_stage_parameters(spec, layout, stage, vocab_multiple=config.model.vocab_multiple),
        resident={f"{part.owner} {part.part}": size for part, size in held.items()},
        activations=passes[Role.ACTOR].activations,
        head=passes[Role.ACTOR].head,
        phases={
            phase.name: _phase(
                sizes, phase.needs if config.placement.offload else sizes.keys(), added.get(phase.name, 0)
            )
            for phase in step_phases(roles)
        },
    )


def _phase(sizes: Mapping[Resident, int], present: Collection[Resident], added: int) -> PhasePlan:
    held = {part: size for part, size in sizes.items() if part in present}
    engine = sum(size for part, size in held.items() if part.owner == ENGINE)
    return PhasePlan(trainer=sum(held.values()) - engine, activations=added, engine=engine)


def _held(config: Config, spec: ModelSpec, roles: Sequence[RoleSpec], stage: int) -> dict[Resident, int]:
    """What a rank of the stage holds between passes, where nothing is offloaded."""
    layout = config.actor.layout
    held: dict[Resident, int] = {}
    for role in roles:
        dtype_bytes = DTYPE_BYTES[role.model.dtype]
        shards = layout.dp * layout.cp if role.settings.optimizer.distributed else 1
        scalar, multiple = role.head is Head.SCALAR, role.model.vocab_multiple
        count = num_stage_parameters(spec, layout, stage, vocab_multiple=multiple, scalar_head=scalar)
        held[Resident(role.role, Part.PARAMS)] = bytes_of.weight_bytes(count, dtype_bytes)
        if role.trainable:
            held[Resident(role.role, Part.GRADS)] = bytes_of.gradient_bytes(count)
            held[Resident(role.role, Part.OPTIMIZER)] = bytes_of.optimizer_bytes(count, dtype_bytes, shards)
    return held


@dataclass(frozen=True, slots=True, kw_only=True)
class _PassBytes:
    """Bytes of an update's layers in flight and of its head, and all that a pass without gradients holds."""

    activations: int
    head: int
    score: int


def _pass_bytes(config: Config, role: RoleSpec, spec: ModelSpec, steps: StepPlan, stage: int) -> _PassBytes:
    settings, layout, dtype_bytes = role.settings, config.actor.layout, DTYPE_BYTES[role.model.dtype]
    num_tokens = settings.micro_batch_tokens // layout.cp
    activations = bytes_of.activation_bytes(
        spec.dims,
        layout,
        stage,
        recompute=settings.recompute,
        num_tokens=num_tokens,
        num_micro_batches=steps.micro_batches_at_full_length,
        dtype_bytes=dtype_bytes,
    )
    # Without gradients one layer's activations live at a time.
    one_layer = bytes_of.layer_activation_bytes(spec.dims, layout, num_tokens=num_tokens, dtype_bytes=dtype_bytes)
    update_head, score_head = (
        bytes_of.head_bytes(
            spec.dims,
            layout,
            vocab_multiple=role.model.vocab_multiple,
            chunk_tokens=settings.head_chunk_tokens,
            num_tokens=num_tokens,
            dtype_bytes=dtype_bytes,
            backward=backward,
        )
        if stage == layout.pp - 1 and role.head is Head.LM
        else 0
        for backward in (True, False)
    )
    return _PassBytes(activations=activations, head=update_head, score=one_layer + score_head)


def _engine(config: Config, spec: ModelSpec, device_bytes: int | None) -> EnginePlan:
    dtype_bytes, engine = DTYPE_BYTES[config.model.dtype], config.rollout.engine
    weights = -(-_model_parameters(spec, Head.LM) * dtype_bytes // engine.tp)
    kv_cache = None if engine.kv_cache_mib is None else engine.kv_cache_mib << 20
    if kv_cache is None and device_bytes is not None:
        kv_cache = max(0, int(engine.gpu_memory_utilization * device_bytes) - weights)
    return EnginePlan(
        num_engines=engine.num_engines,
        tp=engine.tp,
        shares_devices=config.placement.mode == "colocated",
        weights=weights,
        kv_cache=kv_cache,
        kv_bytes_per_token=bytes_of.kv_bytes_per_token(spec.dims, tp=engine.tp, dtype_bytes=dtype_bytes),
    )

"""Size what the ranks and engines of a run hold, from its configuration and config.json."""

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TypeAlias

from megarl.algos.build import algorithm_of
from megarl.cluster.object_store import object_store, routing_bytes
from megarl.cluster.placement import workers_per_node
from megarl.cluster.roles import model_key, roles_of
from megarl.config.batches import batch_counts, max_path_tokens, max_row_tokens, pass_bytes
from megarl.config.check import check_train
from megarl.config.check_model import check_model
from megarl.config.derived import Derived, filled, host_group, left_open
from megarl.config.load import packaged
from megarl.config.lora import sent_alone
from megarl.config.model_names import with_models
from megarl.config.recompute import RecomputeConfig
from megarl.config.schema import ActorConfig, Config
from megarl.data.packing import plan_micro_batches
from megarl.errors import ConfigError
from megarl.host.device.platform import assuming, platform
from megarl.plan import memory as bytes_of
from megarl.plan.devices import plan_devices, plan_shard
from megarl.plan.memory import DTYPE_BYTES
from megarl.plan.recompute import H100_BYTES, choose_recompute, engine_share, moe_kernels, overlaps, with_way
from megarl.plan.run_plan import DevicePlan, EnginePlan, RolePlan, ShardPlan
from megarl.sync.plan.engine_shards import engine_needs, stage_range
from megarl.train.forward import SOURCES, Variant
from megarl.types import TokenQuantity
from megarl.types.messages import Head, Role, RoleSpec
from megarl.weights.adapters import adapter_spec
from megarl.weights.boxes import num_elements
from megarl.weights.dims import Experts
from megarl.weights.families import Dims, ModelSpec, read_model_spec
from megarl.weights.hub import local_model

# The quantities of a token that are computed before updates.
Needs: TypeAlias = frozenset[TokenQuantity]


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedRun:
    """A run: its settings, with what is derived for null ones, its models, shards and engines, if it has any.

    needed: what is computed before updates.
    """

    config: Config
    roles: tuple[RoleSpec, ...]
    specs: Mapping[Role, ModelSpec]
    needed: Collection[TokenQuantity]
    shards: list[ShardPlan]
    engine: EnginePlan | None = None
    derived: tuple[Derived, ...] = ()

    @property
    def actor(self) -> ModelSpec:
        return self.specs[Role.ACTOR]

    @property
    def offloads(self) -> bool:
        """Whether the trainer leaves its devices while engines generate."""
        return self.config.placement.offload and self.engine is not None

    def devices(self, staged: int = 0) -> list[DevicePlan]:
        """Estimate the memory of the actor's devices, as `plan_devices` does."""
        return plan_devices(self.roles, self.shards, self.engine, staged, offload=self.offloads)


def needs_of(config: Config) -> tuple[Needs, tuple[RoleSpec, ...]]:
    """Return what the algorithm of a run requires before updates, and the run's models."""
    required = algorithm_of(config).requires()
    return required, roles_of(config, required)


def size_trainer(config: Config, spec: ModelSpec, needed: Needs) -> SizedRun:
    """Plan what the ranks of a run hold whose models are all as `spec` says; engines are left out."""
    roles = roles_of(config, needed)
    specs = {role.role: spec for role in roles}
    shards = plan_shards(config, roles, specs, needed)
    return SizedRun(config=config, roles=roles, specs=specs, needed=needed, shards=shards)


def size_run(config: Config, device_bytes: int | None = H100_BYTES) -> SizedRun:
    """Check a configuration as a run would, and plan what ranks and engines hold, by config.json alone.

    Raises ConfigError. device_bytes: memory of a GPU, on which the run is then planned, whatever this machine is.
    """
    with nullcontext() if device_bytes is None else assuming("cuda"):
        return _size_here(config, device_bytes)


def _size_here(config: Config, device_bytes: int | None) -> SizedRun:
    check_train(config)
    spared = "" if config.model.config_path is None else "model.path"  # A published config.json is enough.
    config = with_models(config, lambda name, key: name if key == spared else local_model(name, key, weights=False))
    needed, roles = needs_of(config)
    specs: dict[Role, ModelSpec] = {}
    for role in roles:
        path, published = role.model.path, role.model.config_path
        # As long as the model itself is not there, its published config.json is enough.
        if published is not None and not (Path(path) / "config.json").is_file():
            path = packaged(published)
        # Only weights tell the sizes of a tower.
        tower = role.tower if any(Path(path).glob("*.safetensors")) else None
        spec = specs[role.role] = read_model_spec(path, model_key(config, role), tower=tower)
        check_model(config, spec.hf_config, role.role, biased_experts=spec.family.linear_biases)
    config, roles, chosen = settle(config, roles, specs, needed, device_bytes)
    actor, shards = specs[Role.ACTOR], plan_shards(config, roles, specs, needed)
    derived = derive(config, roles, shards, device_bytes, experts=actor.dims.experts)
    config = filled(config, derived)
    return SizedRun(
        config=config,
        roles=tuple(roles),
        specs=specs,
        needed=needed,
        shards=shards,
        engine=plan_engine(config, actor.dims, engine_bytes(config, actor, config.rollout.engine.pp), device_bytes),
        derived=(*chosen, *derived),
    )


def settle(
    config: Config,
    roles: Sequence[RoleSpec],
    specs: Mapping[Role, ModelSpec],
    needed: Collection[TokenQuantity],
    device_bytes: int | None,
) -> tuple[Config, tuple[RoleSpec, ...], tuple[Derived, ...]]:
    """Choose what backward recomputes where that is left open; return settings and roles with it, and what was chosen.

    Engines that stay beside the trainer need room for the rows that are under way.
    """
    stays = config.placement.mode == "colocated" and not config.placement.offload

    def shards_of(roles: Sequence[RoleSpec]) -> list[ShardPlan]:
        return plan_shards(config, roles, specs, needed)

    def engine_beside(shards: Sequence[ShardPlan], size: int) -> EnginePlan | None:
        settings = filled(config, [engine_share(config.placement, roles, shards, size)])
        stage = engine_bytes(config, specs[Role.ACTOR], config.rollout.engine.pp)
        engine = plan_engine(settings, specs[Role.ACTOR].dims, stage, size)
        return engine if (engine.full_rows or 0) >= rows_at_once(config, engine) else None

    beside, offload = engine_beside if stays else None, config.placement.offload
    chosen = tuple(choose_recompute(roles, specs, shards_of, device_bytes, beside, offload=offload))
    settled = filled(config, chosen)
    return settled, with_way(roles, RecomputeConfig(**settled.actor.recompute_settings())), chosen


def derive(
    config: Config,
    roles: Sequence[RoleSpec],
    shards: Sequence[ShardPlan],
    device_bytes: int | None,
    *,
    experts: Experts | None = None,
    command: str = "train",
) -> tuple[Derived, ...]:
    """Derive the settings of `megarl train` or eval that are null, in the order in which a dry run shows them.

    roles, shards: those of the trainer; empty if there is none. device_bytes: memory of a device, if it is known.
    experts: those of the actor.
    """
    found = (
        *moe_kernels(config.actor.moe, experts),
        *(overlaps(config.actor) if roles else ()),
        engine_share(config.placement, roles, shards, device_bytes),
        host_group(config, platform()),
        store_of(config, command),
    )
    return left_open(config, found)


def derive_trainer(config: Config, command: str) -> tuple[Derived, ...]:
    """Derive the settings of a command without engines that are null."""
    return left_open(config, [*overlaps(config.actor), store_of(config, command)])


def store_of(config: Config, command: str, room: int | None = None) -> Derived | None:
    """Derive the size of Ray's object store for a command; room: as for `object_store`."""
    passed = pass_bytes(config, command, routing_bytes(config.model, config.actor.moe))
    return object_store(config.cluster, passed, room=room)


def plan_shards(
    config: Config, roles: Sequence[RoleSpec], specs: Mapping[Role, ModelSpec], needed: Collection[TokenQuantity]
) -> list[ShardPlan]:
    """Plan what every role holds on each rank of each of its pipeline stages."""
    shards = []
    for role in roles:
        num_micro_batches = micro_batches_at_full_length(config, role.settings) if role.trainable else 0
        shards += [
            plan_shard(
                role,
                specs[role.role],
                stage,
                num_micro_batches=num_micro_batches,
                computes_pair_kl=any(
                    SOURCES[s].role is role.role.kind and SOURCES[s].variant is Variant.PAIR for s in needed
                ),
            )
            for stage in range(role.layout.pp)
        ]
    return shards


def micro_batches_at_full_length(config: Config, settings: ActorConfig) -> int:
    """Return one replica's micro-batches in an optimizer step if all rows have the maximum length."""
    layout, rows = settings.layout, batch_counts(config).rows_per_optimizer_step
    multiple, longest = layout.pp if layout.virtual_pp > 1 else 1, max_row_tokens(config)
    if config.algo.distill.teacher == "hint" and config.algo.distill.mode == "exact":
        # Micro-batches have room for rows as their teacher reads them.
        longest = min(longest + config.algo.cpo.hint.max_tokens, settings.micro_batch_tokens)
    return most_micro_batches((longest,), rows, layout.dp, settings.micro_batch_tokens, multiple)


# A search over layouts asks for the same few again and again.
@cache
def most_micro_batches(
    lengths: tuple[int, ...], times: int, dp: int, micro_batch_tokens: int, multiple: int = 1
) -> int:
    """Return the number of micro-batches that one replica has of rows of these lengths, `times` of each."""
    plan = plan_micro_batches(lengths * times, dp, micro_batch_tokens, multiple=multiple)
    return max(len(batches) for batches in plan)


def engine_bytes(config: Config, spec: ModelSpec, num_stages: int) -> int:
    """Count the bytes of weights in the pipeline stage of an engine that has most, on all its devices together.

    A vision tower is on each stage. Adapters that are kept apart from the weights are counted at the rank that vLLM
    makes room for.
    """
    dtype_bytes, rounded = DTYPE_BYTES[config.model.dtype], set[str]()
    if (tower := spec.tower) is not None:
        # Frozen parts are never sent, but are there.
        spec = replace(spec, tower=replace(tower, trained=tower.rules))
    stages, lora = engine_needs(spec, 1, stages=num_stages), sent_alone(config.actor.lora)
    if lora is not None:
        slots = adapter_spec(spec, replace(lora, rank=lora.engine_rank, expert_rank=lora.engine_rank))
        rooms = engine_needs(slots, 1, stages=num_stages)
        stages = [{**stage, **room} for stage, room in zip(stages, rooms, strict=True)]
    if config.rollout.engine.quantization is not None:
        # Routers stay as they are.
        in_layers = (each for each in spec.rules() if each.layer is not None and not each.rule.is_router)
        rounded = {each.name(t.name) for each in in_layers for t in each.rule.tensors if len(t.shape) > 1}
    return max(
        sum(sum(map(num_elements, boxes)) * (1 if name in rounded else dtype_bytes) for name, boxes in stage.items())
        for stage in stages
    )


def rows_at_once(config: Config, engine: EnginePlan) -> int:
    """Return how many rows an engine generates at a time."""
    under_way = batch_counts(config).rows_per_step * (config.rollout.schedule.staleness + 1)
    return min(engine.max_num_seqs, -(-under_way // engine.num_engines))


def plan_engine(config: Config, dims: Dims, stage_bytes: int, device_bytes: int | None) -> EnginePlan:
    """Plan what an engine holds on each of its devices. stage_bytes: what `engine_bytes` counts."""
    dtype_bytes, engine = DTYPE_BYTES[config.model.dtype], config.rollout.engine
    weights = -(-stage_bytes // engine.tp)
    kv_cache = None if engine.kv_cache_mib is None else engine.kv_cache_mib << 20
    if kv_cache is not None and device_bytes is not None and kv_cache > device_bytes:
        room = f"a device has {device_bytes >> 20:,} MiB"
        raise ConfigError(f"rollout.engine.kv_cache_mib: got {engine.kv_cache_mib}, but {room}; lower it")
    if kv_cache is None and device_bytes is not None and engine.gpu_memory_utilization is not None:
        kv_cache = max(0, int(engine.gpu_memory_utilization * device_bytes) - weights)
    row_tokens = max_path_tokens(config)
    per_token = max(
        bytes_of.kv_bytes_per_token(
            dims,
            tp=engine.tp,
            layers=stage_range(dims.num_layers, stage, engine.pp),
            row_tokens=row_tokens,
            dtype_bytes=1 if engine.kv_cache_dtype else dtype_bytes,
        )
        for stage in range(engine.pp)
    )
    return EnginePlan(
        num_engines=engine.num_engines,
        tp=engine.tp,
        pp=engine.pp,
        nodes_per_engine=engine.num_workers
        // workers_per_node(config.placement, engine, num_ranks=config.actor.layout.world_size),
        shares_devices=config.placement.mode == "colocated",
        weights=weights,
        kv_cache=kv_cache,
        kv_bytes_per_token=per_token,
        full_rows=None if kv_cache is None else kv_cache // per_token // row_tokens,
        max_num_seqs=engine.max_num_seqs,
    )


def role_plan(role: RoleSpec, spec: ModelSpec) -> RolePlan:
    """Plan one model of a run: its size, and where its files are."""
    tensors = [tensor for placed in spec.rules() if placed.expert is not None for tensor in placed.rule.tensors]
    return RolePlan(
        name=str(role.role),
        model_path=role.model.path,
        model_config=str(spec.path / "config.json"),
        family=spec.family.name,
        trainable=role.trainable,
        num_parameters=model_parameters(spec, role.head),
        num_expert_parameters=sum(math.prod(spec.dims.dim(symbol) for symbol in tensor.shape) for tensor in tensors),
        update_rate=role.update_rate,
        kept_versions=role.kept_versions,
    )


def model_parameters(spec: ModelSpec, head: Head) -> int:
    """Count the parameters of a whole model with this head, without padding."""
    shapes = spec.expected_tensors(scalar_head=head is Head.SCALAR)
    return sum(math.prod(shape) for shape in shapes.values())

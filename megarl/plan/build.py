"""Compute the plan of a run from its configuration and config.json, without starting anything or opening weights.

If model and data are present, the plan also has the warnings that the run would print about its data.
"""

import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from megarl.cluster.object_store import object_store
from megarl.cluster.placement import NodeGroup, ProcessSlot, devices_per_node, plan_placement, with_judge_servers
from megarl.cluster.roles import by_layout, model_key
from megarl.cluster.sync_plan import bridge_links, bridge_plan, gloo_warning, plan_input_of, sent_spec
from megarl.config.batches import (
    batch_counts,
    max_hinted_row_tokens,
    max_path_tokens,
    max_row_tokens,
    num_actor_steps,
)
from megarl.config.derived import Derived
from megarl.config.lora import sent_alone
from megarl.config.schema import Config, LayoutConfig
from megarl.config.target import target_in_words
from megarl.data.sampler import train_files
from megarl.errors import ConfigError
from megarl.host.device.platform import assuming, platform
from megarl.host.memory import host_memory, listed
from megarl.host.streams import print_lines
from megarl.plan.derive import smallest_device
from megarl.plan.devices import checkpoint_host_bytes, plan_devices
from megarl.plan.memory import DTYPE_BYTES
from megarl.plan.render import GIB, derived_lines, to_json, to_text
from megarl.plan.run_plan import (
    DevicePlan,
    EnginePlan,
    ForwardPlan,
    LayoutPlan,
    NodePlan,
    RunPlan,
    ShardPlan,
    StepPlan,
)
from megarl.plan.sizes import (
    SizedRun,
    derive,
    micro_batches_at_full_length,
    model_parameters,
    most_micro_batches,
    plan_shards,
    role_plan,
    rows_at_once,
    settle,
    size_run,
)
from megarl.record.checkpoints import Command
from megarl.record.performance import forward_flops, peak_of
from megarl.sync.plan.build import Plan, plan_statistics
from megarl.sync.transport.process_plans import most_staging
from megarl.train.forward import Variant, forms_read
from megarl.train.inputs import open_train_inputs, setting_warnings
from megarl.types import TokenQuantity
from megarl.types.messages import Head, Role, RoleSpec
from megarl.weights.families import ModelSpec, read_model_spec
from megarl.weights.shards import groups_of


def print_plan(
    config: Config,
    *,
    device_gib: float | None,
    as_json: bool,
    warnings: Sequence[str],
    forecast: Callable[[Config, int], dict[str, float]],
) -> None:
    """Plan a training run and print the plan, without starting anything.

    warnings: further ones. forecast: returns the seconds of a step by phase, for devices with that many bytes.
    device_gib: the memory of a device, in GiB, by which the plan judges whether the run fits; by default that of the
    smallest device of this machine, if it has any.
    """
    if device_gib is not None and not 0 < device_gib < math.inf:
        raise ConfigError(f"--device-gib: got {device_gib}, expected > 0")
    device_bytes = smallest_device() if device_gib is None else int(device_gib * GIB)
    is_here = device_gib is None and not target_in_words()
    plan = plan_run(config, device_bytes=device_bytes, host_bytes=host_memory() if is_here else None)
    if device_bytes is not None:
        plan = replace(plan, seconds=forecast(config, device_bytes))
    plan = replace(plan, warnings=(*warnings, *plan.warnings))
    if as_json:
        print(to_json(plan))
    else:
        print_lines(*to_text(plan).split("\n"))


def plan_run(
    config: Config, *, device_bytes: int | None = None, host_bytes: int | None = None, with_data: bool = True
) -> RunPlan:
    """Check a configuration as a run would, and make the plan that a dry run shows. Raises ConfigError.

    device_bytes: memory of a GPU, on which the run is then planned, whatever this machine is; without it the KV cache
    has no size in the plan if vLLM chooses it. host_bytes: memory of a node, where that is known. with_data: whether to
    read data that are there.
    """
    with nullcontext() if device_bytes is None else assuming("cuda"):
        run = size_run(config, device_bytes)
        plan = _plan(run, device_bytes, with_data=with_data)
        needs = host_needs(run.config, run.roles, run.shards, run.engine)
    said = () if host_bytes is None else host_warnings(config, needs, host_bytes)
    return replace(plan, warnings=(*plan.warnings, *said))


def _missing_files(config: Config, roles: Sequence[RoleSpec]) -> list[str]:
    """List the models and data files of a run that do not exist, each with its configuration key."""
    models = {model_key(config, role): Path(role.model.path) for role in roles}
    missing = [
        f"{path} ({key})"
        for key, path in models.items()
        if not (path / "config.json").is_file() or not any(path.glob("*.safetensors"))
    ]
    own = [each.path for each in config.rewards.custom.all_functions().values()]
    read = {"data.train": train_files(config.data.train), "data.val": config.data.val, "rewards.custom": own}
    return missing + [f"{file} ({key})" for key, files in read.items() for file in files if not Path(file).is_file()]


def _plan(run: SizedRun, device_bytes: int | None, *, with_data: bool) -> RunPlan:
    config, roles, specs, shards, engine = run.config, run.roles, run.specs, run.shards, run.engine
    actor, layouts, counts = run.actor, by_layout(roles), batch_counts(config)
    plan_input = plan_input_of(actor, config.model, config.actor, config.rollout.engine, config.sync)
    bridge, missing = bridge_plan(plan_input, config.rollout.engine, config.placement), _missing_files(config, roles)
    staged = most_staging(bridge, config.sync)
    devices = plan_devices(layouts, shards, engine, staged.device, offload=config.placement.offload)
    inputs = None if missing or not with_data else open_train_inputs(config)
    read = forms_read(config.algo.distill, roles, run.needed)
    return RunPlan(
        run=str(Path(config.run.dir) / config.run.name),
        roles=tuple(role_plan(role, specs[role.role]) for role in roles),
        layouts=tuple(
            LayoutPlan(
                roles=tuple(role.role.value for role in hosted),
                num_ranks=layout.world_size,
                layout=asdict(layout),
                groups={axis: tuple(map(tuple, groups_of(layout, axis))) for axis in ("tp", "cp", "dp", "pp")},
            )
            for layout, hosted in layouts.items()
        ),
        nodes=plan_nodes(config, engine, devices, layouts, shards),
        steps=StepPlan(
            rows_per_step=counts.rows_per_step,
            rows_per_optimizer_step=counts.rows_per_optimizer_step,
            optimizer_steps_per_step=counts.optimizer_steps_per_step,
            optimizer_steps=num_actor_steps(config, has_critic=Role.CRITIC in specs) * counts.optimizer_steps_per_step,
            max_row_tokens=max_row_tokens(config),
            micro_batch_tokens=config.actor.micro_batch_tokens,
            micro_batches_at_full_length=micro_batches_at_full_length(config, config.actor),
            forward=tuple(_forward(config, role, specs[role.role], forms) for role, forms in read),
        ),
        shards=tuple(shards),
        devices=tuple(devices),
        engine=engine,
        sync_bytes=model_parameters(sent_spec(config.actor.lora, actor), Head.LM) * DTYPE_BYTES[config.model.dtype],
        bridge=plan_statistics(bridge),
        links=bridge_links(config.sync, bridge, platform()),
        staging=staged,
        device_bytes=device_bytes,
        derived=run.derived,
        warnings=(*(setting_warnings(config) if inputs is None else inputs.warnings), *_costs(config, engine, bridge)),
        missing=tuple(missing),
        hints=dict(inputs.hint_survey.total) if inputs is not None and inputs.hint_survey is not None else {},
    )


def settle_run(
    config: Config, roles: Sequence[RoleSpec], needed: Collection[TokenQuantity]
) -> tuple[Config, tuple[RoleSpec, ...]]:
    """Return settings and models of a run in which nothing is auto that this machine decides; print what it chose."""
    specs = {role.role: read_model_spec(role.model.path, model_key(config, role), tower=role.tower) for role in roles}
    config, settled, chosen = settle(config, roles, specs, needed, smallest_device())
    print_lines(*derived_lines(chosen))
    return config, settled


def derive_run(
    config: Config, roles: Sequence[RoleSpec], needed: Collection[TokenQuantity], *, command: str = "train"
) -> tuple[Derived, ...]:
    """Derive what a run on this machine uses for settings that are null. needed: what is computed before updates."""
    specs = {role.role: read_model_spec(role.model.path, model_key(config, role), tower=role.tower) for role in roles}
    shards = plan_shards(config, roles, specs, needed)
    experts = specs[Role.ACTOR].dims.experts if specs else None
    return derive(config, by_layout(roles), shards, smallest_device(), experts=experts, command=command)


def _costs(config: Config, engine: EnginePlan, bridge: Plan) -> Iterator[str]:
    """Warn of weights that travel slowly, and of engines whose cache is too small for what they are given."""
    if warning := gloo_warning(bridge, config.sync, platform()):
        yield warning
    at_once = rows_at_once(config, engine)
    if engine.full_rows is not None and engine.full_rows < at_once:
        yield (
            f"rollout.engine.max_num_seqs: got {engine.max_num_seqs}, but the KV cache of an engine holds "
            f"{engine.full_rows} rows of full length ({max_path_tokens(config):,} tokens), and vLLM drops what does "
            "not fit and computes it again; lower it, or give engines more memory (tp, pp, kv_cache_dtype, placement)"
        )


def plan_nodes(
    config: Config,
    engine: EnginePlan | None,
    devices: Sequence[DevicePlan],
    layouts: Mapping[LayoutConfig, Sequence[RoleSpec]],
    shards: Sequence[ShardPlan],
) -> tuple[NodePlan, ...]:
    """List the trainer's nodes, then, if there is an engine, those that only engines use, judges', environments'."""
    device = {"CPU": 1.0}
    num_ranks = config.actor.layout.world_size
    with_engines = engine is not None
    placement = plan_placement(config.placement, config.rollout.engine, num_ranks, device, with_engines=with_engines)
    placement = with_judge_servers(placement, config.rewards.judge_servers if with_engines else {}, device)
    moves = config.placement.offload and with_engines
    # Engines that have read their weights themselves keep them on the host while they sleep.
    asleep = engine.weights if engine and sent_alone(config.actor.lora) is not None and engine.shares_devices else 0
    held = {
        device: alike.on_host + (alike.offloaded + asleep if moves else 0)
        for alike in devices
        for device in alike.devices
    }
    nodes = []
    for name, group in placement.groups.items():
        for node in range(group.num_nodes):
            here = partial(_numbers_on, name, group, node)
            ranks = here(placement.ranks)
            checkpoint, portable = (
                checkpoint_host_bytes(layouts, shards, ranks, portable=portable) for portable in (False, True)
            )
            nodes.append(
                NodePlan(
                    ranks=ranks,
                    engines=here(placement.engines),
                    offloaded=sum(held[rank] for rank in ranks),
                    checkpoint=checkpoint,
                    portable_checkpoint=portable,
                    judge_servers={key: found for key, slots in placement.judges.items() if (found := here(slots))},
                )
            )
    alone = NodePlan(ranks=(), engines=(), offloaded=0, checkpoint=0, portable_checkpoint=0)
    cfg = config.environment
    every = [range(node, cfg.hosts, cfg.nodes) for node in range(cfg.nodes if with_engines else 0)]
    return (*nodes, *(replace(alone, environments=tuple(each)) for each in every))


def host_needs(
    config: Config,
    roles: Sequence[RoleSpec],
    shards: Sequence[ShardPlan],
    engine: EnginePlan | None,
    command: Command = "train",
) -> dict[str, int]:
    """Return the bytes of host memory that the fullest node needs at least, by what needs them."""
    layouts, offload = by_layout(roles), config.placement.offload and engine is not None
    devices = plan_devices(layouts, shards, engine, offload=offload)
    nodes = plan_nodes(config, engine, devices, layouts, shards)
    fullest, held = max(nodes, key=lambda node: (node.offloaded, len(node.ranks))), {}
    if platform().name == "cpu":
        peaks = {i: max(phase.total for phase in each.phases.values()) for each in devices for i in each.devices}
        held["ranks, and engines beside them"] = sum(peaks[rank] for rank in fullest.ranks)
    store = object_store(config, command, room=1 << 60)
    return {
        **held,
        "the offloaded trainer": fullest.offloaded,
        "a checkpoint in the making": fullest.portable_checkpoint if config.checkpoint.portable else fullest.checkpoint,
        "Ray's object store": store.value << 20 if store and isinstance(store.value, int) else 0,
    }


def _numbers_on(name: str, group: NodeGroup, node: int, slots: Sequence[ProcessSlot]) -> tuple[int, ...]:
    """Return which of the processes with these slots are on a node of the group `name`, or have a part there."""
    here, per_node = (name, node), group.bundles_per_node
    return tuple(
        i
        for i, slot in enumerate(slots)
        if any((part.group, part.bundle // per_node) == here for part in (slot, *slot.further))
    )


def host_warnings(config: Config, needs: Mapping[str, int], host_bytes: int) -> Iterator[str]:
    """Warn if this host, with that much memory, has less than `host_needs` counts, or fewer CPUs than ranks."""
    if sum(needs.values()) > host_bytes:
        yield (
            f"host memory: a node needs at least {listed(needs)}, but this host has {host_bytes / 2**30:,.0f}; use "
            "more or larger nodes or a smaller model; --device-gib plans for others"
        )
    num_ranks = devices_per_node(config.placement.trainer, config.actor.layout.world_size)
    if platform().name == "cpu" and num_ranks > (num_cpus := len(os.sched_getaffinity(0))):
        yield f"actor.layout: {num_ranks} ranks on a node take turns on the {num_cpus} CPUs of this host; use fewer"


def start_warnings(config: Config) -> list[str]:
    """List what `host_warnings` has to say of this host, before a run starts on it."""
    run = size_run(config, smallest_device())
    return list(host_warnings(config, host_needs(run.config, run.roles, run.shards, run.engine), host_memory()))


def _forward(config: Config, role: RoleSpec, spec: ModelSpec, variants: AbstractSet[Variant]) -> ForwardPlan:
    """Plan a role's pass that computes log-probs or values of all rows of a step, plain or with a hint."""
    num_rows, plain = batch_counts(config).rows_per_step, max_row_tokens(config)
    hinted = min(plain + config.algo.cpo.hint.max_tokens, max_hinted_row_tokens(config, spec.max_positions))
    lengths = {"plain": plain} if variants & {Variant.PLAIN, Variant.PAIR} else {}
    if variants & {Variant.HINTED, Variant.SHUFFLED, Variant.PAIR}:
        lengths["hinted"] = hinted
    if Variant.SHUFFLED in variants:
        lengths["shuffled"] = hinted
    # A row and its twin are in one micro-batch.
    packed = (sum(lengths.values()),) if Variant.PAIR in variants else tuple(lengths.values())
    flops = num_rows * sum(
        forward_flops(spec.dims, num_tokens=length, num_head_tokens=config.rollout.max_response_tokens)
        for length in lengths.values()
    )
    peak = peak_of(config.logging, config.model.dtype)
    return ForwardPlan(
        role=role.role.value,
        rows=dict.fromkeys(lengths, num_rows),
        max_row_tokens=lengths,
        micro_batches=most_micro_batches(packed, num_rows, role.layout.dp, role.settings.micro_batch_tokens),
        tokens=num_rows * sum(lengths.values()),
        flops=flops,
        seconds_at_peak=None if peak is None else flops / (peak * 1e12 * role.layout.world_size),
    )

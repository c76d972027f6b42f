"""Compute the plan of a run from its configuration and config.json, without starting anything or opening weights, and
that of supervised training also from its data.

If model and data are present, the plan also has the warnings that the run would print about its data.
"""

import json
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path

from megarl.cluster.roles import by_layout, model_key
from megarl.cluster.sync_plan import bridge_links, bridge_plan, gloo_warning, plan_input_of, sent_spec
from megarl.config.batches import (
    batch_counts,
    max_hinted_row_tokens,
    max_path_tokens,
    max_row_tokens,
    num_actor_steps,
)
from megarl.config.derived import Derived, filled
from megarl.config.recompute import RecomputeConfig
from megarl.config.schema import Config
from megarl.config.target import target_in_words
from megarl.data.demonstrations import SftDataset
from megarl.data.packing import plan_micro_batches
from megarl.data.sampler import train_files
from megarl.errors import ConfigError
from megarl.host.device.platform import assuming, platform
from megarl.host.memory import host_memory
from megarl.host.streams import print_lines
from megarl.plan.devices import plan_shard
from megarl.plan.hosts import host_needs, host_warnings, plan_nodes
from megarl.plan.memory import DTYPE_BYTES
from megarl.plan.recompute import choose_recompute, smallest_device, with_way
from megarl.plan.render import GIB, derived_lines, supervised_lines, to_json, to_text
from megarl.plan.run_plan import (
    EnginePlan,
    ForwardPlan,
    LayoutPlan,
    RunPlan,
    ShardPlan,
    StepPlan,
    SupervisedPlan,
)
from megarl.plan.sizes import (
    SizedRun,
    derive,
    derive_trainer,
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
from megarl.train.supervised_inputs import Examples
from megarl.train.tasks import SUPERVISED, OpenedTask
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
    forecast: Callable[[SizedRun], dict[str, float]],
) -> None:
    """Plan a training run and print the plan, without starting anything.

    warnings: further ones. forecast: returns the seconds of a step by phase, on devices whose memory is known.
    device_gib: that memory in GiB, by which the plan judges whether the run fits; by default that of the smallest
    device of this machine, if it has any.
    """
    if device_gib is not None and not 0 < device_gib < math.inf:
        raise ConfigError(f"--device-gib: got {device_gib}, expected > 0")
    device_bytes = smallest_device() if device_gib is None else int(device_gib * GIB)
    is_here = device_gib is None and not target_in_words()
    host_bytes = host_memory() if is_here else None
    plan = plan_run(config, device_bytes=device_bytes, host_bytes=host_bytes, forecast=forecast)
    plan = replace(plan, warnings=(*warnings, *plan.warnings))
    if as_json:
        print(to_json(plan))
    else:
        print_lines(*to_text(plan).split("\n"))


def plan_run(
    config: Config,
    *,
    device_bytes: int | None = None,
    host_bytes: int | None = None,
    with_data: bool = True,
    forecast: Callable[[SizedRun], dict[str, float]] | None = None,
) -> RunPlan:
    """Check a configuration as a run would, and make the plan that a dry run shows. Raises ConfigError.

    device_bytes: as for `size_run`; without it the KV cache has no size in the plan if vLLM chooses it, and nothing is
    forecast. host_bytes: memory of a node, where that is known. with_data: whether to read data that are there.
    """
    with nullcontext() if device_bytes is None else assuming("cuda"):
        run = size_run(config, device_bytes)
        plan = _plan(run, device_bytes, with_data=with_data)
        seconds = {} if forecast is None or device_bytes is None else forecast(run)
        needs = host_needs(run)
    said = () if host_bytes is None else host_warnings(config.placement, config.actor.layout, needs, host_bytes)
    return replace(plan, seconds=seconds, warnings=(*plan.warnings, *said))


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
    config, roles, specs, engine = run.config, run.roles, run.specs, run.engine
    assert engine is not None
    actor, counts = run.actor, batch_counts(config)
    plan_input = plan_input_of(actor, config.model, config.actor, config.rollout.engine, config.sync)
    bridge, missing = bridge_plan(plan_input, config.rollout.engine, config.placement), _missing_files(config, roles)
    staged = most_staging(bridge, config.sync)
    devices = run.devices(staged.device)
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
            for layout, hosted in by_layout(roles).items()
        ),
        nodes=plan_nodes(run, devices),
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
        shards=tuple(run.shards),
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
    return derive(config, roles, shards, smallest_device(), experts=experts, command=command)


def start_warnings(config: Config) -> list[str]:
    """List what `host_warnings` has to say of this host, before a run starts on it."""
    needs = host_needs(size_run(config, smallest_device()))
    return list(host_warnings(config.placement, config.actor.layout, needs, host_memory()))


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


def print_supervised_plan(command: Command, config: Config, *, as_json: bool, warnings: Sequence[str]) -> None:
    """Plan a supervised run and print the plan as text or JSON, with further warnings, without starting anything."""
    plan = plan_supervised(command, config)
    plan = replace(plan, warnings=(*warnings, *plan.warnings))
    if as_json:
        print(json.dumps(asdict(plan), indent=2))
    else:
        print_lines(*supervised_lines(plan))


def open_task(command: Command, config: Config) -> tuple[OpenedTask, tuple[Derived, ...]]:
    """Open a supervised run, and choose what is auto by this machine's devices; return that, too.

    Its warnings are also of this host, unless it is checked for another.
    """
    opened = SUPERVISED[command](config)
    roles = (opened.task.role, *opened.task.frozen)
    specs = {role.role: read_model_spec(role.model.path, tower=role.tower) for role in roles}

    def shards_of(roles: Sequence[RoleSpec]) -> list[ShardPlan]:
        # A batch has no more micro-batches than rows.
        return [
            plan_shard(role, specs[role.role], stage, num_micro_batches=2 * opened.task.batch_size)
            for role in roles
            for stage in range(role.layout.pp)
        ]

    chosen = tuple(choose_recompute(roles, specs, shards_of, smallest_device()))
    config = filled(opened.inputs.config, chosen)
    role, *frozen = with_way(roles, RecomputeConfig(**config.actor.recompute_settings()))
    warnings, task = opened.inputs.warnings, replace(opened.task, role=role, frozen=tuple(frozen))
    if not target_in_words():
        run = SizedRun(config=config, roles=(role, *frozen), specs=specs, needed=(), shards=shards_of((role, *frozen)))
        needs = host_needs(run, command)
        warnings = (*warnings, *host_warnings(config.placement, config.actor.layout, needs, host_memory()))
    return OpenedTask(inputs=replace(opened.inputs, config=config, warnings=warnings), task=task), chosen


def plan_supervised(command: Command, config: Config) -> SupervisedPlan:
    """Check a supervised run's configuration, models and data as the run would, and make its plan."""
    opened, chosen = open_task(command, config)
    inputs, task, config = opened.inputs, opened.task, opened.inputs.config
    roles = (task.role, *task.frozen)
    specs = [read_model_spec(role.model.path, tower=role.tower) for role in roles]
    layout = task.role.layout
    # No batch has longer rows than the longest examples.
    lengths = [sum(row.num_tokens for row in inputs.train.rows([i])) for i in range(len(inputs.train))]
    micro_batches = plan_micro_batches(
        sorted(lengths)[-task.batch_size :],
        layout.dp,
        task.role.settings.micro_batch_tokens,
        multiple=layout.pp if layout.virtual_pp > 1 else 1,
    )
    most = max(len(batches) for batches in micro_batches)
    return SupervisedPlan(
        run=str(Path(config.run.dir) / config.run.name),
        command=command,
        roles=tuple(role_plan(role, spec) for role, spec in zip(roles, specs, strict=True)),
        layout=asdict(layout),
        num_ranks=layout.world_size,
        data={
            name: count_examples(examples)
            for name, examples in (("train", inputs.train), ("val", inputs.val))
            if examples is not None
        },
        total_steps=task.total_steps,
        batch_size=task.batch_size,
        epochs=task.total_steps * task.batch_size / len(inputs.train),
        micro_batches=most,
        shards=tuple(
            plan_shard(role, spec, stage, num_micro_batches=most if role.trainable else 0)
            for role, spec in zip(roles, specs, strict=True)
            for stage in range(role.layout.pp)
        ),
        notes=inputs.notes,
        derived=(*chosen, *derive_trainer(config, command)),
        warnings=inputs.warnings,
    )


def count_examples(examples: Examples) -> dict[str, int]:
    """Count examples, their tokens, those of the tokens that are trained, and what was lost to a length limit."""
    counts = {"examples": len(examples), "tokens": 0, "trained_tokens": 0, "longest": 0}
    counts["dropped"] = examples.num_dropped
    counts["cut"] = examples.num_cut if isinstance(examples, SftDataset) else 0
    for i in range(len(examples)):
        for row in examples.rows([i]):
            counts["tokens"] += row.num_tokens
            counts["trained_tokens"] += row.num_loss_tokens
            counts["longest"] = max(counts["longest"], row.num_tokens)
    return counts

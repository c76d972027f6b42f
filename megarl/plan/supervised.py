"""Plan a run of supervised training from its configuration, config.json and data, without starting anything."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from megarl.config.derived import Derived, filled
from megarl.config.recompute import RecomputeConfig
from megarl.config.schema import Config
from megarl.config.target import target_in_words
from megarl.data.demonstrations import SftDataset
from megarl.data.packing import plan_micro_batches
from megarl.host.memory import host_memory
from megarl.host.streams import print_lines
from megarl.plan.build import host_needs, host_warnings
from megarl.plan.derive import smallest_device
from megarl.plan.devices import plan_shard
from megarl.plan.recompute import choose_recompute, with_way
from megarl.plan.render import derived_lines, role_lines, shard_lines, target_lines
from megarl.plan.run_plan import RolePlan, ShardPlan
from megarl.plan.sizes import derive_trainer, role_plan
from megarl.record.checkpoints import Command
from megarl.train.supervised_inputs import Examples
from megarl.train.tasks import SUPERVISED, OpenedTask
from megarl.types.messages import RoleSpec
from megarl.weights.families import read_model_spec


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedPlan:
    """All that `--dry-run` reports of a supervised run; sizes are in bytes.

    data: by set (train, val), the numbers that `count_examples` returns. epochs: passes over the training examples.
    micro_batches: the largest number that one replica can have in a step.
    """

    run: str
    command: str
    roles: tuple[RolePlan, ...]
    layout: dict[str, object]
    num_ranks: int
    data: dict[str, dict[str, int]]
    total_steps: int
    batch_size: int
    epochs: float
    micro_batches: int
    shards: tuple[ShardPlan, ...]
    notes: tuple[str, ...]
    derived: tuple[Derived, ...]
    warnings: tuple[str, ...]


def print_supervised_plan(command: Command, config: Config, *, as_json: bool, warnings: Sequence[str]) -> None:
    """Plan a supervised run and print the plan as text or JSON, with further warnings, without starting anything."""
    plan = plan_supervised(command, config)
    plan = replace(plan, warnings=(*warnings, *plan.warnings))
    if as_json:
        print(json.dumps(asdict(plan), indent=2))
    else:
        print_lines(*_lines(plan))


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
        needs = host_needs(config, (role, *frozen), shards_of((role, *frozen)), None, command)
        warnings = (*warnings, *host_warnings(config, needs, host_memory()))
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


def _lines(plan: SupervisedPlan) -> Iterator[str]:
    yield f"plan of {plan.run} (megarl {plan.command}); nothing was started"
    yield from target_lines()
    yield from role_lines(plan.roles)
    product = " × ".join(f"{axis} {plan.layout[axis]}" for axis in ("tp", "cp", "dp", "pp"))
    yield f"layout     {product} = {plan.num_ranks} ranks"
    for name, counts in plan.data.items():
        yield (
            f"{name:<10} {counts['examples']:,} examples, {counts['tokens']:,} tokens, {counts['trained_tokens']:,} of "
            f"them trained; the longest row has {counts['longest']:,}; dropped "
            f"{counts['dropped']:,}, cut {counts['cut']:,}"
        )
    yield f"steps      {plan.total_steps:,} of {plan.batch_size:,} examples, which are {plan.epochs:.2f} epochs"
    yield f"           up to {plan.micro_batches:,} micro-batches per replica"
    yield from (f"           {note}" for note in plan.notes)
    yield from shard_lines(plan.shards)
    yield from derived_lines(plan.derived)
    yield from (f"warning    {warning}" for warning in plan.warnings)

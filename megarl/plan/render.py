"""Write what `--dry-run` has planned for a training run, as text for people or as JSON for programs."""

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from megarl.config.derived import Derived
from megarl.config.target import target_in_words
from megarl.host.unicode import visible
from megarl.plan.recompute import usable_bytes
from megarl.plan.run_plan import RolePlan, RunPlan, ShardPlan, SupervisedPlan

GIB = 2**30


def to_json(plan: RunPlan) -> str:
    """Return the plan's fields as JSON, with each phase's total; sizes in bytes."""
    fields = asdict(plan)
    for devices, planned in zip(fields["devices"], plan.devices, strict=True):
        for name, phase in planned.phases.items():
            devices["phases"][name]["total"] = phase.total
    return json.dumps(fields, indent=2)


def to_text(plan: RunPlan) -> str:
    """Return the plan as a page of text."""
    sections = (_layout_lines, _step_lines, _forward_lines, _engine_lines, _memory_lines)
    lines = [*itertools.chain(role_lines(plan.roles), *(section(plan) for section in sections))]
    lines += derived_lines(plan.derived)
    lines += [f"warning    {warning}" for warning in plan.warnings]
    if plan.missing:
        lines.append(f"unchecked  tokenizer, prompts, hints and ground truths, without {', '.join(plan.missing)}")
    return "\n".join(map(visible, [f"plan of {plan.run}; nothing was started", *target_lines(), *lines]))


def target_lines() -> Iterator[str]:
    """Write for which machine a plan is, unless it is this one."""
    if words := target_in_words():
        yield f"target     {words}"


def derived_lines(derived: Sequence[Derived]) -> Iterator[str]:
    """Write a line per setting that is null, with what the run uses for it."""
    yield from (f"derived    {each.key}={each.value}: {each.reason}" for each in derived)


def ranges(numbers: Sequence[int]) -> str:
    """Write ascending numbers in short form: `0-3,8`, or `0,4,…,12` for evenly spaced ones."""
    steps = {b - a for a, b in itertools.pairwise(numbers)}
    if len(numbers) > 3 and len(steps) == 1 and steps != {1}:
        return f"{numbers[0]},{numbers[1]},…,{numbers[-1]}"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _gib(num_bytes: int) -> str:
    if num_bytes == 0:
        return "0"
    return f"{num_bytes / GIB:.2f}" if num_bytes >= GIB else f"{num_bytes / GIB:.4f}"


def role_lines(roles: Sequence[RolePlan]) -> Iterator[str]:
    """Write a line per model, and one per file that their sizes were read from."""
    for role in roles:
        use = "trained" if role.trainable else "frozen"
        if role.update_rate is not None:
            use = f"moving average of the actor at rate {role.update_rate:g}"
        if role.kept_versions:
            use += f", and {role.kept_versions} earlier versions of its weights on hosts"
        experts = f" ({role.num_expert_parameters:,} in experts)" if role.num_expert_parameters else ""
        yield f"{role.name:<10} {role.family}, {role.num_parameters:,} parameters{experts}, {use}, {role.model_path}"
    for path in dict.fromkeys(role.model_config for role in roles):
        yield f"sizes      from {path}"


def _layout_lines(plan: RunPlan) -> Iterator[str]:
    node_of = {rank: i for i, node in enumerate(plan.nodes) for rank in node.ranks}
    for number, layout in enumerate(plan.layouts):
        settings = layout.layout
        product = " × ".join(f"{axis} {settings[axis]}" for axis in ("tp", "cp", "dp", "pp"))
        extras = ["sequence parallel"] if settings["sequence_parallel"] else []
        if settings["virtual_pp"] != 1:
            extras.append(f"{settings['virtual_pp']} model chunks per stage")
        if settings["ep"] != 1 or settings["etp"] != 1:
            extras.append(f"experts over ep {settings['ep']} × etp {settings['etp']}")
        if number > 0:
            extras.append(f"on devices {ranges(range(layout.num_ranks))}")
        roles = ", ".join(layout.roles)
        yield f"layout     {roles}: {layout.num_ranks} ranks = {product}{''.join(f', {extra}' for extra in extras)}"
        if number == 0:
            for i, node in enumerate(plan.nodes):
                ids = {"devices": node.ranks, "engines": node.engines, "environment workers": node.environments}
                ids |= {f"judge server {name}, replicas": replicas for name, replicas in node.judge_servers.items()}
                held = [f"{name} {ranges(numbers)}" for name, numbers in ids.items() if numbers]
                if node.offloaded:
                    held.append(f"{_gib(node.offloaded)} GiB of host memory for the offloaded trainer")
                yield f"node {i:<5} {', '.join(held)}"
        for axis, groups in layout.groups.items():
            if len(groups[0]) == 1:
                continue
            crossing = sum(len({node_of[rank] for rank in group}) > 1 for group in groups)
            place = f"{crossing} of them across nodes" if crossing else "each within a node"
            shown = " ".join(f"[{ranges(group)}]" for group in groups[:4])
            yield f"{axis} groups  {len(groups)} of {len(groups[0])} ranks, {place}: {shown}{' …' * (len(groups) > 4)}"
    periodic = max(node.checkpoint for node in plan.nodes)
    portable = max(node.portable_checkpoint for node in plan.nodes)
    yield (
        f"checkpoint {_gib(periodic)} GiB of host memory more on a node while one is written, {_gib(portable)} GiB if "
        "it is portable"
    )


def _step_lines(plan: RunPlan) -> Iterator[str]:
    steps = plan.steps
    yield (
        f"batch      {steps.rows_per_step} rows per step, {steps.rows_per_optimizer_step} per optimizer step; "
        f"{steps.optimizer_steps_per_step} optimizer steps per step, {steps.optimizer_steps} in all"
    )
    yield (
        f"rows       up to {steps.max_row_tokens} tokens; micro-batches of {steps.micro_batch_tokens} tokens: at most "
        f"{steps.micro_batches_at_full_length} per replica and optimizer step"
    )


def _forward_lines(plan: RunPlan) -> Iterator[str]:
    words = {"plain": "", "hinted": " with their hint", "shuffled": " with another prompt's hint"}
    for forward in plan.steps.forward:
        forms = [
            f"{count} rows{words[form]} of up to {forward.max_row_tokens[form]} tokens"
            for form, count in forward.rows.items()
        ]
        least = "" if forward.seconds_at_peak is None else f", {forward.seconds_at_peak:,.1f} s at the device's peak"
        yield (
            f"scoring    {forward.role}: {', '.join(forms)}; at most {forward.micro_batches} forward passes of a "
            f"replica and step, {forward.tokens:,} tokens, {forward.flops / 1e12:,.1f} TFLOP{least}"
        )
    if plan.hints:
        hints = plan.hints
        cut = f", {hints['cut']} of them cut" if hints.get("cut") else ""
        yield f"hints      {hints['placed']} of {hints['prompts']} prompts have one{cut}"


def _engine_lines(plan: RunPlan) -> Iterator[str]:
    engine = plan.engine
    where = "on the trainer's devices" if engine.shares_devices else "on devices of their own"
    if engine.nodes_per_engine > 1:
        where = f"each over {engine.nodes_per_engine} nodes, {where}"
    yield f"engines    {engine.layout}, {where}: {_gib(engine.weights)} GiB of weights per device"
    per_token = f"{engine.kv_bytes_per_token:,} bytes per token and device"
    if engine.kv_cache is None:
        yield f"KV cache   {per_token}; its size is vLLM's choice (--device-gib gives an estimate)"
    else:
        tokens = engine.kv_cache // engine.kv_bytes_per_token
        yield (
            f"KV cache   {_gib(engine.kv_cache)} GiB per device at {per_token}: {tokens:,} tokens per engine, "
            f"{engine.full_rows} rows of full length (max_num_seqs: {engine.max_num_seqs})"
        )
    yield (
        f"sync       {plan.sync_bytes:,} bytes ({_gib(plan.sync_bytes)} GiB) per sync, of which engine workers get "
        "what they need"
    )
    bridge = plan.bridge
    yield (
        f"bridge     {bridge.wire_bytes:,} bytes over the wire, {_gib(bridge.max_received_bytes)} GiB to a worker "
        f"and {_gib(bridge.max_sent_bytes)} GiB from a rank at most, in {bridge.num_messages:,} messages; "
        f"{bridge.local_bytes:,} bytes stay on their devices"
    )
    yield (
        f"staging    messages take a process {_gib(plan.staging.device)} GiB of its device and "
        f"{_gib(plan.staging.host)} GiB of host memory at most"
    )
    if plan.links is not None:
        for load in (load for load in plan.links.loads if load.num_bytes):
            yield (
                f"links      {load.medium}: {load.num_bytes:,} bytes per sync, {_gib(load.busiest_bytes)} GiB in one "
                f"direction of the busiest, at least {load.seconds:.2g} s"
            )
        seconds, bound = plan.links.seconds, plan.links.bound_seconds
        yield f"sync time  estimate {seconds:.2g} s, of which the busiest link takes {bound:.2g} s"
    if plan.seconds:
        phases = ", ".join(f"{name} {seconds:,.3g}" for name, seconds in plan.seconds.items() if name != "total")
        yield f"step time  forecast {plan.seconds['total']:,.0f} s: {phases} (how sure: docs/dry-run.md)"


def shard_lines(shards: Sequence[ShardPlan]) -> Iterator[str]:
    """Write what each role holds on a device of each pipeline stage."""
    yield "memory     estimate in GiB per device; libraries' workspaces and fragmentation come on top"
    for shard in shards:
        experts = ""
        if shard.num_experts:
            experts = f" ({shard.num_expert_parameters:,} in {shard.num_experts} experts per layer)"
        yield (
            f"{shard.role:<10} stage {shard.stage}, ranks {ranges(shard.ranks)}: {shard.num_layers} layers, "
            f"{shard.num_parameters:,} parameters per rank{experts}"
        )
        sizes = {**shard.resident, "activations": shard.activations, "output head": shard.head}
        yield "           " + ", ".join(f"{name} {_gib(size)}" for name, size in sizes.items())


def _memory_lines(plan: RunPlan) -> Iterator[str]:
    yield from shard_lines(plan.shards)
    for devices in plan.devices:
        yield f"devices {ranges(devices.devices)}"
        width = max(map(len, devices.phases))
        for name, phase in devices.phases.items():
            parts = f"trainer {_gib(phase.trainer)} + pass {_gib(phase.activations)} + engine {_gib(phase.engine)}"
            verdict = ""
            if plan.device_bytes is not None:
                usable = usable_bytes(plan.device_bytes, shared=plan.engine.shares_devices)
                fits = "fits" if phase.total <= usable else "DOES NOT FIT"
                verdict = f", {fits} {_gib(usable)} of {_gib(plan.device_bytes)}"
            yield f"  {name:<{width}}  {_gib(phase.total)} = {parts}{verdict}"


def supervised_lines(plan: SupervisedPlan) -> Iterator[str]:
    """Write the plan of a supervised run as lines of text."""
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

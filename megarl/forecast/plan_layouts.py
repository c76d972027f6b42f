"""Print the best layouts for a model on a number of GPUs: memory, estimated time and its reasons, and what to set."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

from megarl.config.batches import batch_counts, max_row_tokens
from megarl.config.recompute import RecomputeConfig
from megarl.config.schema import LayoutConfig
from megarl.config.target import checked_for, named_target
from megarl.forecast.layout_search import LayoutSearch
from megarl.forecast.search import LayoutChoice, find_layouts
from megarl.host.streams import print_lines
from megarl.record.text_table import align

GIB = 2**30


def print_layouts(search: LayoutSearch, *, most: int, as_json: bool) -> None:
    """Search, and print the best choices as text or as JSON."""
    with checked_for(named_target(search.base.cluster.target, gpus=True)):
        choices = find_layouts(search, most=most)
    if as_json:
        print(to_json(search, choices))
    else:
        print_lines(*to_lines(search, choices))


def to_json(search: LayoutSearch, choices: Sequence[LayoutChoice]) -> str:
    """Return the choices as JSON, the best first: settings, bytes by phase on the fullest device, and seconds."""
    found = [
        {
            "settings": settings_of(choice),
            "peak_bytes": choice.peak,
            "peak_phase": choice.phase,
            "host_bytes": host_bytes(search, choice),
            "sequences_at_full_length": choice.engine.full_rows,
            "seconds": asdict(choice.cost),
        }
        for choice in choices
    ]
    return json.dumps({"model": search.base.model.path, "gpus": search.gpus, "choices": found}, indent=2)


def to_lines(search: LayoutSearch, choices: Sequence[LayoutChoice]) -> Iterator[str]:
    """Write a table of choices, the best first, and the settings of the best."""
    counts, row = batch_counts(search.base), max_row_tokens(search.base)
    yield (
        f"layouts of {search.base.model.path} on {search.gpus} GPUs of {search.device_bytes / GIB:g} GiB, "
        f"{min(search.gpus, search.per_node)} per node; nothing was started"
    )
    yield (
        f"step       {counts.rows_per_step:,} rows of {row:,} tokens, {counts.rows_per_optimizer_step:,} per optimizer "
        "step; other rows: trainer.prompts_per_step=…, rollout.max_response_tokens=…"
    )
    yield "seconds    forecast for H100 nodes; docs/dry-run.md says how far published runs are from it"
    yield ""
    head = ("trainer", "recompute", "placement", "engines", "GiB", "in", "host GiB", "rows/engine")
    yield from align(
        [
            (*head, "generate s", "train s", "sync s", "fixed s", "step s", "most of generate, of train"),
            *(_cells(search, choice) for choice in choices),
        ],
        left=(0, 1, 2, 3, 5, 13),
    )
    yield ""
    yield "GiB: on the fullest GPU, by the estimate of --dry-run; in: which phase; host GiB: per node, offloaded"
    yield "rows/engine: of full length that its KV cache holds; the settings of the first:"
    yield ""
    for section, values in settings_of(choices[0]).items():
        yield f"{section}: {_flow(values)}"


def settings_of(choice: LayoutChoice) -> dict[str, Mapping[str, object]]:
    """Return the sections of a run file that set this choice."""
    config = choice.run.config
    actor, engine, placement = config.actor, config.rollout.engine, config.placement
    names = ("num_engines", "tp", *(["pp"] if engine.pp > 1 else []), "gpu_memory_utilization")
    rollout: dict[str, object] = {"engine": {name: getattr(engine, name) for name in names}}
    placed: dict[str, object] = {"mode": placement.mode, "offload": placement.offload}
    pools = ("trainer",) if placement.mode == "colocated" else ("trainer", "engines")
    placed |= {name: asdict(getattr(placement, name)) for name in pools}
    recompute, default_recompute = RecomputeConfig.recompute_settings(actor), asdict(RecomputeConfig())
    default_layout = asdict(LayoutConfig())
    found: dict[str, Mapping[str, object]] = {
        "actor": {
            "layout": {name: value for name, value in asdict(actor.layout).items() if value != default_layout[name]},
            "recompute": actor.recompute,
            **{name: value for name, value in recompute.items() if value != default_recompute[name]},
        },
        "rollout": rollout,
        "placement": placed,
    }
    if (schedule := config.rollout.schedule).staleness:
        rollout["schedule"] = {"staleness": schedule.staleness, "on_update": schedule.on_update}
        found["algo"] = {"correction": {"name": config.algo.correction.name}}
    return found


def layout_text(layout: LayoutConfig) -> str:
    """Write a layout as in `tp 4 × pp 2 × dp 2, ep 8`."""
    sizes = " × ".join(
        f"{axis} {size}" for axis in ("tp", "cp", "pp", "dp") if (size := getattr(layout, axis)) > 1 or axis == "dp"
    )
    chunks = [f"{layout.virtual_pp} chunks"] if layout.virtual_pp > 1 else []
    return ", ".join([sizes, *([f"ep {layout.ep}"] if layout.ep > 1 else []), *chunks])


def host_bytes(search: LayoutSearch, choice: LayoutChoice) -> int:
    """Return the most host memory that the offloaded trainer takes on a node."""
    held = {device: alike.offloaded for alike in choice.devices for device in alike.devices}
    nodes = range(0, len(held), search.per_node)
    most = max(sum(held[i] for i in range(first, min(first + search.per_node, len(held)))) for first in nodes)
    return most if choice.run.config.placement.offload else 0


def _flow(value: object) -> str:
    """Write settings in YAML's flow style."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_flow(each)}" for key, each in value.items()) + "}"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_flow, value))}]"
    return json.dumps(value) if isinstance(value, bool) else str(value)


def _cells(search: LayoutSearch, choice: LayoutChoice) -> tuple[str, ...]:
    config, cost = choice.run.config, choice.cost
    placement = config.placement.mode + (", offload" if config.placement.offload else "")
    host = host_bytes(search, choice)
    return (
        layout_text(config.actor.layout),
        config.actor.in_words(),
        placement,
        choice.engine.layout,
        f"{choice.peak / GIB:.1f}",
        choice.phase,
        f"{host / GIB:.0f}" if host else "",
        f"{choice.engine.full_rows}",
        *(f"{seconds:.1f}" for seconds in (cost.generate, cost.train)),
        f"{cost.sync:.2f}",
        f"{cost.fixed:.0f}" if cost.fixed else "",
        f"{cost.total:.1f}",
        ", ".join(max(parts, key=parts.__getitem__) for parts in (cost.generate_parts, cost.train_parts)),
    )

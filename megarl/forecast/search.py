"""Search for the layouts of a model that fit a number of GPUs, by the memory of `--dry-run`, and rank them by cost."""

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from megarl.algos.build import algorithm_of
from megarl.cluster.roles import by_layout, roles_of
from megarl.config.batches import batch_counts, max_path_tokens, max_row_tokens
from megarl.config.check import check_train
from megarl.config.check_model import check_expert_width, check_experts, check_model, check_stages, check_tp
from megarl.config.generation import NodesConfig, PlacementConfig
from megarl.config.load import PACKAGED, with_overrides
from megarl.config.parse import from_dict
from megarl.config.recompute import RecomputeConfig, RecomputedModule
from megarl.config.schema import Config, LayoutConfig
from megarl.errors import ConfigError
from megarl.forecast.costs import Hardware, StepCost, step_cost
from megarl.host.device.platform import platform
from megarl.plan.derive import ENGINE_SHARE, FILL, share_beside
from megarl.plan.devices import most_bytes, plan_devices
from megarl.plan.run_plan import DevicePlan, EnginePlan
from megarl.plan.sizes import engine_bytes, plan_engine, plan_shards
from megarl.weights.families import ModelSpec, read_model_spec

PUBLISHED = PACKAGED / "model" / "hf"
# A step of rows in proportion to the GPUs, but at least so many prompts; a quarter of them per optimizer step.
_PROMPTS_PER_GPU, _LEAST_PROMPTS, _MINI_BATCHES = 8, 256, 4
# Rows up to so many tokens are not split over context-parallel ranks.
_SHORT_ROW = 16384
# Parts of layers that backward may compute again, if the model has them.
_PARTS: tuple[tuple[RecomputedModule, ...], ...] = (
    ("moe_act", "layernorm"),
    ("mla_up_proj",),
    ("mlp",),
    ("moe",),
    ("moe", "mla_up_proj"),
)
_SIZES, _MOST_STAGES = (1, 2, 4, 8, 16, 32, 64), 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutChoice:
    """A way to run that fits: its configuration, its memory by the estimate of `--dry-run`, and its cost.

    peak: bytes on the fullest device, and `phase` in which. num_sequences: rows of full length that an engine's cache
    holds.
    """

    config: Config
    devices: tuple[DevicePlan, ...]
    engine: EnginePlan
    peak: int
    phase: str
    num_sequences: int
    cost: StepCost


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutSearch:
    """The question to the search: a model on `gpus` devices with `device_bytes` each, `per_node` to a node.

    base: all settings that the search does not choose. num_stages: an engine's, one on each of its nodes. stage_bytes:
    what `engine_bytes` counts.
    """

    base: Config
    spec: ModelSpec
    num_stages: int
    stage_bytes: int
    gpus: int
    per_node: int
    device_bytes: int
    hardware: Hardware


def new_search(
    model: str, *, gpus: int, per_node: int, device_gib: float, overrides: Sequence[str] = ()
) -> LayoutSearch:
    """Describe a search. model: a directory with a config.json, or a name or hub id of which a config.json comes with
    megarl.
    """
    if gpus < 1 or per_node < 1 or (gpus > per_node and gpus % per_node) or device_gib <= 0:
        raise ConfigError(
            f"--gpus {gpus} --gpus-per-node {per_node} --device-gib {device_gib:g}: expected at least one GPU, whole "
            "nodes if there are several, and some memory; change one of them"
        )
    directory = Path(model)
    if not (directory / "config.json").is_file():
        directory = PUBLISHED / directory.name.lower()
    if not (directory / "config.json").is_file():
        known = ", ".join(sorted(path.name for path in PUBLISHED.iterdir()))
        raise ConfigError(f"--model: got {model!r}, expected a directory with a config.json, or one of {known}")
    prompts = max(_LEAST_PROMPTS, _PROMPTS_PER_GPU * gpus)
    tree = {
        "model": {"path": model, "config_path": str(directory), "dtype": "bfloat16"},
        "data": {"train": ["train.parquet"], "max_prompt_tokens": 1024, "on_long_prompt": "drop"},
        "rollout": {"num_samples": 8, "max_response_tokens": 4096},
        "trainer": {"total_steps": 1, "prompts_per_step": prompts, "mini_batch_prompts": prompts // _MINI_BATCHES},
        "actor": {"micro_batch_tokens": 16384},
    }
    spec, base = read_model_spec(directory, "--model"), with_overrides(from_dict(Config, tree), overrides)
    device_bytes = int(device_gib * 2**30)
    num_stages, stage_bytes = _engine_stages(base, spec, gpus=gpus, per_node=per_node, device_bytes=device_bytes)
    return LayoutSearch(
        base=base,
        spec=spec,
        num_stages=num_stages,
        stage_bytes=stage_bytes,
        gpus=gpus,
        per_node=per_node,
        device_bytes=device_bytes,
        hardware=Hardware(per_node=per_node),
    )


def _engine_stages(base: Config, spec: ModelSpec, *, gpus: int, per_node: int, device_bytes: int) -> tuple[int, int]:
    """Choose the number of an engine's stages, one per node, and count the largest one's bytes.

    They are the fewest that leave room for a row, or, if none does, the most that the GPUs allow.
    """
    counts = [n for n in _SIZES if n == 1 or (per_node in _SIZES and gpus % (n * per_node) == 0)]
    for num_stages in (n for n in counts if n <= min(spec.dims.num_layers, _MOST_STAGES)):
        settings = replace(
            base.rollout.engine, tp=min(gpus, per_node), pp=num_stages, gpu_memory_utilization=ENGINE_SHARE
        )
        config = replace(base, rollout=replace(base.rollout, engine=settings))
        stage_bytes = engine_bytes(base, spec, num_stages)
        engine = plan_engine(config, spec.dims, stage_bytes, device_bytes)
        if (engine.kv_cache or 0) >= engine.kv_bytes_per_token * max_path_tokens(base):
            break
    return num_stages, stage_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where trainer and engines run: devices that train, devices of engines, and whether these are the same."""

    trainers: int
    engines: int
    colocated: bool
    offload: bool = False


def find_layouts(search: LayoutSearch, *, most: int) -> list[LayoutChoice]:
    """Return the choices that fit and cost least, one for each layout of the trainer and placement.

    Raises:
        ConfigError: nothing fits; it says what takes too much.
    """
    found, trainers = list[LayoutChoice](), list[int]()
    limit = FILL * search.device_bytes
    for place in _places(search):
        for layout in _layouts(search, place.trainers):
            fitting = _fitting(search, place, layout, limit, trainers)
            if fitting:
                found.append(min(fitting, key=lambda choice: choice.cost.total))
    best = list(itertools.islice(_sound(search, sorted(found, key=lambda choice: choice.cost.total)), most))
    if best:
        return best
    weights = search.stage_bytes / max(_engine_sizes(search, search.gpus))
    trainer = f"{min(trainers) / 2**30:.1f} GiB" if trainers else "a number that divides the model"
    raise ConfigError(
        f"--gpus {search.gpus}: no layout of {search.base.model.path} fits {limit / 2**30:.1f} GiB, {FILL:.0%} of a "
        f"GPU; the trainer needs at least {trainer} per GPU, and an engine {weights / 2**30:.1f} GiB for its weights; "
        "give more GPUs, GPUs with more memory (--device-gib), or more of them per node (--gpus-per-node)"
    )


def _fitting(
    search: LayoutSearch, place: _Place, layout: LayoutConfig, limit: float, trainers: list[int]
) -> list[LayoutChoice]:
    """Return the choices that fit with this layout, with each way to recompute that may be the cheapest.

    Nothing if that fits; else parts of layers, or the fewest whole layers. trainers: as for `_with_engines`.
    """

    def choices(**recompute: Any) -> list[LayoutChoice]:
        config = _with_trainer(search, place, layout, RecomputeConfig(**recompute))
        return list(_with_engines(search, config, place, limit, trainers))

    if found := choices():
        return found
    found = choices(recompute="full")
    if not found:
        return []
    dims = search.spec.dims
    most = max(map(max, layout.chunk_layers(dims.num_layers)))
    fewest = bisect_left(range(1, most), True, key=lambda n: bool(choices(recompute="full", recompute_layers=n))) + 1
    if fewest < most:
        found += choices(recompute="full", recompute_layers=fewest)
    present = {"mlp": dims.experts is None, "mla_up_proj": dims.latent is not None}
    for parts in _PARTS:
        if all(present.get(part, dims.experts is not None) for part in parts):
            found += choices(recompute="selective", recompute_modules=parts)
    return found


def _engine_sizes(search: LayoutSearch, gpus: int) -> list[int]:
    """Return over how many devices a stage of an engine may be split; if it has several, over all of a node."""
    node = min(search.per_node, gpus)
    if search.num_stages > 1:
        return [node] if gpus % (node * search.num_stages) == 0 else []
    return [size for size in _SIZES if node % size == 0]


def _sound(search: LayoutSearch, choices: Iterable[LayoutChoice]) -> Iterator[LayoutChoice]:
    """Yield the choices that a run would accept."""
    for choice in choices:
        try:
            check_train(choice.config)
            check_model(choice.config, search.spec.hf_config)
        except ConfigError:
            continue
        yield choice


def _places(search: LayoutSearch) -> Iterator[_Place]:
    for offload in (True, False):
        yield _Place(trainers=search.gpus, engines=search.gpus, colocated=True, offload=offload)
    # Trainer and engines have whole nodes of their own, an eighth or more of all.
    num_nodes = search.gpus // search.per_node
    for eighths in (2, 4, 6):
        if num_nodes * eighths % 8 == 0 and num_nodes > 1:
            engines = search.gpus * eighths // 8
            yield _Place(trainers=search.gpus - engines, engines=engines, colocated=False)


def _layouts(search: LayoutSearch, gpus: int) -> Iterator[LayoutConfig]:
    """Yield the layouts of so many ranks that divide the model, with tensor-parallel groups within a node."""
    num_layers, experts = search.spec.dims.num_layers, search.spec.dims.experts
    context = _SIZES if max_row_tokens(search.base) > _SHORT_ROW else (1,)
    for tp, pp, cp, ep in itertools.product(_SIZES, _SIZES, context, _SIZES if experts else (1,)):
        if tp > search.per_node or pp > min(num_layers, _MOST_STAGES) or gpus % (tp * pp * cp):
            continue
        first = last = None
        if num_layers % pp:
            rest = num_layers - -(-num_layers // pp) * (pp - 2)
            first, last = -(-rest // 2), rest // 2
            if last < 1:
                continue
        layout = LayoutConfig(
            tp=tp,
            pp=pp,
            cp=cp,
            dp=gpus // (tp * pp * cp),
            ep=ep,
            sequence_parallel=tp > 1,
            first_stage_layers=first,
            last_stage_layers=last,
        )
        try:
            layout.check("actor.layout")
            check_tp(layout, search.spec.hf_config, "actor")
            check_stages(layout, search.spec.hf_config, "actor.layout")
            check_experts(layout, search.spec.hf_config, "actor")
        except ConfigError:
            continue
        if layout.dp <= batch_counts(search.base).rows_per_optimizer_step:
            yield layout


def _with_trainer(search: LayoutSearch, place: _Place, layout: LayoutConfig, recompute: RecomputeConfig) -> Config:
    """Return the settings of a run with this trainer; with engines apart as in configs/schedule/one_step_off.yaml."""
    base = search.base

    def nodes(gpus: int) -> NodesConfig:
        return NodesConfig(num_nodes=max(1, gpus // search.per_node), devices_per_node=min(gpus, search.per_node))

    if place.colocated:
        placement = PlacementConfig(mode="colocated", offload=place.offload, trainer=nodes(place.trainers))
    else:
        placement = PlacementConfig(mode="split", trainer=nodes(place.trainers), engines=nodes(place.engines))
        schedule = replace(base.rollout.schedule, staleness=1, on_update="finish", window_frac=0.0)
        correction = replace(base.algo.correction, name="rollout_ratio")
        base = replace(
            base, rollout=replace(base.rollout, schedule=schedule), algo=replace(base.algo, correction=correction)
        )
    actor = replace(
        base.actor, layout=layout, **{each.name: getattr(recompute, each.name) for each in fields(recompute)}
    )
    return replace(base, actor=actor, placement=placement)


def _with_engines(
    search: LayoutSearch, config: Config, place: _Place, limit: float, trainers: list[int]
) -> Iterator[LayoutChoice]:
    """Yield the choices that fit with this trainer; append what the trainer takes to `trainers`."""
    algorithm = algorithm_of(config)
    needed, roles = algorithm.requires(), roles_of(config, algorithm)
    shards = plan_shards(config, roles, {role.role: search.spec for role in roles}, needed)
    layouts = by_layout(roles)
    peak, _ = most_bytes(plan_devices(config, layouts, shards, None))
    trainers.append(peak)
    if peak > limit:
        return
    shares = place.colocated and not place.offload
    utilization = share_beside(peak, search.device_bytes) if shares else ENGINE_SHARE
    if utilization <= 0:
        return
    for tp in _engine_sizes(search, place.engines):
        engine_config = replace(
            config.rollout.engine,
            num_engines=place.engines // (tp * search.num_stages),
            tp=tp,
            pp=search.num_stages,
            gpu_memory_utilization=utilization,
        )
        chosen = replace(config, rollout=replace(config.rollout, engine=engine_config))
        try:
            check_expert_width(chosen, search.spec.hf_config, platform().expert_width_multiple)
        except ConfigError:
            continue
        engine = plan_engine(chosen, search.spec.dims, search.stage_bytes, search.device_bytes)
        num_sequences = engine.full_rows or 0
        devices = plan_devices(chosen, layouts, shards, engine)
        peak, phase = most_bytes(devices)
        if num_sequences == 0 or peak > limit:
            continue
        cost = step_cost(
            chosen,
            search.spec.dims,
            shards,
            devices,
            engine,
            num_forward_passes=len(needed),
            hardware=search.hardware,
        )
        yield LayoutChoice(
            config=chosen,
            devices=tuple(devices),
            engine=engine,
            peak=peak,
            phase=phase,
            num_sequences=num_sequences,
            cost=cost,
        )

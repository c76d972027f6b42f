"""Search for the layouts of a model that fit a number of GPUs, by the memory of `--dry-run`, and rank them by cost."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from megarl.config.batches import batch_counts, max_row_tokens
from megarl.config.check import check_train
from megarl.config.check_model import check_expert_width, check_experts, check_model, check_stages, check_tp
from megarl.config.generation import NodesConfig
from megarl.config.recompute import RecomputeConfig
from megarl.config.schema import Config, LayoutConfig
from megarl.errors import ConfigError
from megarl.forecast.costs import StepCost, step_cost
from megarl.forecast.layout_search import MOST_STAGES, SIZES, LayoutSearch
from megarl.host.device.platform import assuming, platform
from megarl.plan.devices import most_bytes, plan_devices
from megarl.plan.recompute import ENGINE_SHARE, FILL, fitting_ways, share_beside
from megarl.plan.run_plan import DevicePlan, EnginePlan
from megarl.plan.sizes import Needs, SizedRun, needs_of, plan_engine, size_trainer

# The settings that decide how many chunks a stage has, and of which layers; how many are tried, and by which share they
# have to be faster.
_CHUNKED = ("virtual_pp", "first_stage_layers", "last_stage_layers", "pipeline_layout", "overlap_p2p")
_CHUNKS, _TELLING = (2, 4), 0.01
# Rows up to this many tokens are not split over context-parallel ranks.
_SHORT_ROW = 16384


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutChoice:
    """A way to run that fits, its memory by the estimate of `--dry-run`, and its cost.

    engine: the run's. peak: bytes on the fullest device, and `phase` in which.
    """

    run: SizedRun
    engine: EnginePlan
    devices: tuple[DevicePlan, ...]
    peak: int
    phase: str
    cost: StepCost


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
    found, trainers, refusals = list[LayoutChoice](), list[int](), list[ConfigError]()
    with assuming("cuda"):
        for place in _places(search):
            # The layout does not change what an algorithm asks for.
            needed, _ = needs_of(_with_trainer(search, place, search.base.actor.layout, RecomputeConfig()))
            for layout in _layouts(search, place.trainers):
                each = (_fitting(search, place, chunked, needed, trainers) for chunked in _interleaved(search, layout))
                if fitting := list(itertools.chain.from_iterable(each)):
                    found.append(min(fitting, key=_preference))
        ranked = sorted(found, key=lambda choice: choice.cost.total)
        best = list(itertools.islice(_sound(search, ranked, refusals), most))
    if best:
        return best
    if refusals:
        raise refusals[0]
    asked = f" with {', '.join(sorted(search.given))} as given" if search.given else ""
    if not trainers:
        raise ConfigError(
            f"--gpus {search.gpus}: no layout of {search.base.model.path}{asked} uses these GPUs, whatever their "
            "memory: its sizes have to divide the model's heads and layers and the GPUs, and placement.mode=split "
            "needs whole nodes for the engines; change these settings, --gpus or --gpus-per-node"
        )
    weights = search.stage_bytes / max(_engine_sizes(search, search.gpus))
    raise ConfigError(
        f"--gpus {search.gpus}: no layout of {search.base.model.path}{asked} fits "
        f"{FILL * search.device_bytes / 2**30:.1f} GiB, {FILL:.0%} of a GPU; the trainer needs at least "
        f"{min(trainers) / 2**30:.1f} GiB per GPU, and an engine {weights / 2**30:.1f} GiB for its weights; give more "
        "GPUs, GPUs with more memory (--device-gib), or more of them per node (--gpus-per-node)"
    )


def _fitting(
    search: LayoutSearch, place: _Place, layout: LayoutConfig, needed: Needs, trainers: list[int]
) -> list[LayoutChoice]:
    """Return the choices that fit with this layout, with each way to recompute that may be the cheapest.

    Nothing if that fits; else parts of layers, or the fewest whole layers. trainers: as for `_with_engines`.
    """

    found: dict[RecomputeConfig, list[LayoutChoice]] = {}

    def fits(way: RecomputeConfig) -> bool:
        config = _with_trainer(search, place, layout, way)
        found[way] = []
        if search.obeys(replace(config, rollout=search.base.rollout)):
            found[way] += _with_engines(search, size_trainer(config, search.spec, needed), place, trainers)
        return bool(found[way])

    own = RecomputeConfig(**RecomputeConfig.recompute_settings(search.base.actor))
    if any(f"actor.{name}" in search.given for name in own.recompute_settings()):
        return found[own] if fits(own) else []
    return [choice for way in fitting_ways(search.spec.dims, layout, fits) for choice in found[way]]


def _engine_sizes(search: LayoutSearch, gpus: int) -> list[int]:
    """Return over how many devices a stage of an engine may be split; if it has several, over all of a node."""
    node = min(search.per_node, gpus)
    if "rollout.engine.tp" in search.given:
        return [search.base.rollout.engine.tp]
    if search.num_stages > 1:
        return [node] if gpus % (node * search.num_stages) == 0 else []
    return [size for size in SIZES if node % size == 0]


def _sound(
    search: LayoutSearch, choices: Iterable[LayoutChoice], refusals: list[ConfigError]
) -> Iterator[LayoutChoice]:
    """Yield the choices that a run would accept; append why it would refuse the others to `refusals`."""
    for choice in choices:
        try:
            check_train(choice.run.config)
            check_model(choice.run.config, search.spec.hf_config)
        except ConfigError as error:
            refusals.append(error)
            continue
        yield choice


def _places(search: LayoutSearch) -> Iterator[_Place]:
    for offload in (True, False):
        yield _Place(trainers=search.gpus, engines=search.gpus, colocated=True, offload=offload)
    # Trainer and engines have whole nodes of their own, a multiple of an eighth of all unless nodes are given.
    num_nodes = search.gpus // search.per_node
    eighths = [num_nodes * part // 8 for part in (2, 4, 6) if num_nodes * part % 8 == 0]
    given = any(key.startswith(("placement.trainer", "placement.engines")) for key in search.given)
    for engine_nodes in range(1, num_nodes) if given else eighths if num_nodes > 1 else ():
        engines = engine_nodes * search.per_node
        yield _Place(trainers=search.gpus - engines, engines=engines, colocated=False)


def _layouts(search: LayoutSearch, gpus: int) -> Iterator[LayoutConfig]:
    """Yield the layouts of that many ranks that divide the model, with tensor-parallel groups within a node."""
    num_layers, experts, given = search.spec.dims.num_layers, search.spec.dims.experts, search.base.actor.layout
    context = SIZES if max_row_tokens(search.base) > _SHORT_ROW else (1,)
    axes = {"tp": SIZES, "pp": SIZES, "cp": context, "ep": SIZES if experts else (1,)}
    sizes = (
        search.chosen("actor.layout", **{axis: sizes}).get(axis, (getattr(given, axis),))
        for axis, sizes in axes.items()
    )
    for tp, pp, cp, ep in itertools.product(*sizes):
        if tp > search.per_node or pp > min(num_layers, MOST_STAGES) or gpus % (tp * pp * cp):
            continue
        first = last = None
        if num_layers % pp:
            rest = num_layers - -(-num_layers // pp) * (pp - 2)
            first, last = -(-rest // 2), rest // 2
            if last < 1:
                continue
        chosen = search.chosen(
            "actor.layout",
            tp=tp,
            pp=pp,
            cp=cp,
            dp=gpus // (tp * pp * cp),
            ep=ep,
            sequence_parallel=tp > 1,
            first_stage_layers=first,
            last_stage_layers=last,
        )
        layout = replace(given, **chosen)
        try:
            layout.check("actor.layout")
            check_tp(layout, search.spec.hf_config, "actor")
            check_stages(layout, search.spec.hf_config, "actor.layout")
            check_experts(layout, search.spec.hf_config, "actor")
        except ConfigError:
            continue
        if layout.world_size == gpus and layout.dp <= batch_counts(search.base).rows_per_optimizer_step:
            yield layout


def _preference(choice: LayoutChoice) -> float:
    """Return the seconds of a step, which chunks of stages have to make less by a share that a forecast can tell."""
    return choice.cost.total * (1 + _TELLING * (choice.run.config.actor.layout.virtual_pp > 1))


def _interleaved(search: LayoutSearch, layout: LayoutConfig) -> Iterator[LayoutConfig]:
    """Yield a layout and, if that is left open, those whose stages have several chunks: even ones, or with fewer layers
    in the first and the last.
    """
    yield layout
    if layout.pp == 1 or any(f"actor.layout.{name}" in search.given for name in _CHUNKED):
        return
    num_layers = search.spec.dims.num_layers
    for virtual_pp in _CHUNKS:
        count = layout.pp * virtual_pp
        most = -(-num_layers // count)
        rest, even = num_layers - most * (count - 2), replace(layout, first_stage_layers=None, last_stage_layers=None)
        if num_layers % count == 0:
            yield replace(even, virtual_pp=virtual_pp)
        elif rest >= 2:
            first, last = "t" * (-(-rest // 2)), "t" * (rest // 2)
            text = f"E{first}|({'t' * most}|)*{count - 2}{last}L"
            yield replace(even, virtual_pp=virtual_pp, pipeline_layout=text)


def _with_trainer(search: LayoutSearch, place: _Place, layout: LayoutConfig, recompute: RecomputeConfig) -> Config:
    """Return the settings of a run with this trainer; with engines apart as in configs/schedule/one_step_off.yaml."""
    base = search.base

    def nodes(gpus: int) -> NodesConfig:
        return NodesConfig(num_nodes=max(1, gpus // search.per_node), devices_per_node=min(gpus, search.per_node))

    if place.colocated:
        placement = replace(base.placement, mode="colocated", offload=place.offload, trainer=nodes(place.trainers))
    else:
        placement = replace(
            base.placement, mode="split", offload=False, trainer=nodes(place.trainers), engines=nodes(place.engines)
        )
        chosen = search.chosen("rollout.schedule", staleness=1, on_update="finish", window_frac=0.0)
        schedule = replace(base.rollout.schedule, **chosen)
        # Only samples of earlier weights need a correction.
        name = search.chosen("algo.correction", name="rollout_ratio") if schedule.staleness else {}
        correction = replace(base.algo.correction, **name)
        base = replace(
            base, rollout=replace(base.rollout, schedule=schedule), algo=replace(base.algo, correction=correction)
        )
    return replace(
        base, actor=replace(base.actor, layout=layout, **recompute.recompute_settings()), placement=placement
    )


def _with_engines(
    search: LayoutSearch, trainer: SizedRun, place: _Place, trainers: list[int]
) -> Iterator[LayoutChoice]:
    """Yield the choices that fit with this trainer; append what the trainer takes to `trainers`."""
    config, limit = trainer.config, FILL * search.device_bytes
    peak, _ = most_bytes(plan_devices(trainer.roles, trainer.shards, None, offload=config.placement.offload))
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
            **search.chosen("rollout.engine", gpu_memory_utilization=utilization),
        )
        chosen = replace(config, rollout=replace(config.rollout, engine=engine_config))
        if not search.obeys(chosen) or engine_config.num_engines * engine_config.num_workers != place.engines:
            continue
        try:
            check_expert_width(chosen, search.spec.hf_config, platform().expert_width_multiple)
        except ConfigError:
            continue
        engine = plan_engine(chosen, search.spec.dims, search.stage_bytes, search.device_bytes)
        run = replace(trainer, config=chosen, engine=engine)
        devices = run.devices()
        peak, phase = most_bytes(devices)
        if not engine.full_rows or peak > limit:
            continue
        cost = step_cost(run, hardware=search.hardware, constants=search.constants)
        yield LayoutChoice(run=run, engine=engine, devices=tuple(devices), peak=peak, phase=phase, cost=cost)

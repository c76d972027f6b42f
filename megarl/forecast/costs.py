"""Estimate how long a step takes on nodes of H100: generate, train, move weights. The one model of time of all plans.

n: tokens of all rows, whose responses have the share `mean_share` of their limit on average; F: FLOPs of a forward pass
over them; m: micro-batches of a replica per optimizer step; b = 2 bytes; h: hidden size; L: layers; g: devices that
train.

    compute     (E·(3 + r) + s)·F·imbalance / (g · FLOP/s · t/(t + half_tokens))
                                                                E epochs, r: share of a forward pass that backward
                                                                computes again, s forward passes,
                                                                imbalance: layers of the longest stage · pp / L
                                                                t: tokens of a micro-batch that a matrix of an expert
                                                                (without experts, of a rank) multiplies
    tp, cp, ep  c passes over a rank's n·b/(dp·cp) · L/pp bytes, c = E·(2 + r) + s, each moving
                tp: (4·h + g)·(tp − 1)/tp (two all-reduces; g: query, key and value sizes, which are gathered if tp
                exceeds the key-value heads); cp: 2·(key and value sizes)·(cp − 1)/tp;
                ep: 2·h·(experts of a token)·(ep − 1)/ep / tp
    pp          unless overlap_p2p hides it: 2·E + s times a rank's n·b·h/(dp·cp) for each of the v chunks of a stage
    bubble      (compute + tp + cp + ep + pp) · (pp − 1)/(m·v)  1F1B; with v > 1 interleaved, which makes m a multiple
                                                                of pp
    dp          per optimizer step 4·P reduced and b·P gathered, each times (D − 1)/D; with overlap_param_gather, the
                latter less a forward pass over one micro-batch
    offload     what the host keeps of the trainer, there and back

    decoding    decode_s, and the larger of (weights that its k sequences read + their keys and values) / HBM and
                2·(active parameters)·k / FLOP/s, each over the engine's tp devices; and 2·L all-reduces of k·h. With
                p stages, sequences take p turns of k/p, each of which reads every stage and crosses p − 1 networks
    prefill     F of one prompt per group
    generate    prefill and the decode steps: with c sequences as long as more wait, c: max_num_seqs, or what the KV
                cache holds; then with ever fewer (`lengths`). Engines that never drain always have c
    sync        what a worker receives from other nodes over the network, or from its own over NVLink; and stage_s for
                each GB of the largest pipeline stage
    fixed       step_s where trainer and engines take turns

Links within a node are NVLink, those between nodes the network: of a group that spans nodes, the share of its members
on other nodes. The four constants of `Constants` are fitted to published runs on H100s, or to a run of yours
(`--calibration`); `python -m megarl_lab.fit_forecast` prints predicted beside published.
"""

import math
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cache

from megarl.config.batches import batch_counts, max_path_tokens, max_row_tokens
from megarl.config.lora import sent_alone
from megarl.config.schema import LayoutConfig
from megarl.host.device.platform import assuming
from megarl.plan.hosts import host_needs
from megarl.plan.memory import DTYPE_BYTES, checkpoint_bytes, gradient_bytes
from megarl.plan.recompute import recomputed_share
from megarl.plan.run_plan import EnginePlan
from megarl.plan.sizes import SizedRun, role_plan
from megarl.record.performance import FORWARD_AND_BACKWARD, StopForecast, forward_flops
from megarl.weights.families import Dims

# A decode loop is summed at this many points; steeper densities than this have all responses at an end.
POINTS, _STEEPEST = 16, 200.0


@cache
def alive(mean_share: float) -> tuple[float, ...]:
    """Return which share of the responses is longer than each of `POINTS` midpoints of [0, limit].

    Only the mean of lengths is known, so their density is that of the largest entropy on [0, 1]: θ·e^{θx}/(e^θ − 1),
    uniform for a mean of a half (θ = 0), rising for a larger one.

    >>> [round(share, 2) for share in alive(0.5)[:: POINTS // 4]]
    [0.97, 0.72, 0.47, 0.22]
    """
    low, high = -_STEEPEST, _STEEPEST
    for _ in range(60):
        theta = (low + high) / 2
        low, high = (theta, high) if _mean(theta) < mean_share else (low, theta)
    if mean_share >= _mean(_STEEPEST):
        return (1.0,) * POINTS
    points = ((i + 0.5) / POINTS for i in range(POINTS))
    if abs(theta) < 1e-6:
        return tuple(1 - x for x in points)
    return tuple(math.expm1(theta * (x - 1)) / math.expm1(-theta) for x in points)


def _mean(theta: float) -> float:
    return 0.5 if abs(theta) < 1e-6 else -1 / math.expm1(-theta) - 1 / theta


# A node writes so much to shared storage per second, a low estimate.
STORAGE_BYTES = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Rates of a device per second: an H100 SXM of eight in a node, with 400 Gb/s to other nodes. Bytes are those of
    one direction; `latency_s` is that of an all-reduce. Rates are the shares of specified ones that large
    transfers and large matrix products reach.
    """

    flops: float = 0.5 * 989e12
    hbm: float = 0.7 * 3.35e12
    nvlink: float = 0.7 * 450e9
    network: float = 0.8 * 50e9
    host: float = 0.7 * 64e9
    latency_s: float = 1e-5
    per_node: int = 8

    def seconds(self, num_bytes: float, group: int, stride: int = 1) -> float:
        """Return how long a rank's exchange takes with the others of a group, whose ranks are `stride` apart."""
        near = max(1, min(group, self.per_node // stride))
        far_share = (group - near) / max(1, group - 1)
        return num_bytes * (far_share / self.network + (1 - far_share) / self.nvlink)


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """Numbers that no specification has: the first four are fitted, the others are a run's own (`calibrate`).

    step_s: the fixed cost of a step in which trainer and engines take turns: waking, sleeping, rewards, data. decode_s:
    what a decode step takes beside reading and computing. half_tokens: tokens of a micro-batch with which an expert's
    matrices reach half of `Hardware.flops`. stage_s: seconds of a sync per GB of a pipeline stage's
    weights, which are gathered and converted. mean_share: the mean
    response as a share of its limit. generate, train, sync: factors of the phases.
    """

    step_s: float = 55.3
    decode_s: float = 0.0109
    half_tokens: float = 1430.0
    stage_s: float = 0.0378
    mean_share: float = 0.5
    generate: float = 1.0
    train: float = 1.0
    sync: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Seconds of a step. train_parts, generate_parts: what they consist of. overlaps: whether engines generate while
    the trainer works.
    """

    generate_parts: dict[str, float]
    train_parts: dict[str, float]
    sync: float
    fixed: float
    overlaps: bool
    generate: float = field(init=False)
    train: float = field(init=False)
    total: float = field(init=False)

    def __post_init__(self) -> None:
        generate, train = sum(self.generate_parts.values()), sum(self.train_parts.values())
        object.__setattr__(self, "generate", generate)
        object.__setattr__(self, "train", train)
        both = max(generate, train) if self.overlaps else generate + train
        object.__setattr__(self, "total", both + self.sync + self.fixed)

    @property
    def seconds(self) -> dict[str, float]:
        """The phases and the step."""
        return {name: getattr(self, name) for name in ("generate", "train", "sync", "fixed", "total")}


H100_NODES, PUBLISHED = Hardware(), Constants()


@assuming("cuda")
def planned_stop(run: SizedRun) -> StopForecast:
    """Forecast how long a run takes to stop, and what it needs of a host."""
    cost, num_bytes = step_cost(run), 0.0
    for role in (role for role in run.roles if role.trainable):
        mine = [shard for shard in run.shards if shard.role == role.role]
        # Only adapters are written, if there are any.
        trained = sum(shard.num_trained_parameters for shard in mine) / sum(shard.num_parameters for shard in mine)
        count = role_plan(role, run.specs[role.role]).num_parameters * min(1.0, trained)
        num_bytes += checkpoint_bytes(int(count), DTYPE_BYTES[role.model.dtype], 1, shard=0, portable=False)
    num_nodes = -(-run.config.actor.layout.world_size // H100_NODES.per_node)
    return StopForecast(
        step=cost.total,
        uncut=cost.train + cost.sync,
        checkpoint=num_bytes / num_nodes / STORAGE_BYTES,
        host=host_needs(run),
    )


def step_cost(run: SizedRun, *, hardware: Hardware = H100_NODES, constants: Constants = PUBLISHED) -> StepCost:
    """Estimate a step of a run with engines."""
    config, layout, engine = run.config, run.config.actor.layout, run.engine
    assert engine is not None
    train = train_parts(run, hardware=hardware, constants=constants)
    if config.placement.offload:
        train["offload"] = 2 * max(each.offloaded for each in run.devices()) / hardware.host
    # A whole copy of the weights is spread over this many nodes, of which a worker's own holds one part.
    span = max(layout.tp * layout.cp, layout.ep * layout.etp)
    num_nodes = layout.pp * math.ceil(span / hardware.per_node) if layout.stage_size >= hardware.per_node else 1
    far = 1.0 if config.placement.mode == "split" else 1 - 1 / num_nodes
    # Adapters that are kept apart are all that is sent.
    adapters = sent_alone(config.actor.lora) is not None
    trained, held = (sum(getattr(s, f"num_{kind}parameters") for s in run.shards) for kind in ("trained_", ""))
    sent = engine.weights * (trained / held if adapters else 1)
    stage = sent * engine.tp * engine.pp / layout.pp
    generate = generate_parts(run, hardware=hardware, constants=constants)
    overlaps = config.rollout.schedule.staleness > 0
    return StepCost(
        generate_parts={name: constants.generate * seconds for name, seconds in generate.items()},
        train_parts={name: constants.train * seconds for name, seconds in train.items()},
        sync=constants.sync * sync_seconds(sent, stage, far=far, hardware=hardware, constants=constants),
        fixed=0.0 if overlaps else constants.step_s,
        overlaps=overlaps,
    )


def sync_seconds(received: float, stage: float, *, far: float, hardware: Hardware, constants: Constants) -> float:
    """Estimate a sync from the bytes that a worker receives, the share `far` from other nodes, and those of a stage."""
    moved = max(far * received / hardware.network, (1 - far) * received / hardware.nvlink)
    return moved + constants.stage_s * stage / 1e9


def train_parts(run: SizedRun, *, hardware: Hardware, constants: Constants) -> dict[str, float]:
    """Estimate the seconds that parts of the training of a step take; what is computed before the update takes a pass
    over all rows each.
    """
    config, dims, num_forward_passes = run.config, run.actor.dims, len(run.needed)
    layout, counts, limit = config.actor.layout, batch_counts(config), config.rollout.max_response_tokens
    row = max_row_tokens(config) - round((1 - constants.mean_share) * limit)
    mine = [shard for shard in run.shards if shard.role == "actor"]
    chunk = max(shard.num_layers for shard in mine) / layout.virtual_pp
    recomputed = recomputed_share(config.actor, dims, num_tokens=row, chunk_layers=chunk)
    dtype_bytes = DTYPE_BYTES[config.model.dtype]
    epochs, rows = config.trainer.num_epochs, counts.rows_per_step
    flops = rows * forward_flops(dims, num_tokens=row, num_head_tokens=round(constants.mean_share * limit))
    imbalance = max(shard.num_layers for shard in mine) * layout.pp / dims.num_layers
    passes = epochs * (FORWARD_AND_BACKWARD + recomputed) + num_forward_passes
    # Numbers that a rank exchanges per hidden element of its tokens, in all passes and layers of its stage.
    moved: float = (epochs * (2 + recomputed) + num_forward_passes) * rows * row * dtype_bytes / (layout.dp * layout.cp)
    moved *= dims.num_layers / layout.pp
    tp, cp, ep = layout.tp, layout.cp, layout.ep * layout.etp
    per_token = dims.experts.per_token if dims.experts else 0
    keys = dims.latent.kv_latent if dims.latent else 2 * dims.dim("kv")
    gathered = dims.dim("q") + keys if tp > dims.num_kv_heads else 0
    replica_tokens = row * counts.rows_per_optimizer_step / layout.dp
    micro_batches: float = max(1.0, replica_tokens / config.actor.micro_batch_tokens)
    if layout.virtual_pp > 1:
        micro_batches = layout.pp * math.ceil(micro_batches / layout.pp)
    packed = replica_tokens / micro_batches / cp
    seen = packed / tp * ep * per_token / dims.experts.num if dims.experts else packed
    reached = seen / (seen + constants.half_tokens)
    parts = {
        "compute": passes * flops * imbalance / (layout.world_size * hardware.flops * reached),
        "tp": hardware.seconds(moved * (4 * dims.hidden + gathered) * (tp - 1) / tp, tp),
        "cp": hardware.seconds(moved * keys * (cp - 1) / min(tp, dims.num_kv_heads), cp, tp),
        "ep": hardware.seconds(2 * moved * dims.hidden * per_token * (ep - 1) / ep / tp, ep),
    }
    if layout.pp > 1 and not layout.overlaps_p2p:
        sent = (2 * epochs + num_forward_passes) * rows * row * dtype_bytes * dims.hidden * layout.virtual_pp
        split = tp if layout.sequence_parallel else 1
        parts["pp"] = hardware.seconds(sent / (layout.dp * cp * split), 2, layout.stage_size)
    forward = sum(parts.values()) / passes / micro_batches * epochs / counts.optimizer_steps_per_step
    parts["bubble"] = sum(parts.values()) * bubble(layout, micro_batches)
    largest = max(mine, key=lambda shard: shard.num_parameters)
    num_experts = largest.num_expert_parameters
    others = largest.num_parameters - num_experts
    replicas, expert_replicas = layout.dp * layout.cp, layout.expert_dp
    per_byte = hardware.seconds(others * (replicas - 1) / replicas, replicas, tp) + hardware.seconds(
        num_experts * (expert_replicas - 1) / expert_replicas, expert_replicas, ep
    )
    optimizer = config.actor.optimizer
    awaited = max(0.0, dtype_bytes * per_byte - forward * optimizer.overlaps_param_gather)
    reduced = gradient_bytes(1, dtype_bytes, optimizer) * per_byte
    parts["dp"] = counts.optimizer_steps_per_step * (reduced + awaited)
    return {name: seconds for name, seconds in parts.items() if seconds}


def bubble(layout: LayoutConfig, micro_batches: float) -> float:
    """Return the time in which pipeline stages idle, as a share of that in which they work: (pp − 1)/(m·v)."""
    return (layout.pp - 1) / (micro_batches * layout.virtual_pp)


def generate_parts(run: SizedRun, *, hardware: Hardware, constants: Constants) -> dict[str, float]:
    """Estimate the seconds that parts of the generation of a step take on each engine, of which all do the same."""
    config, dims, engine = run.config, run.actor.dims, run.engine
    assert engine is not None
    settings, limit, schedule = config.rollout.engine, config.rollout.max_response_tokens, config.rollout.schedule
    rows = batch_counts(config).rows_per_step / settings.num_engines
    prompt = max_path_tokens(config) - limit
    cached, mean = (engine.kv_cache or 0) // engine.kv_bytes_per_token, constants.mean_share * limit
    if cached < prompt + limit:
        return {"KV cache": math.inf}
    drains = schedule.on_update == "finish" or schedule.staleness == 0
    under_way = rows if drains else rows * (schedule.staleness + 1)
    at_once = min(settings.max_num_seqs, max(1.0, under_way), cached / (prompt + mean))
    # Decode steps with all sequences, each half way through its response, then with those that are longer than x.
    steps = [(max(0.0, rows - at_once * drains) * mean / at_once, at_once, prompt + mean / 2)]
    shares = alive(constants.mean_share) if drains else ()
    for i, share in enumerate(shares):
        any_left = 1 - (1 - share) ** at_once
        attended = prompt + (i + 0.5) / len(shares) * limit
        steps.append((any_left * limit / len(shares), max(1.0, at_once * share), attended))
    parts, dtype_bytes = defaultdict[str, float](float), DTYPE_BYTES[config.model.dtype]
    for count, running, attended in steps:
        for name, seconds in _decode_step(dtype_bytes, dims, engine, running, attended, hardware).items():
            parts[name] += count * seconds
        parts["decode steps"] += count * constants.decode_s
    prefilled = rows / config.rollout.num_samples * forward_flops(dims, num_tokens=prompt, num_head_tokens=0)
    prefill = prefilled / settings.num_workers / hardware.flops
    return {"prefill": prefill, **{name: seconds for name, seconds in parts.items() if seconds}}


def _decode_step(
    dtype_bytes: int, dims: Dims, engine: EnginePlan, running: float, attended: float, hardware: Hardware
) -> dict[str, float]:
    """Estimate the parts of a decode step of that many sequences, which attend to that many tokens each."""
    tp, turns = engine.tp, engine.pp
    reduces = 2 * dims.num_layers
    states: float = running * dims.hidden * dtype_bytes
    reduced = reduces / turns * 2 * states * (tp - 1) / tp
    exchanged = {
        "all-reduces": reduces * (tp > 1) * hardware.latency_s + hardware.seconds(reduced, tp),
        "between stages": (turns - 1) * (hardware.latency_s + states / turns / hardware.network),
    }
    # Every stage is read in every turn, by the sequences whose turn it is.
    reading = {
        "reading weights": turns * engine.weights * read_share(dims, max(1.0, running / turns)) / hardware.hbm,
        "reading keys and values": running * attended * engine.kv_bytes_per_token / hardware.hbm,
    }
    compute = running * _token_flops(dims) / (tp * turns) / hardware.flops
    return ({"compute": compute} if compute > sum(reading.values()) else reading) | exchanged


@cache
def _token_flops(dims: Dims) -> int:
    return forward_flops(dims, num_tokens=1, num_head_tokens=1)


def read_share(dims: Dims, num_sequences: float) -> float:
    """Return the share of an engine's weights that a decode step reads; experts that no sequence goes to are not."""
    if dims.experts is None:
        return 1.0
    of_experts = 3 * dims.hidden * dims.experts.ffn * dims.experts.num * len(dims.experts.layers)
    used = 3 * dims.hidden * dims.experts.ffn * dims.experts.per_token * len(dims.experts.layers)
    others = _token_flops(dims) / 2 - used
    share = 1 - (1 - dims.experts.per_token / dims.experts.num) ** num_sequences
    return (others + share * of_experts) / (others + of_experts)

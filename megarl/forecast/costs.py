"""Estimate how long a step takes on nodes of H100: generate, train, move weights. Never compared with an H100.

All rows have full length, and nothing overlaps. n: tokens of all rows; F: FLOPs of a forward pass over them; m: micro-
batches of a replica per optimizer step; b = 2 bytes; h: hidden size; L: layers; g: devices that train.

    compute     (E·(3 + r) + s)·F·imbalance / (g · FLOP/s)      E epochs, r: share of a forward pass that backward
                                                                computes again, s forward passes,
                                                                imbalance: layers of the longest stage · pp / L
    tp, cp, ep  c passes over a rank's n·b/(dp·cp) · L/pp bytes, c = E·(2 + r) + s, each moving
                tp: (4·h + g)·(tp − 1)/tp (two all-reduces; g: query, key and value sizes, which are gathered if tp
                exceeds the key-value heads); cp: 2·(key and value sizes)·(cp − 1)/tp;
                ep: 2·h·(experts of a token)·(ep − 1)/ep / tp
    bubble      (compute + tp + cp + ep) · (pp − 1)/m           1F1B without interleaving
    dp          per optimizer step 4·P reduced and b·P gathered, each times (D − 1)/D
    offload     what the host keeps of the trainer, there and back

    decoding    max over a step of (weights that its c sequences read + their keys and values at half length) / HBM and
                2·(active parameters)·c / FLOP/s, each over the engine's tp devices; and 2·L all-reduces of c·h. With
                p stages, sequences take p turns of c/p, each of which reads every stage and crosses p − 1 networks
    prefill     F of one prompt per group
    generate    prefill + response tokens · (rows of an engine / c, rounded up) · decoding;
                c: max_num_seqs, or what the KV cache holds
    sync        what a worker receives from other nodes over the network, or from its own over NVLink

Links within a node are NVLink, those between nodes the network: of a group that spans nodes, the share of its members
on other nodes. Shares of peaks in `Hardware` are guesses by experience with other machines, not measurements.
"""

import math
from dataclasses import dataclass, field

from megarl.config.batches import batch_counts, max_path_tokens, max_row_tokens
from megarl.config.recompute import RecomputeConfig
from megarl.config.schema import Config, LayoutConfig
from megarl.plan.memory import DTYPE_BYTES, gradient_bytes
from megarl.plan.run_plan import DevicePlan, EnginePlan, ShardPlan
from megarl.plan.sizes import micro_batches_at_full_length
from megarl.record.performance import FORWARD_AND_BACKWARD, attended, forward_flops
from megarl.weights.families import Dims


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Rates of a device per second: an H100 SXM of eight in a node, with 400 Gb/s to other nodes. Bytes are those of
    one direction; `latency_s` is that of an all-reduce.
    """

    flops: float = 0.4 * 989e12
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
class StepCost:
    """Seconds of a step. train_parts, generate_parts: what they consist of. overlaps: whether engines generate while
    the trainer works.
    """

    generate_parts: dict[str, float]
    train_parts: dict[str, float]
    sync: float
    overlaps: bool
    generate: float = field(init=False)
    train: float = field(init=False)
    total: float = field(init=False)

    def __post_init__(self) -> None:
        generate, train = sum(self.generate_parts.values()), sum(self.train_parts.values())
        object.__setattr__(self, "generate", generate)
        object.__setattr__(self, "train", train)
        object.__setattr__(self, "total", (max(generate, train) if self.overlaps else generate + train) + self.sync)


def step_cost(
    config: Config,
    dims: Dims,
    shards: list[ShardPlan],
    devices: list[DevicePlan],
    engine: EnginePlan,
    *,
    num_forward_passes: int,
    hardware: Hardware,
) -> StepCost:
    """Estimate a step. num_forward_passes: passes over all rows before the update."""
    layout = config.actor.layout
    train = train_parts(
        config,
        dims,
        shards,
        micro_batches=micro_batches_at_full_length(config, config.actor),
        num_forward_passes=num_forward_passes,
        hardware=hardware,
    )
    if config.placement.offload:
        train["offload"] = 2 * max(each.offloaded for each in devices) / hardware.host
    # A whole copy of the weights is spread over so many nodes, of which a worker's own holds one part.
    span = max(layout.tp * layout.cp, layout.ep * layout.etp)
    num_nodes = layout.pp * math.ceil(span / hardware.per_node) if layout.stage_size >= hardware.per_node else 1
    far = 1.0 if config.placement.mode == "split" else 1 - 1 / num_nodes
    return StepCost(
        generate_parts=generate_parts(config, dims, engine, hardware=hardware),
        train_parts=train,
        sync=max(far * engine.weights / hardware.network, (1 - far) * engine.weights / hardware.nvlink),
        overlaps=config.rollout.schedule.staleness > 0,
    )


def train_parts(
    config: Config,
    dims: Dims,
    shards: list[ShardPlan],
    *,
    micro_batches: int,
    num_forward_passes: int,
    hardware: Hardware,
) -> dict[str, float]:
    """Estimate the seconds that parts of the training of a step take."""
    layout, counts, row = config.actor.layout, batch_counts(config), max_row_tokens(config)
    mine = [shard for shard in shards if shard.role == "actor"]
    chunk = max(shard.num_layers for shard in mine) / layout.virtual_pp
    recomputed = recomputed_share(config.actor, dims, num_tokens=row, chunk_layers=chunk)
    dtype_bytes = DTYPE_BYTES[config.model.dtype]
    epochs, rows = config.trainer.num_epochs, counts.rows_per_step
    flops = rows * forward_flops(dims, num_tokens=row, num_head_tokens=config.rollout.max_response_tokens)
    imbalance = max(shard.num_layers for shard in mine) * layout.pp / dims.num_layers
    passes = epochs * (FORWARD_AND_BACKWARD + recomputed) + num_forward_passes
    # Numbers that a rank exchanges per hidden element of its tokens, in all passes and layers of its stage.
    moved = (epochs * (2 + recomputed) + num_forward_passes) * rows * row * dtype_bytes / (layout.dp * layout.cp)
    moved *= dims.num_layers / layout.pp
    tp, cp, ep = layout.tp, layout.cp, layout.ep * layout.etp
    per_token = dims.experts.per_token if dims.experts else 0
    keys = dims.latent.kv_latent if dims.latent else 2 * dims.dim("kv")
    gathered = dims.dim("q") + keys if tp > dims.num_kv_heads else 0
    parts = {
        "compute": passes * flops * imbalance / (layout.world_size * hardware.flops),
        "tp": hardware.seconds(moved * (4 * dims.hidden + gathered) * (tp - 1) / tp, tp),
        "cp": hardware.seconds(moved * keys * (cp - 1) / min(tp, dims.num_kv_heads), cp, tp),
        "ep": hardware.seconds(2 * moved * dims.hidden * per_token * (ep - 1) / ep / tp, ep),
    }
    parts["bubble"] = sum(parts.values()) * bubble(layout, micro_batches)
    largest = max(mine, key=lambda shard: shard.num_parameters)
    num_experts = largest.num_expert_parameters
    each = gradient_bytes(1, dtype_bytes, config.actor.optimizer) + dtype_bytes
    others = each * (largest.num_parameters - num_experts)
    replicas, expert_replicas = layout.dp * layout.cp, layout.expert_dp
    parts["dp"] = counts.optimizer_steps_per_step * (
        hardware.seconds(others * (replicas - 1) / replicas, replicas, tp)
        + hardware.seconds(each * num_experts * (expert_replicas - 1) / expert_replicas, expert_replicas, ep)
    )
    return {name: seconds for name, seconds in parts.items() if seconds}


def recomputed_share(recompute: RecomputeConfig, dims: Dims, *, num_tokens: int, chunk_layers: float) -> float:
    """Return the share of the layers' forward pass over rows of `num_tokens` tokens that backward computes again.

    chunk_layers: the layers of a model chunk. Norms and other element-wise work cost nothing.
    """
    if recompute.recompute == "full":
        return min(1.0, (recompute.recompute_layers or chunk_layers) / chunk_layers)
    experts, latent = dims.experts, dims.latent
    num_sparse = len(experts.layers) if experts else 0
    # Multiplications per token in all layers.
    products = {"mlp": 3 * dims.hidden * dims.ffn * (dims.num_layers - num_sparse)}
    if experts is not None:
        products["shared_experts"] = 3 * dims.hidden * experts.shared_ffn * num_sparse
        routed = dims.hidden * (3 * experts.per_token * experts.ffn + experts.num) * num_sparse
        products["moe"] = routed + products["shared_experts"]
    if latent is not None:
        heads = latent.q_latent * dims.dim("q") + latent.kv_latent * dims.dim("keys_and_values")
        products["mla_up_proj"] = heads * dims.num_layers
    products["core_attn"] = dims.dim("q") * attended(dims, num_tokens) // num_tokens
    modules = recompute.modules_of(has_dense=num_sparse < dims.num_layers, has_experts=num_sparse > 0)
    flops = 2 * num_tokens * sum(products.get(name, 0) for name in modules)
    return flops / forward_flops(dims, num_tokens=num_tokens, num_head_tokens=0)


def bubble(layout: LayoutConfig, micro_batches: int) -> float:
    """Return the time in which pipeline stages idle, as a share of that in which they work: (pp − 1)/m."""
    return (layout.pp - 1) / micro_batches


def generate_parts(config: Config, dims: Dims, engine: EnginePlan, *, hardware: Hardware) -> dict[str, float]:
    """Estimate the seconds that parts of the generation of a step take on each engine, of which all do the same."""
    settings, response = config.rollout.engine, config.rollout.max_response_tokens
    rows = math.ceil(batch_counts(config).rows_per_step / settings.num_engines)
    row, prompt = max_path_tokens(config), max_path_tokens(config) - response
    at_once = min(settings.max_num_seqs, rows, (engine.kv_cache or 0) // engine.kv_bytes_per_token // row)
    if at_once == 0:
        return {"KV cache": math.inf}
    tp, turns = settings.tp, settings.pp
    flops = forward_flops(dims, num_tokens=1, num_head_tokens=1)
    attended, reduces = (row + prompt) / 2, 2 * dims.num_layers
    states = at_once * dims.hidden * DTYPE_BYTES[config.model.dtype]
    reduced = reduces / turns * 2 * states * (tp - 1) / tp
    exchanged = {
        "all-reduces": reduces * (tp > 1) * hardware.latency_s + hardware.seconds(reduced, tp),
        "between stages": (turns - 1) * (hardware.latency_s + states / turns / hardware.network),
    }
    # Every stage is read in every turn, by the sequences whose turn it is.
    reading = {
        "reading weights": turns * engine.weights * read_share(dims, math.ceil(at_once / turns)) / hardware.hbm,
        "reading keys and values": at_once * attended * engine.kv_bytes_per_token / hardware.hbm,
    }
    compute = at_once * flops / settings.num_workers / hardware.flops
    step = ({"compute": compute} if compute > sum(reading.values()) else reading) | exchanged
    steps = response * math.ceil(rows / at_once)
    prompts = math.ceil(rows / config.rollout.num_samples)
    prefilled = prompts * forward_flops(dims, num_tokens=prompt, num_head_tokens=0)
    prefill = prefilled / settings.num_workers / hardware.flops
    return {"prefill": prefill, **{name: steps * seconds for name, seconds in step.items() if seconds}}


def read_share(dims: Dims, num_sequences: int) -> float:
    """Return the share of an engine's weights that a decode step reads; experts that no sequence goes to are not."""
    if dims.experts is None:
        return 1.0
    of_experts = 3 * dims.hidden * dims.experts.ffn * dims.experts.num * len(dims.experts.layers)
    flops = forward_flops(dims, num_tokens=1, num_head_tokens=1)
    used = 3 * dims.hidden * dims.experts.ffn * dims.experts.per_token * len(dims.experts.layers)
    others = flops / 2 - used
    share = 1 - (1 - dims.experts.per_token / dims.experts.num) ** num_sequences
    return (others + share * of_experts) / (others + of_experts)

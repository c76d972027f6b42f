"""Estimate device memory in bytes. P: parameters of a rank; b: bytes of the model's dtype (2 or 4).

    weights      b·P
    average      4·P if b = 2, else 0 (of a teacher that follows the actor, in float32 beside its weights)
    versions     b·P on the host, and as much in checkpoints, for each earlier version that a loss compares with
    gradients    4·P                    (Megatron accumulates them in float32; b·P without grad_reduce_in_fp32)
    optimizer    (12 if b = 2 else 8)·P / D
                 AdamW's two moments in float32 and, for bfloat16, float32 main parameters; D = dp·cp with
                 the distributed optimizer (of experts tp·dp·cp/(ep·etp)), else 1. Moments in bfloat16 take 2,
                 in float8 1 of their 4 bytes; the share `offload_fraction` of all of it is on the host, with as
                 large a share of float32 gradients

    activations of one layer and micro-batch of T tokens (T: tokens on this rank, after context parallelism)
                 b·T·((2 + n)h/s + 3(q + k + f)/tp)
                 n: norms before and after attention and MLP (2 or 4); h: hidden size, q, k: sizes of all query and
                 all key heads (of at least one per rank), f: width of the MLP; s = tp under sequence parallelism,
                 else 1
    where layers have experts of which a token sees e
                 f = e · the width of an expert + that of shared ones, and 2·e·b·T·h·etp/tp more: what goes into
                 and comes out of experts, if all are used alike
    where layers have gated delta nets, in place of 3(q + k)
                 6(k' + v'), their sizes of all key and all value heads, and 2q more in the others, whose outputs have
                 gates: the mean over all layers
with full recompute of n of a chunk's L layers, or of units of u layers
                 b·T·h/s for each of the n, or for every u-th layer, and the activations of what is recomputed at once
    with selective recompute, less of each layer, and once what one layer has less:
                 mlp 3·b·T·f/tp; moe the same and what goes into and comes out of experts; shared_experts 3·b·T·(their
                 width)/tp; moe_act b·T·e·(width)/tp; layernorm b·T·h/s for the norm before experts, and as much with
                 latent attention; mla_up_proj b·T·(2q + 3k)/tp; core_attn nothing
    head         b·c·V/tp + b·T·h
                 c rows of logits (all T where the memory mode keeps them for backward), and the hidden states that
                 the head reads, which their gradients overwrite; those of the output weight are summed where the others
                 are, or, without grad_reduce_in_fp32, apart in float32 (4·h·V/tp more)
    checkpoint   on the hosts of a parameter's D replicas, until it is written: b·P on the first, 12·P / D on each:
                 copies of weights, main parameters (float32 ones too) and moments
                 of a moving average, 4·P on the first
    portable     24·P on the first instead: main parameters and moments, gathered, and copies of them
    KV cache     2·b·layers·k/tp per token; of latent attention b·layers·(latent + rotary part); of layers with a window
                 of w tokens, w/n of it in rows of n tokens; of a gated delta net, a state of 4·v'·d/tp bytes per row, d
                 the width of a key head, and b·(c − 1)·(2k' + v')/tp of the convolution over c tokens

The activations are those that fused kernels keep: inputs of norms and of the matrix products of attention and MLP
((2 + n)h/s); the split heads before and after the rotary embedding, and the attention's output (3q + 3k); the MLP's
gate, up and product (3f). Attention scores are never kept. A method as in Korthikanti et al. 2022 (arXiv:2205.05198).
Not counted: the libraries' own workspaces, communication buffers and fragmentation, which take some GiB on a GPU.
Megatron's unfused layers on the CPU keep more. A pipeline stage frees what it has sent on; with
`overlap_p2p` it keeps that, b·T·h/s for each chunk and micro-batch in flight.
"""

from collections.abc import Collection
from math import ceil

from megarl.config.recompute import RecomputeConfig
from megarl.config.schema import HeadConfig, LayoutConfig, OptimizerConfig
from megarl.parallel.head.memory_mode import HeadMemoryMode, automatic_chunk, choose_memory_mode
from megarl.weights.families import Dims
from megarl.weights.shards import num_stage_layers, padded_vocab

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
GRADIENT_BYTES = 4
MOMENT_BYTES = {"float32": 4, "bfloat16": 2, "float8": 1}
MAIN_PARAMETER_BYTES = 4
AVERAGE_BYTES = 4
# Checkpoints have main parameters, whatever the model's dtype.
SAVED_OPTIMIZER_BYTES = 2 * MOMENT_BYTES["float32"] + MAIN_PARAMETER_BYTES


def weight_bytes(num_parameters: int, dtype_bytes: int) -> int:
    """Return the bytes of a rank's weights: b·P."""
    return dtype_bytes * num_parameters


def average_bytes(num_parameters: int, dtype_bytes: int) -> int:
    """Return a rank's bytes of the moving average that it keeps beside weights made from it: 4·P if b = 2, else 0."""
    return AVERAGE_BYTES * num_parameters if dtype_bytes < AVERAGE_BYTES else 0


def gradient_bytes(num_parameters: int, dtype_bytes: int, optimizer: OptimizerConfig) -> int:
    """Return the bytes of a rank's gradients: 4·P, or b·P."""
    return num_parameters * (GRADIENT_BYTES if optimizer.grad_reduce_in_fp32 else dtype_bytes)


def optimizer_bytes(num_parameters: int, dtype_bytes: int, num_shards: int, optimizer: OptimizerConfig) -> int:
    """Return a device's bytes of AdamW's moments and, unless the model is float32, main parameters, over D shards."""
    per_parameter = MOMENT_BYTES[optimizer.exp_avg_dtype] + MOMENT_BYTES[optimizer.exp_avg_sq_dtype]
    per_parameter += MAIN_PARAMETER_BYTES if dtype_bytes < MAIN_PARAMETER_BYTES else 0
    return ceil((1 - optimizer.offload_fraction) * -(-per_parameter * num_parameters // num_shards))


def optimizer_host_bytes(num_parameters: int, num_shards: int, optimizer: OptimizerConfig) -> int:
    """Return a rank's host bytes of the share of the state that is there, with its gradients: of 16·P/D."""
    per_parameter = SAVED_OPTIMIZER_BYTES + GRADIENT_BYTES
    return ceil(optimizer.offload_fraction * per_parameter * num_parameters / num_shards)


def checkpoint_bytes(num_parameters: int, dtype_bytes: int, num_shards: int, *, shard: int, portable: bool) -> int:
    """Return the host bytes that P parameters of a rank take while a checkpoint is being written.

    num_shards: D, over how many replicas the optimizer state is divided. shard: the number of this replica among them.
    """
    weights = weight_bytes(num_parameters, dtype_bytes) if shard == 0 else 0
    if portable:
        return weights + (2 * SAVED_OPTIMIZER_BYTES * num_parameters if shard == 0 else 0)
    return weights + -(-SAVED_OPTIMIZER_BYTES * num_parameters // num_shards)


def layer_activation_bytes(dims: Dims, layout: LayoutConfig, *, num_tokens: int, dtype_bytes: int) -> int:
    """Return the bytes that one layer keeps for backward of a micro-batch with `num_tokens` tokens on this rank."""
    split = layout.tp if layout.sequence_parallel else 1
    experts = dims.experts
    ffn, routed = dims.ffn, 0
    if experts is not None:
        ffn, routed = experts.per_token * experts.ffn + experts.shared_ffn, experts.per_token
    mixing = 3 * (dims.dim("q") + max(dims.num_kv_heads, layout.tp) * dims.head_dim) + 2 * dims.gated * dims.dim("q")
    if dims.delta is not None:
        # Layers of all kinds count by their mean.
        num_linear, of_delta = len(dims.delta.layers), 6 * (dims.dim("delta_keys") + dims.dim("delta_values"))
        mixing = ((dims.num_layers - num_linear) * mixing + num_linear * of_delta) // dims.num_layers
    wide = mixing + 3 * ffn
    dispatched = 2 * routed * dims.hidden * layout.etp // layout.tp
    return dtype_bytes * num_tokens * ((2 + dims.num_norms) * dims.hidden // split + dispatched + wide // layout.tp)


def recomputed_bytes(
    dims: Dims, layout: LayoutConfig, modules: Collection[str], *, num_tokens: int, dtype_bytes: int
) -> int:
    """Return the bytes that one layer does not keep for backward because these parts of it are recomputed."""
    experts, q, kv, split = dims.experts, dims.dim("q"), dims.dim("kv"), layout.tp if layout.sequence_parallel else 1
    routed, width, shared = (experts.per_token, experts.ffn, experts.shared_ffn) if experts else (0, 0, 0)
    num_norms = (experts is not None) + (dims.latent is not None)
    elements = {
        # Layers of a model with experts are all counted as if they had some.
        "mlp": 0 if experts else 3 * dims.ffn // layout.tp,
        "moe": (3 * (routed * width + shared) + 2 * routed * dims.hidden * layout.etp) // layout.tp,
        "shared_experts": 3 * shared // layout.tp,
        "moe_act": routed * width // layout.tp,
        "layernorm": num_norms * dims.hidden // split,
        "mla_up_proj": (2 * q + 3 * kv) // layout.tp,
        "core_attn": 0,
    }
    return dtype_bytes * num_tokens * sum(elements[name] for name in modules)


def num_kept_layers(layout: LayoutConfig, stage: int, num_layers: int, num_micro_batches: int) -> int:
    """Count the layer activations that a pipeline stage keeps: its layers × its micro-batches in flight (1F1B)."""
    if layout.virtual_pp == 1:
        return min(num_micro_batches, layout.pp - stage) * num_layers
    chunks = 2 * (layout.pp - stage - 1) + (layout.virtual_pp - 1) * layout.pp + 1
    return min(num_micro_batches * layout.virtual_pp, chunks) * num_layers // layout.virtual_pp


def activation_bytes(
    dims: Dims,
    layout: LayoutConfig,
    stage: int,
    *,
    recompute: RecomputeConfig,
    num_tokens: int,
    num_micro_batches: int,
    dtype_bytes: int,
) -> int:
    """Return the bytes that a stage's layers keep at an update's peak, with micro-batches of `num_tokens` tokens."""
    num_layers = num_stage_layers(layout, dims.num_layers)[stage]
    layer = layer_activation_bytes(dims, layout, num_tokens=num_tokens, dtype_bytes=dtype_bytes)
    kept = num_kept_layers(layout, stage, num_layers, num_micro_batches)
    split = layout.tp if layout.sequence_parallel else 1
    of_input = dtype_bytes * num_tokens * dims.hidden // split
    sent_on = kept * layout.virtual_pp // num_layers * of_input if layout.overlaps_p2p else 0
    if recompute.recompute != "full":
        modules = recompute.modules_of(has_dense=dims.experts is None, has_experts=dims.experts is not None)
        saved = recomputed_bytes(dims, layout, modules, num_tokens=num_tokens, dtype_bytes=dtype_bytes)
        return kept * (layer - saved) + saved + sent_on
    if recompute.recompute_layers is not None:
        # As many in each chunk, of which several are in flight.
        inputs = kept * min(1.0, recompute.recompute_layers * layout.virtual_pp / num_layers)
        return int(inputs * of_input + (kept - inputs) * layer) + layer + sent_on
    return kept // recompute.recompute_unit * of_input + recompute.recompute_unit * layer + sent_on


def head_bytes(
    dims: Dims,
    layout: LayoutConfig,
    *,
    vocab_multiple: int,
    head: HeadConfig,
    num_tokens: int,
    dtype_bytes: int,
    backward: bool,
    paired: bool = False,
    sums_apart: bool = False,
) -> int:
    """Return the bytes that the output head of the last stage takes in a pass.

    paired: the pass contains rows and their hinted copies, and a chunk has logits of both. sums_apart: the gradients of
    the output weight are summed in memory of their own.
    """
    rows = padded_vocab(dims.vocab, layout, vocab_multiple) // layout.tp
    kept = dtype_bytes * num_tokens * rows
    chunk = head.chunk_tokens or automatic_chunk(num_tokens, hidden=dims.hidden, num_logits=rows, itemsize=dtype_bytes)
    chunk = min(chunk, num_tokens // 2) * 2 if paired else min(chunk, num_tokens)
    logits = dtype_bytes * chunk * rows
    # `token_local` only decides between two memory modes that take the same memory, so either value does.
    memory_mode = choose_memory_mode(
        head.regime, logits_bytes=kept, memory_bytes=head.memory_mib << 20, token_local=False
    )
    hidden_rows = dtype_bytes * num_tokens * dims.hidden
    apart = GRADIENT_BYTES * rows * dims.hidden if sums_apart else 0
    return (kept if backward and memory_mode is HeadMemoryMode.KEEP else logits) + hidden_rows + apart


def kv_bytes_per_token(dims: Dims, *, tp: int, layers: Collection[int], row_tokens: int, dtype_bytes: int) -> int:
    """Return the KV-cache bytes in these layers on one of `tp` devices per token of a row of `row_tokens` tokens.

    Single heads and latents stay whole.
    """
    states = 0
    if (delta := dims.delta) is not None:
        keys, values = dims.dim("delta_keys"), dims.dim("delta_values")
        states = len(delta.layers & {*layers}) * (
            4 * values * delta.key_dim + dtype_bytes * (delta.conv_width - 1) * (2 * keys + values)
        )
    per_layer = 2 * max(1, dims.num_kv_heads // tp) * dims.head_dim
    if dims.latent is not None:
        per_layer = dims.latent.kv_latent + dims.latent.rope
    of_rows = dtype_bytes * per_layer * sum(dims.window_of(layer, row_tokens) for layer in layers)
    return ceil((of_rows + states // tp) / row_tokens)

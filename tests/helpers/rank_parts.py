"""Parts of the training side run in a pool's ranks: the log-prob head, packing, attention and norm."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from megarl.config.schema import LayoutConfig
from megarl.parallel.worker import RankWorker
from megarl.types import Row
from megarl.weights.attention import AttentionOptions
from tests.helpers.head import HeadProblem, HeadResult, differentiate_head, pair_kl
from tests.helpers.rank_pool import RankContext
from tests.helpers.ranks import join_layout


def head(context: RankContext, problem: HeadProblem, rows_per_rank: int, chunk_tokens: int) -> HeadResult:
    """The log-prob head on this rank's rows of the padded weight."""
    from megarl.parallel.head.statistics import vocab_shard

    group = join_layout(context, LayoutConfig(tp=context.world_size)).layout.tp_group
    weight = problem.padded_weight(rows_per_rank * context.world_size).chunk(context.world_size)[context.rank]
    shard = vocab_shard(group, rows_per_rank, problem.vocab_size)
    return differentiate_head(problem, weight, shard, chunk_tokens=chunk_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackFields:
    """A `Pack` without the Megatron types, and what it makes of scattering 1, 2, 3, …"""

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    max_length: int
    positions: torch.Tensor
    labels: torch.Tensor
    nucleus: torch.Tensor | None
    scattered: torch.Tensor
    scatter_grad: torch.Tensor


def pack_fields(context: RankContext, rows: Sequence[Row], multiple: int, shares_prefixes: bool = False) -> PackFields:
    """`pack_rows`, and `scatter` with the gradient of Σ k² over the scattered values."""
    RankWorker(context.rank).prepare()
    from megarl.parallel.packing import PackAlignment, pack_rows

    alignment = PackAlignment(tp=multiple)
    pack = pack_rows(rows, alignment=alignment, device=torch.device("cpu"), shares_prefixes=shares_prefixes)
    told = pack.packed_seq_params
    assert told.cu_seqlens_q is told.cu_seqlens_kv
    assert told.cu_seqlens_q.is_contiguous()
    assert told.cu_seqlens_q.tolist() == ([0, pack.input_ids.shape[1]] if shares_prefixes else pack.cu_seqlens.tolist())
    values = torch.arange(1.0, 1 + len(pack.labels)).requires_grad_()
    scattered = pack.scatter(values)
    scattered.square().sum().backward()
    assert values.grad is not None
    return PackFields(
        input_ids=pack.input_ids,
        position_ids=pack.position_ids,
        cu_seqlens=pack.cu_seqlens,
        max_length=pack.max_length,
        positions=pack.positions,
        labels=pack.labels,
        nucleus=pack.nucleus,
        scattered=scattered.detach(),
        scatter_grad=values.grad,
    )


def context_parallel_packs(
    context: RankContext, rows: Sequence[Row], cp: int, tp: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Token ids and positions of every context-parallel rank's part of a pack."""
    RankWorker(context.rank).prepare()
    from megarl.parallel.packing import PackAlignment, pack_rows

    device = torch.device("cpu")
    packs = [pack_rows(rows, alignment=PackAlignment(tp=tp, cp=cp, cp_rank=i), device=device) for i in range(cp)]
    return [(pack.input_ids, pack.position_ids) for pack in packs]


def pack_experts(
    context: RankContext, rows: Sequence[Row], *, tp: int, cp: int, replay_routing: bool
) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """The rows of tokens and their experts, in every context-parallel rank's part of a pack."""
    RankWorker(context.rank).prepare()
    from megarl.parallel.packing import PackAlignment, pack_rows

    device = torch.device("cpu")
    packs = [
        pack_rows(
            rows,
            alignment=PackAlignment(tp=tp, cp=cp, cp_rank=i),
            device=device,
            replay_routing=replay_routing,
        )
        for i in range(cp)
    ]
    assert all(pack.packed_seq_params.pack is pack for pack in packs)

    def row_of(pack: Any) -> torch.Tensor:
        rows, tokens = pack.counted
        return torch.full_like(pack.position_ids[0], -1).index_copy(0, tokens, rows)

    return [(row_of(pack), pack.routed_experts) for pack in packs]


def full_kl(
    context: RankContext,
    hidden: torch.Tensor,
    other: torch.Tensor,
    padded_weight: torch.Tensor,
    vocab_size: int,
    *,
    temperature: float,
    chunk_tokens: int,
) -> torch.Tensor:
    """KL(hidden ‖ other) over a vocabulary of which every rank holds as many rows of the padded weight."""
    from megarl.parallel.head.statistics import vocab_shard

    group = join_layout(context, LayoutConfig(tp=context.world_size)).layout.tp_group
    weight = padded_weight.chunk(context.world_size)[context.rank]
    shard = vocab_shard(group, len(weight), vocab_size)
    return pair_kl(hidden, other, weight, shard, temperature=temperature, chunk_tokens=chunk_tokens)


def packed_attention(
    context: RankContext,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rows: Sequence[Row],
    shares_prefixes: bool,
    softmax_scale: float | None,
    options: AttentionOptions,
    grad_output: torch.Tensor,
    score_block: int,
) -> list[torch.Tensor]:
    """Output of the packed attention, and the gradients of query, key and value; capped scores come in such blocks."""
    RankWorker(context.rank).prepare()
    from megarl.parallel import attention as attention_module
    from megarl.parallel.attention import PackedAttention
    from megarl.parallel.packing import PackAlignment, pack_rows

    pack = pack_rows(
        rows,
        alignment=PackAlignment(),
        device=torch.device("cpu"),
        plans_attention=True,
        shares_prefixes=shares_prefixes,
    )
    inputs = [x.requires_grad_() for x in (query, key, value)]
    groups = SimpleNamespace(cp=SimpleNamespace(size=lambda: 1))
    attention = PackedAttention(
        config=None, layer_number=1, softmax_scale=softmax_scale, pg_collection=groups, options=options
    )
    with patch.object(attention_module, "_SCORE_BLOCK", score_block):
        out = attention(*inputs, None, packed_seq_params=pack.packed_seq_params)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad_output)]


def rms_norm(
    context: RankContext,
    weight: torch.Tensor,
    x: torch.Tensor,
    *,
    eps: float,
    sequence_parallel: bool,
    adds_one: bool = False,
) -> tuple[torch.Tensor, bool]:
    """Output of the norm, and whether its weight asks for a reduction of its gradient."""
    norm = _norm_of(context, weight, eps=eps, sequence_parallel=sequence_parallel, adds_one=adds_one)
    with torch.no_grad():
        return norm(x), getattr(norm.weight, "sequence_parallel", False)


def rms_norm_gradients(
    context: RankContext, weight: torch.Tensor, x: torch.Tensor, gradient: torch.Tensor, *, eps: float, adds_one: bool
) -> list[torch.Tensor]:
    """Gradients of x and of the norm's weight, for this gradient of its output."""
    norm = _norm_of(context, weight, eps=eps, sequence_parallel=False, adds_one=adds_one)
    x.requires_grad_()
    return list(torch.autograd.grad(norm(x), [x, norm.weight], gradient))


def wide_norm(
    context: RankContext, weight: torch.Tensor, x: torch.Tensor, gradient: torch.Tensor, *, eps: float
) -> list[torch.Tensor]:
    """Values of the norm over all heads, and gradients, for this rank's heads of [..., heads, width] and weights."""
    group = join_layout(context, LayoutConfig(tp=context.world_size)).layout.tp_group
    from megarl.parallel.norms import WideNorm

    config = SimpleNamespace(
        params_dtype=weight.dtype,
        sequence_parallel=True,
        layernorm_zero_centered_gamma=False,
        layernorm_epsilon=eps,
    )
    own, x, gradient = (
        each.chunk(context.world_size, axis)[context.rank].contiguous()
        for each, axis in ((weight, 0), (x, -2), (gradient, -2))
    )
    norm = WideNorm(config, len(own), group=group)
    with torch.no_grad():
        norm.weight.copy_(own)
    out = norm(x.requires_grad_())
    return [out.detach(), *torch.autograd.grad(out, [x, norm.weight], gradient)]


def _norm_of(
    context: RankContext, weight: torch.Tensor, *, eps: float, sequence_parallel: bool, adds_one: bool
) -> torch.nn.Module:
    RankWorker(context.rank).prepare()
    from megarl.parallel.norms import RMSNorm

    config = SimpleNamespace(
        params_dtype=weight.dtype, sequence_parallel=sequence_parallel, layernorm_zero_centered_gamma=adds_one
    )
    norm = RMSNorm(config, len(weight), eps=eps)
    assert norm.weight.dtype == weight.dtype
    with torch.no_grad():
        norm.weight.copy_(weight)
    return norm


def pack_lengths(context: RankContext, rows: Sequence[Row], tp: int, cp: int, block: int) -> list[tuple[int, int]]:
    """The tokens of each context-parallel rank, and those of the whole pack."""
    from megarl.parallel.packing import PackAlignment, pack_rows

    alignments = [PackAlignment(tp=tp, cp=cp, cp_rank=i, block=block) for i in range(cp)]
    packs = [pack_rows(rows, alignment=alignment, device=torch.device("cpu")) for alignment in alignments]
    return [(pack.input_ids.shape[1], int(pack.cu_seqlens[-1])) for pack in packs]


def arriving(context: RankContext, num_chunks: int, num_batches: int) -> tuple[list[int], list[int]]:
    """The lengths that a stage of two expects from the previous one and from the next; micro-batch i has length i."""
    layout = join_layout(context, LayoutConfig(pp=2)).layout
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megarl.parallel.passes import KnownShapes

    config = TransformerConfig(
        num_layers=4,
        hidden_size=8,
        num_attention_heads=1,
        pipeline_model_parallel_size=2,
        pipeline_dtype=torch.float32,
        virtual_pipeline_model_parallel_size=num_chunks if num_chunks > 1 else None,
    )
    known = KnownShapes(layout.pp_group, config, [(i, 1, 8) for i in range(num_batches)], num_chunks=num_chunks)
    return [length for length, *_ in known._from_previous], [length for length, *_ in known._from_next]

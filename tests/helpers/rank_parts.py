"""Parts of the training side run in a pool's ranks: the log-prob head, norms over ranks and stages."""

from types import SimpleNamespace

import torch

from megarl.config.schema import LayoutConfig
from tests.helpers.head import pair_kl
from tests.helpers.rank_pool import RankContext
from tests.helpers.ranks import join_layout


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


def arriving(context: RankContext, num_chunks: int, num_batches: int) -> tuple[list[int], list[int]]:
    """The lengths that a stage of two expects from the previous one and from the next; micro-batch i has length i."""
    layout = join_layout(context, LayoutConfig(pp=2)).layout
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megarl.parallel.stages import KnownShapes

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

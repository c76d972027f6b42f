"""How the stages of a pool's ranks pass micro-batches on."""

import torch

from megarl.config.schema import LayoutConfig
from tests.helpers.rank_pool import RankContext
from tests.helpers.ranks import join_layout


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

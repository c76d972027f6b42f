"""The kernels that attend over rows which share prefixes, on a device, against float64 attention path by path."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from megarl.config.schema import LayoutConfig
from megarl.host.device.platform import platform
from megarl.parallel.attention_plan import gather_keys, plan_attention
from megarl.parallel.path_blocks import plan_blocks
from megarl.weights.attention import AttentionOptions
from tests.helpers.rank_pool import RankContext
from tests.helpers.ranks import join_layout

Paths = tuple[list[np.ndarray], np.ndarray]


def random_paths(seed: int, root: int, own: Sequence[int]) -> Paths:
    """Sequences of a pack, each after the first a branch of one before it, and the lengths of their own parts."""
    rng = np.random.default_rng(seed)
    sequences, lengths = [np.arange(root)], [root]
    for length in own:
        holder, start = sequences[rng.integers(len(sequences))], sum(lengths)
        begin = rng.integers(1, len(holder) + 1)
        sequences.append(np.concatenate([holder[:begin], np.arange(start, start + length)]))
        lengths.append(length)
    return sequences, np.array(lengths)


def attend_path_by_path(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    paths: Paths,
    scale: float,
    options: AttentionOptions | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Dense softmax of each path, with the own part's outputs: [T, heads·d]."""
    options, outputs = options or AttentionOptions(), []
    groups = query.shape[1] // key.shape[1]
    for sequence, length in zip(*paths, strict=True):
        if not length:
            continue
        index = torch.from_numpy(sequence).to(query.device)
        own, n = index[len(index) - length :], len(index)
        k, v = (x[index].repeat_interleave(groups, 1) for x in (key, value))
        scores = torch.einsum("nhd,mhd->hnm", query[own], k) * scale
        if options.score_cap is not None:
            scores = options.score_cap * (scores / options.score_cap).tanh()
        apart = torch.arange(n - length, n, device=query.device)[:, None] - torch.arange(n, device=query.device)
        scores = scores.masked_fill((apart < 0) | (apart >= (options.window or n)), -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, length, 1)], -1)
        outputs.append(torch.einsum("hnm,mhd->nhd", scores.softmax(-1)[..., :n], v).flatten(1))
    return torch.cat(outputs)


def _module(kind: str, layout: Any, shape: tuple[int, int, int], dtype: torch.dtype, options: AttentionOptions) -> Any:
    """One of megarl's attention layers, as the spec of a model's layer builds it."""
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megarl.parallel.attention import PackedAttention, gathering_attention
    from megarl.parallel.modules import PathAttention

    heads, kv_heads, width = shape
    window = {} if options.window is None else {"window_size": (options.window - 1, 0)}
    config = TransformerConfig(
        num_layers=1,
        hidden_size=heads * width,
        num_attention_heads=heads,
        num_query_groups=kv_heads,
        kv_channels=width,
        params_dtype=dtype,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        **window,
    )
    named: dict[str, Any] = {
        "config": config,
        "layer_number": 1,
        "attn_mask_type": AttnMaskType.padding_causal,
        "attention_type": "self",
        "pg_collection": layout.schedule_groups,
    }
    if kind == "te":
        return gathering_attention()(**named)
    return {"torch": PackedAttention, "flex": PathAttention}[kind](**named, options=options)


def path_errors(
    context: RankContext,
    kind: str,
    paths: Paths,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    options: AttentionOptions,
) -> dict[str, float]:
    """‖Δ‖ / ‖·‖ of the outputs and of the gradients of queries, keys, values and sinks; shape: heads, kv_heads, d."""
    from megatron.core.transformer.enums import AttnMaskType

    from megarl.parallel.packing import PackSeqParams

    worker, device = join_layout(context, LayoutConfig()), platform().device()
    module = _module(kind, worker.layout, shape, dtype, options).to(device)
    heads, kv_heads, width = shape
    generator, total = torch.Generator().manual_seed(0), int(paths[1].sum())
    exact = [
        torch.randn(total, n, width, generator=generator, dtype=torch.float64).to(dtype).to(device).double()
        for n in (heads, kv_heads, kv_heads)
    ]
    weights = torch.randn(total, heads * width, generator=generator, dtype=torch.float64).to(dtype).to(device)
    exact = [x.requires_grad_() for x in exact]
    mine = [x.detach().to(dtype).requires_grad_() for x in exact]
    sinks = None
    if options.sinks:
        with torch.no_grad():
            module.softmax_offset.copy_(torch.randn(heads, generator=generator))
        mine, sinks = [*mine, module.softmax_offset], module.softmax_offset.detach().double().requires_grad_()
        exact = [*exact, sinks]
    pack: Any = type("Pack", (), {})()
    pack.gathered, pack.attention, pack.blocks = (
        plan(*paths, device) for plan in (gather_keys, plan_attention, plan_blocks)
    )
    out = module(
        *mine[:3],
        attention_mask=None,
        attn_mask_type=AttnMaskType.padding_causal,
        packed_seq_params=PackSeqParams(pack=pack),
    )
    out = out.reshape(total, -1)
    expected = attend_path_by_path(*exact[:3], paths, width**-0.5, options, sinks)
    got = torch.autograd.grad(out, mine, weights)
    wanted = torch.autograd.grad(expected, exact, weights.double())
    names = ("output", "query", "key", "value", "sinks")
    pairs = zip(names, (out, *got), (expected, *wanted), strict=False)
    return {name: float((a.double() - b).norm() / b.norm()) for name, a, b in pairs}


def count_compilations(context: RankContext, paths: Sequence[Paths], shape: tuple[int, int, int]) -> list[int]:
    """How many graphs FlexAttention has been compiled to after each of packs of different lengths, with gradients."""
    import torch._dynamo.utils as dynamo

    counts = []
    for each in paths:
        path_errors(context, "flex", each, shape, torch.bfloat16, AttentionOptions())
        counts.append(int(dynamo.counters["stats"]["unique_graphs"]))
    return counts

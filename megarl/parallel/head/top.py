"""The most likely tokens of each row, from those of every vocabulary shard."""

from dataclasses import dataclass

import torch

from megarl.parallel.head.shard import VocabShard

# Token ids travel among float32 statistics, which hold integers up to here.
MAX_ID = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class TopLogprobs:
    """Of each row, the k most likely tokens, likeliest first. logprobs: [N, k], nats; ids: [N, k] int64."""

    logprobs: torch.Tensor
    ids: torch.Tensor


def top_of_chunk(
    logits: torch.Tensor, inverse_temperature: torch.Tensor, shard: VocabShard, top_k: int
) -> torch.Tensor:
    """[2k, n]: the k largest z of this shard and their token ids; −∞ where the shard has fewer."""
    assert shard.start + shard.size <= MAX_ID, f"token ids up to {shard.start + shard.size} do not fit into float32"
    wide = torch.promote_types(logits.dtype, torch.float32)
    parts = torch.zeros(2 * top_k, len(logits), dtype=wide, device=logits.device)
    parts[:top_k] = -torch.inf
    count = min(top_k, shard.size)
    if count:
        values, local = logits.topk(count, dim=1)
        parts[:count] = values.to(wide).t() * inverse_temperature
        parts[top_k : top_k + count] = (local + shard.start).t().to(wide)
    return parts


def top_from_parts(parts: torch.Tensor, lse: torch.Tensor) -> TopLogprobs:
    """[ranks, 2k, N] of all shards → the k largest of all."""
    top_k = parts.shape[1] // 2
    candidates, ids = (part.flatten(0, 1) for part in (parts[:, :top_k], parts[:, top_k:]))
    values, places = candidates.topk(top_k, dim=0)
    return TopLogprobs(logprobs=(values - lse).t(), ids=ids.gather(0, places).t().long())

"""Masked sums, statistics of groups that are keyed by uid, and what is logged about a tensor."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Σ of `values` where `mask`. Selects, not multiplies: what stands elsewhere, NaN too, is unread.

    >>> masked_sum(tensor([1.0, 2.0, 9.0]), tensor([True, True, False])).item()
    3.0
    """
    kept = torch.where(mask, values, values.new_zeros(()))
    return kept.sum() if dim is None else kept.sum(dim)


def row_means(values: Tensor, mask: Tensor) -> Tensor:
    """[B] mean of `values` [B, T] over each row's mask; 0 for a row whose mask is empty.

    >>> row_means(tensor([[1.0, 2.0, 9.0]]), tensor([[True, True, False]])).tolist()
    [1.5]
    """
    return masked_sum(values, mask, dim=-1) / mask.sum(dim=-1).clamp(min=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStats:
    """Statistics of each row's group, [B]: every row carries those of its group."""

    size: Tensor
    mean: Tensor
    std: Tensor


def group_index(uids: Sequence[str], device: torch.device) -> tuple[Tensor, int]:
    """Each row's group as a number [B], and how many groups there are.

    >>> index, num_groups = group_index("aba", torch.device("cpu"))
    >>> index.tolist(), num_groups
    ([0, 1, 0], 2)
    """
    index_of = {uid: i for i, uid in enumerate(dict.fromkeys(uids))}
    return torch.tensor([index_of[uid] for uid in uids], dtype=torch.long, device=device), len(index_of)


def group_stats(values: Tensor, uids: Sequence[str], where: Tensor | None = None) -> GroupStats:
    """Size, mean and unbiased standard deviation (0 for one value) of `values` [B] over rows of equal uid.

    Only rows `where` [B] count, if given; every row carries its group's, 0 for a group without such rows.
    Computed in float64, so that a group of equal values has a deviation of 0 up to ~1e-16.

    >>> stats = group_stats(tensor([1.0, 3.0, 5.0]), "aab")
    >>> stats.mean.tolist(), stats.std.square().round(decimals=2).tolist()
    ([2.0, 2.0, 5.0], [2.0, 2.0, 0.0])
    """
    index, num_groups = group_index(uids, values.device)
    counted = torch.ones_like(index, dtype=torch.bool) if where is None else where

    def group_sum(rows: Tensor) -> Tensor:
        return rows.new_zeros(num_groups).index_add(0, index, torch.where(counted, rows, 0.0))[index]

    values = values.double()
    size = group_sum(torch.ones_like(values))
    mean = group_sum(values) / size.clamp(min=1)
    variance = group_sum((values - mean).square()) / (size - 1).clamp(min=1)
    return GroupStats(size=size, mean=mean, std=variance.sqrt())


def summary(prefix: str, values: Tensor) -> dict[str, float]:
    """`prefix`/{mean,max,min} of `values`; nothing if there are none.

    >>> summary("reward", tensor([1.0, 3.0]))
    {'reward/mean': 2.0, 'reward/max': 3.0, 'reward/min': 1.0}
    """
    if not values.numel():
        return {}
    stats = {"mean": values.mean(), "max": values.max(), "min": values.min()}
    return {f"{prefix}/{name}": float(value.item()) for name, value in stats.items()}

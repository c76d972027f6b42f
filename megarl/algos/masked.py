"""Compute sums and means over masks, statistics of groups (the rows of one prompt), and summaries for metrics."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Self

import numpy as np

from megarl.config.torch_later import Tensor, torch
from megarl.types.batches import BLOCK_TOKENS


def kept(values: Tensor, mask: Tensor) -> Tensor:
    """Return `values` where `mask` is set and 0 elsewhere; what lies elsewhere, even NaN, reaches neither values nor
    gradients that are computed from the result.

    Apply it to the inputs of a formula: a mask on its result alone leaves gradients of 0 · NaN.

    >>> kept(tensor([1.0, torch.nan]), tensor([True, False])).tolist()
    [1.0, 0.0]
    """
    return torch.where(mask, values, values.new_zeros(()))


def require_per_token(values: object, mask: Tensor, what: str) -> None:
    """Raise ValueError unless `values`, which a user's function returned, is a tensor with an element for each of
    `mask`'s: other shapes may be broadcast without an error.

    >>> require_per_token(tensor([1.0]), tensor([[True, False]]), "the loss")
    Traceback (most recent call last):
    ValueError: the loss has shape (1,), expected (1, 2), one for each token; return it before any sum
    """
    got = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else f"type {type(values).__name__}"
    if not isinstance(values, Tensor) or values.shape != mask.shape:
        raise ValueError(
            f"{what} has {got}, expected {tuple(mask.shape)}, one for each token; return it before any sum"
        )


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum `values` where `mask` is set; values elsewhere, even NaN, have no effect.

    >>> masked_sum(tensor([1.0, 2.0, 9.0]), tensor([True, True, False])).item()
    3.0
    """
    inside = kept(values, mask)
    return inside.sum() if dim is None else inside.sum(dim)


def row_means(values: Tensor, mask: Tensor) -> Tensor:
    """Return, per row, the mean [B] of `values` [B, T] where the row's mask is set; 0 for a row with an empty mask.

    >>> row_means(tensor([[1.0, 2.0, 9.0]]), tensor([[True, True, False]])).tolist()
    [1.5]
    """
    return masked_sum(values, mask, dim=-1) / mask.sum(dim=-1).clamp(min=1)


def per_row(values: Tensor, mask: Tensor) -> Tensor:
    """Return the value [B] that each row of `values` [B, T] repeats where its mask is set; 0 for an empty mask.

    >>> per_row(tensor([[9.0, 2.0, 2.0]]), tensor([[False, True, True]])).tolist()
    [2.0]
    """
    return masked_sum(values, mask & (mask.cumsum(-1) == 1), dim=-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSums:
    """Sums over a block of rows; those of several blocks are `merged`. largest: the field that is a maximum instead."""

    largest: ClassVar[str]

    def merged(self, other: Self) -> Self:
        """Return the sums over the rows of both objects."""
        values = {each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)}
        # np.maximum, unlike max(), keeps a NaN.
        largest = np.maximum(getattr(self, self.largest), getattr(other, self.largest))
        return replace(self, **values | {self.largest: float(largest)})


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStats:
    """Number of values, mean and standard deviation of each row's group (the rows with its uid), [B] each."""

    size: Tensor
    mean: Tensor
    std: Tensor


def group_index(uids: Sequence[str], device: "torch.device") -> tuple[Tensor, int]:
    """Return the group number of each row [B], and how many groups there are.

    >>> index, num_groups = group_index("aba", torch.device("cpu"))
    >>> index.tolist(), num_groups
    ([0, 1, 0], 2)
    """
    index_of = {uid: i for i, uid in enumerate(dict.fromkeys(uids))}
    return torch.tensor([index_of[uid] for uid in uids], dtype=torch.long, device=device), len(index_of)


def group_stats(values: Tensor, uids: Sequence[str], where: Tensor | None = None) -> GroupStats:
    """Compute size, mean and unbiased standard deviation of `values` [B] over each group (rows of equal uid).

    If `where` [B] is given, only its rows count. Every row gets the statistics of its group: the deviation of a single
    value is 0, and a group without values has zeros. In float64, the deviation of equal values is at most about 1e-16.

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
    """Return the metrics `prefix`/{mean,max,min} of `values`, or none if `values` is empty.

    >>> summary("reward", tensor([1.0, 3.0]))
    {'reward/mean': 2.0, 'reward/max': 3.0, 'reward/min': 1.0}
    """
    if not values.numel():
        return {}
    stats = {"mean": values.mean(), "max": values.max(), "min": values.min()}
    return {f"{prefix}/{name}": float(value.item()) for name, value in stats.items()}


def row_blocks(values: Tensor) -> list[slice]:
    """Return the slices of a [B, T] tensor into blocks of rows, whose temporaries stay in the processor's caches.

    >>> row_blocks(torch.zeros(3, BLOCK_TOKENS // 2))
    [slice(0, 2, None), slice(2, 4, None)]
    """
    num_rows = max(1, BLOCK_TOKENS // max(1, values.shape[-1]))
    return [slice(start, start + num_rows) for start in range(0, len(values), num_rows)]


def token_summary(prefix: str, values: Tensor, mask: Tensor) -> dict[str, float]:
    """Return the metrics `prefix`/{mean,max,min,std} of `values` [B, T] on the mask, or none if the mask is empty.

    They are computed in float64, a block of rows at a time; std is the population's.

    >>> token_summary("adv", tensor([[1.0, 3.0, 9.0]]), tensor([[True, True, False]]))
    {'adv/mean': 2.0, 'adv/max': 3.0, 'adv/min': 1.0, 'adv/std': 1.0}
    """
    count, mean, squares, highest, lowest = 0, 0.0, 0.0, -np.inf, np.inf
    for rows in row_blocks(mask):
        inside = values[rows].numpy()[mask[rows].numpy()].astype(np.float64)
        if not inside.size:
            continue
        own = inside.mean()
        highest, lowest = max(highest, inside.max()), min(lowest, inside.min())
        # The squares around the mean of both parts (Chan et al.).
        both = count + inside.size
        squares += np.square(inside - own).sum() + (own - mean) ** 2 * count * inside.size / both
        mean, count = mean + (own - mean) * inside.size / both, both
    if not count:
        return {}
    stats = {"mean": mean, "max": highest, "min": lowest, "std": np.sqrt(squares / count)}
    return {f"{prefix}/{name}": float(value) for name, value in stats.items()}

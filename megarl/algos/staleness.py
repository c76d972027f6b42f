"""Measure how stale the samples of a step are: by how many updates the weights that sampled a token lag behind.

The lag of a token in step s is s − 1 − v, where v is the version of the weights that sampled it, so tokens of the
newest weights have lag 0. See `megarl.rollout.scheduler` for its bound.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from megarl.algos.masked import row_blocks
from megarl.config.torch_later import Tensor


def staleness_metrics(lag: Tensor, sampled: Tensor) -> dict[str, float]:
    """Compute how old the weights are that sampled a step's tokens; nothing if engines sampled none.

    lag: [B, T]; sampled: bool [B, T]. lag_mean, lag_max and frac_lag_{k}, the share of tokens of lag k, for every k up
    to the largest. spanning_frac: share of rows with tokens of several versions.

    >>> lag, both = tensor([[1.0, 0.0], [1.0, 1.0]]), tensor([[True, True], [True, True]])
    >>> metrics = staleness_metrics(lag, both)
    >>> metrics["staleness/lag_mean"], metrics["staleness/spanning_frac"]
    (0.75, 0.5)
    """
    counts, num_rows, num_spanning = np.zeros(1, np.int64), 0, 0
    for rows in row_blocks(lag):
        lags, marks = lag[rows].numpy(), sampled[rows].numpy()
        counts = _added(counts, np.bincount(lags[marks].astype(np.int64)))
        largest = np.where(marks, lags, -np.inf).max(-1, initial=-np.inf)
        smallest = np.where(marks, lags, np.inf).min(-1, initial=np.inf)
        num_rows += int(marks.any(-1).sum())
        num_spanning += int((largest > smallest).sum())
    if not num_rows:
        return {}
    shares = (counts / counts.sum()).tolist()
    found = {
        "lag_mean": sum(k * share for k, share in enumerate(shares)),
        "lag_max": float(len(shares) - 1),
        "spanning_frac": num_spanning / num_rows,
    }
    found |= {f"frac_lag_{k}": share for k, share in enumerate(shares)}
    return {f"staleness/{name}": value for name, value in found.items()}


def _added(sums: npt.NDArray[Any], more: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Add up sums by lag, of which either may have more lags."""
    longer, shorter = (sums, more) if len(sums) >= len(more) else (more, sums)
    return np.concatenate([longer[: len(shorter)] + shorter, longer[len(shorter) :]])


def drift_metrics(lag: Tensor, sampled: Tensor, *, rollout_logprobs: Tensor, old_logprobs: Tensor) -> dict[str, float]:
    """Compute how far the updates since a token was sampled have moved its log-prob, by lag; [B, T] each.

    drift_abs_mean_lag_{k}, k ≥ 1: the mean of |d|, d = old_logprobs − rollout_logprobs in nats, over sampled tokens of
    lag k, for every k that occurs. If tokens are both fresh and stale, two root mean squares split the gap: gap_engine
    is that of d over fresh tokens, and gap_staleness² is the mean of d² over stale ones minus gap_engine², at least 0,
    as what the engine does and what updates do are uncorrelated.

    >>> lag, both, zeros = tensor([[1.0, 0.0]]), tensor([[True, True]]), tensor([[0.0, 0.0]])
    >>> found = drift_metrics(lag, both, rollout_logprobs=zeros, old_logprobs=tensor([[-0.5, 0.3]]))
    >>> [round(value, 3) for value in found.values()]
    [0.5, 0.3, 0.4]
    """
    counts, sums, squares = np.zeros(1, np.int64), np.zeros(1), np.zeros(1)
    for rows in row_blocks(lag):
        marks = sampled[rows].numpy()
        lags = lag[rows].numpy()[marks].astype(np.int64)
        drift = np.abs(np.subtract(old_logprobs[rows].numpy(), rollout_logprobs[rows].numpy(), dtype=np.float64))
        counts, sums = _added(counts, np.bincount(lags)), _added(sums, np.bincount(lags, weights=drift[marks]))
        squares = _added(squares, np.bincount(lags, weights=drift[marks] ** 2))
    found = {
        f"drift_abs_mean_lag_{k}": total / count
        for k, (count, total) in enumerate(zip(counts.tolist(), sums.tolist(), strict=True))
        if k and count
    }
    num_stale = counts[1:].sum()
    if counts[0] and num_stale:
        engine = squares[0] / counts[0]
        found["gap_engine"] = float(np.sqrt(engine))
        found["gap_staleness"] = float(np.sqrt(np.maximum(squares[1:].sum() / num_stale - engine, 0.0)))
    return {f"staleness/{name}": value for name, value in found.items()}

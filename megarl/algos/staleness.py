"""Measure how stale the samples of a step are: by how many updates the weights that sampled a token lag behind.

The lag of a token in step s is s − 1 − v, where v is the version of the weights that sampled it, so tokens of the
newest weights have lag 0. See `megarl.rollout.scheduler` for its bound.
"""

import torch
from torch import Tensor

# Name of the per-token quantity with the lags.
LAG = "lag"


def staleness_metrics(lag: Tensor, sampled: Tensor) -> dict[str, float]:
    """Compute how old the weights are that sampled a step's tokens; nothing if engines sampled none.

    lag: [B, T]; sampled: bool [B, T]. lag_mean, lag_max and frac_lag_{k}, the share of tokens of lag k, for every k up
    to the largest. spanning_frac: share of rows with tokens of several versions.

    >>> lag, both = tensor([[1.0, 0.0], [1.0, 1.0]]), tensor([[True, True], [True, True]])
    >>> metrics = staleness_metrics(lag, both)
    >>> metrics["staleness/lag_mean"], metrics["staleness/spanning_frac"]
    (0.75, 0.5)
    """
    if not sampled.any():
        return {}
    counts = torch.bincount(lag[sampled].int()).double()
    shares = (counts / counts.sum()).tolist()
    rows = sampled.any(-1)
    largest = torch.where(sampled, lag, -torch.inf).amax(-1)
    smallest = torch.where(sampled, lag, torch.inf).amin(-1)
    found = {
        "lag_mean": sum(k * share for k, share in enumerate(shares)),
        "lag_max": float(len(shares) - 1),
        "spanning_frac": float((largest > smallest)[rows].double().mean()),
    }
    found |= {f"frac_lag_{k}": share for k, share in enumerate(shares)}
    return {f"staleness/{name}": value for name, value in found.items()}


def drift_metrics(lag: Tensor, sampled: Tensor, *, rollout_logprobs: Tensor, old_logprobs: Tensor) -> dict[str, float]:
    """Compute how far the updates since a token was sampled have moved its log-prob, by lag; [B, T] each.

    drift_abs_mean_lag_{k}, k ≥ 1: the mean of |old_logprobs − rollout_logprobs| in nats over sampled tokens of lag k,
    for every k that occurs.

    >>> lag, both, zeros = tensor([[1.0, 0.0]]), tensor([[True, True]]), torch.zeros(1, 2)
    >>> drift_metrics(lag, both, rollout_logprobs=zeros, old_logprobs=zeros - 0.5)
    {'staleness/drift_abs_mean_lag_1': 0.5}
    """
    lags = lag[sampled].int()
    drift = (old_logprobs[sampled].double() - rollout_logprobs[sampled].double()).abs()
    counts, sums = torch.bincount(lags).tolist(), torch.bincount(lags, weights=drift).tolist()
    found = {
        f"drift_abs_mean_lag_{k}": total / count
        for k, (count, total) in enumerate(zip(counts, sums, strict=True))
        if k and count
    }
    return {f"staleness/{name}": value for name, value in found.items()}

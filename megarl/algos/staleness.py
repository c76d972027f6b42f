"""Measure how stale the samples of a step are: by how many updates the weights that sampled a token lag behind.

The lag of a token in step s is s − 1 − v, where v is the version of the weights that sampled it, so tokens of the
newest weights have lag 0. See `megarl.rollout.scheduler` for its bound.
"""

import torch
from torch import Tensor

# Name of the per-token score with the lags.
LAG = "lag"


def staleness_metrics(
    lag: Tensor, sampled: Tensor, *, rollout_logprobs: Tensor, old_logprobs: Tensor
) -> dict[str, float]:
    """Compute the metrics staleness/* of a step over the tokens that engines sampled; nothing without such tokens.

    lag: [B, T]; sampled: bool [B, T]. lag_mean, lag_max and frac_lag_{k}, the share of tokens of lag k, for every k up
    to the largest. spanning_frac: share of rows with tokens of several versions. drift_abs_mean_lag_{k}, k ≥ 1: the
    mean of |old_logprobs − rollout_logprobs| in nats over tokens of lag k, which the updates since then have caused.

    >>> lag, both = tensor([[1.0, 0.0], [1.0, 1.0]]), tensor([[True, True], [True, True]])
    >>> zeros = torch.zeros(2, 2)
    >>> metrics = staleness_metrics(lag, both, rollout_logprobs=zeros, old_logprobs=zeros - 0.5)
    >>> metrics["staleness/lag_mean"], metrics["staleness/spanning_frac"], metrics["staleness/drift_abs_mean_lag_1"]
    (0.75, 0.5, 0.5)
    """
    if not sampled.any():
        return {}
    lags = lag[sampled].double()
    rows = sampled.any(-1)
    largest = torch.where(sampled, lag, -torch.inf).amax(-1)
    smallest = torch.where(sampled, lag, torch.inf).amin(-1)
    found = {
        "lag_mean": float(lags.mean()),
        "lag_max": float(lags.max()),
        "spanning_frac": float((largest > smallest)[rows].double().mean()),
    }
    drift = (old_logprobs.double() - rollout_logprobs.double()).abs()[sampled]
    for k in range(int(lags.max()) + 1):
        of_lag = lags == k
        found[f"frac_lag_{k}"] = float(of_lag.double().mean())
        if k and of_lag.any():
            found[f"drift_abs_mean_lag_{k}"] = float(drift[of_lag].mean())
    return {f"staleness/{name}": value for name, value in found.items()}

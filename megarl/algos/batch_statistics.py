"""Compute what methods need to know of all tokens or rows of a batch at once: quantiles, sorts and sums.

The driver computes them, from log-probs and entropies of a pass before the update: packing, micro-batches and parallel
layouts do not matter. Public code often takes those of a micro-batch.
"""

from collections.abc import Sequence

import numpy as np

from megarl.config.algo import AlgoConfig
from megarl.config.torch_later import Tensor, torch
from megarl.types import Row

# Name of the quantity with ln ρ = old − rollout of the tokens that the engine sampled, and 0 elsewhere.
LOG_WEIGHT = "log_weight"


def optimizer_batches(uids: Sequence[str], num_prompts: int) -> list[list[int]]:
    """Return the rows of each optimizer batch of a step, by index: those of `num_prompts` groups, in their order.

    >>> optimizer_batches(["a", "b", "a", "c"], 2)
    [[0, 1, 2], [3]]
    """
    names = list(dict.fromkeys(uids))
    parts = (set(names[start : start + num_prompts]) for start in range(0, len(names), num_prompts))
    return [[i for i, uid in enumerate(uids) if uid in part] for part in parts]


def high_entropy(entropy: Tensor, mask: Tensor, share: float) -> Tensor:
    """Return the tokens of the mask whose entropy is at least its (1 − share) quantile over the mask; ties stay
    (arXiv:2506.01939, with a share of 0.2).

    The quantile is interpolated. TRL takes it over a micro-batch, by the current entropies, and masks the entropy bonus
    too. As there, denominators count all tokens.

    >>> mask = tensor([[True, True, True, False]])
    >>> high_entropy(tensor([[1.0, 2.0, 3.0, 9.0]]), mask, 0.5).tolist()
    [[False, True, True, False]]
    """
    if not mask.any():
        return mask
    return mask & (entropy >= float(np.quantile(entropy[mask].double().numpy(), 1 - share)))


def within_second_moment(log_ratios: Tensor, limit: float) -> Tensor:
    """Return which of `log_ratios` [N] stay if the fewest of the largest d² go, such that the mean of the others is
    below `limit` (M2PO, arXiv:2510.01161, with 0.04); at least one stays, and the first of equal ones stay.

    As in AReaL, d is that of the policy at the start of the step; the paper has the current one. AReaL sorts within a
    micro-batch.

    >>> within_second_moment(tensor([0.1, 1.0, -0.2]), 0.04).tolist()
    [True, False, True]
    """
    squares, order = log_ratios.double().square().sort(stable=True)
    means = squares.cumsum(0) / torch.arange(1, len(squares) + 1)
    kept = torch.zeros_like(log_ratios, dtype=torch.bool)
    kept[order[: max(int((means < limit).sum()), 1)]] = True
    return kept


def effective_sample_size(log_weights: Tensor) -> float:
    """Return (Σ w)² / Σ w² of w = exp(log_weights), from logarithms: neither scale nor size of the weights matters.

    VCPO (arXiv:2602.17616) adds 1e-8 to the divisor, which spoils it for small weights.

    >>> round(effective_sample_size(tensor([-15.0, -15.0])), 9)
    2.0
    """
    values = log_weights.double()
    return float((2 * values.logsumexp(0) - (2 * values).logsumexp(0)).exp()) if len(values) else 0.0


def step_scale(rows: Sequence[Row], cfg: AlgoConfig) -> float:
    """Return by what the learning rate of an optimizer step on these rows is multiplied: VCPO's (arXiv:2602.17616)
    min(1, ESS / (rows · step_scale_ess))^step_scale_power, with each row's weight Π ρ over the tokens that an engine
    sampled; 1 without such tokens, or without a power.

    >>> rows = [row([1], log_weight=[0.0]), row([1], log_weight=[-50.0])]
    >>> round(step_scale(rows, AlgoConfig(step_scale_power=0.5)), 4)
    0.7071
    """
    if cfg.step_scale_power is None:
        return 1.0
    sums = [float(row.quantities[LOG_WEIGHT].sum(dtype=np.float64)) for row in rows if row.num_loss_tokens]
    if not sums:
        return 1.0
    share = effective_sample_size(torch.tensor(sums, dtype=torch.float64)) / len(sums)
    return float(min(1.0, share / cfg.step_scale_ess) ** cfg.step_scale_power)

"""Compute the factors that CPO's formulas multiply, as finite tensors per token [B, T] or per row [B, 1].

The parameters of a factor name what it reads: fields of `Terms`, settings of `algo.cpo` and coefficients of its method.
"""

import math

from megarl.algos.cpo.information import MAX_DELTA
from megarl.algos.masked import masked_sum, row_means
from megarl.config.torch_later import Tensor, torch

_MAX_MI = 10.0
_RANGE_EPS = 1e-8


def mutual_information(mi: Tensor) -> Tensor:
    """Return the mutual information of each token with the hint, as the configured estimator computed it.

    >>> mutual_information(tensor([[1.0, -2.0]])).tolist()
    [[1.0, -2.0]]
    """
    return mi


def capped_mi(mi: Tensor) -> Tensor:
    """Return the mutual information capped at 10: min(MI, 10).

    >>> capped_mi(tensor([[12.0, -2.0]])).tolist()
    [[10.0, -2.0]]
    """
    return mi.clamp(max=_MAX_MI)


def capped_delta(delta: Tensor) -> Tensor:
    """Return d = hint_logprobs − old_logprobs, clipped to ±10.

    >>> capped_delta(tensor([[12.0, -2.0]])).tolist()
    [[10.0, -2.0]]
    """
    return delta.clamp(-MAX_DELTA, MAX_DELTA)


def clamped_ratio(delta: Tensor, ratio_clamp: float) -> Tensor:
    """Return the ratio of the probabilities with and without the hint, clip(exp(d), 1/λ, λ), with λ = `ratio_clamp`.

    >>> clamped_ratio(tensor([[0.0, 5.0]]), ratio_clamp=2.0).round(decimals=2).tolist()
    [[1.0, 2.0]]
    """
    bound = math.log(ratio_clamp)
    return delta.clamp(-bound, bound).exp()


def token_entropy(entropy: Tensor) -> Tensor:
    """Return the entropy of the policy's distribution at each token, in nats.

    >>> token_entropy(tensor([[0.5, 1.5]])).tolist()
    [[0.5, 1.5]]
    """
    return entropy


def entropy_gap(entropy: Tensor) -> Tensor:
    """Return, per token, the highest entropy of its row minus the token's entropy.

    >>> entropy_gap(tensor([[0.5, 1.5]])).tolist()
    [[1.0, 0.0]]
    """
    # Entropies are at least 0, and exactly 0 outside the active tokens.
    return entropy.amax(dim=-1, keepdim=True) - entropy


def uncertainty(entropy: Tensor, active: Tensor) -> Tensor:
    """Return u = (H − H_min) / (H_max − H_min + 1e-8) in [0, 1], with H's extremes over the row; 0 where not `active`.

    >>> uncertainty(tensor([[0.5, 1.5, 0.0]]), tensor([[True, True, False]])).round(decimals=2).tolist()
    [[0.0, 1.0, 0.0]]
    """
    low = torch.where(active, entropy, math.inf).amin(dim=-1, keepdim=True)
    spread = entropy.amax(dim=-1, keepdim=True) - low
    return torch.where(active, (entropy - low) / (spread + _RANGE_EPS), 0.0)


def certainty(entropy: Tensor, active: Tensor) -> Tensor:
    """Return the certainty 1 − u, with u from `uncertainty`.

    >>> certainty(tensor([[0.5, 1.5]]), tensor([[True, True]])).round(decimals=2).tolist()
    [[1.0, 0.0]]
    """
    return 1 - uncertainty(entropy, active)


def one_plus_uncertainty(entropy: Tensor, active: Tensor) -> Tensor:
    """Return the factor 1 + u, with u from `uncertainty`.

    >>> one_plus_uncertainty(tensor([[0.5, 1.5]]), tensor([[True, True]])).round(decimals=2).tolist()
    [[1.0, 2.0]]
    """
    return 1 + uncertainty(entropy, active)


def two_minus_uncertainty(entropy: Tensor, active: Tensor) -> Tensor:
    """Return the factor 2 − u, with u from `uncertainty`.

    >>> two_minus_uncertainty(tensor([[0.5, 1.5]]), tensor([[True, True]])).round(decimals=2).tolist()
    [[2.0, 1.0]]
    """
    return 2 - uncertainty(entropy, active)


def vocab_certainty(entropy: Tensor, vocab_size: int) -> Tensor:
    """Return the certainty relative to the vocabulary: 1 − entropy / ln(vocab_size).

    >>> vocab_certainty(tensor([[0.0, math.log(10) / 2]]), vocab_size=10).round(decimals=2).tolist()
    [[1.0, 0.5]]
    """
    return 1 - entropy / math.log(vocab_size)


def row_delta(delta: Tensor, active: Tensor) -> Tensor:
    """Return the row's mean of d = hint_logprobs − old_logprobs, [B, 1].

    >>> row_delta(tensor([[1.0, -2.0]]), tensor([[True, True]])).tolist()
    [[-0.5]]
    """
    return row_means(delta, active)[:, None]


def row_capped_delta(delta: Tensor, active: Tensor) -> Tensor:
    """Return the row's mean of clip(d, ±10), [B, 1], with d = hint_logprobs − old_logprobs.

    >>> row_capped_delta(tensor([[12.0, -2.0]]), tensor([[True, True]])).tolist()
    [[4.0]]
    """
    return row_means(capped_delta(delta), active)[:, None]


def row_mi_sum(mi: Tensor, active: Tensor) -> Tensor:
    """Return the sum of the mutual information over the row, [B, 1]; it grows with the row's length.

    >>> row_mi_sum(tensor([[1.0, -2.0]]), tensor([[True, True]])).tolist()
    [[-1.0]]
    """
    return masked_sum(mi, active, dim=-1)[:, None]


def row_mi_mean(mi: Tensor, active: Tensor) -> Tensor:
    """Return the mean of the mutual information over the row, [B, 1].

    >>> row_mi_mean(tensor([[1.0, -2.0]]), tensor([[True, True]])).tolist()
    [[-0.5]]
    """
    return row_means(mi, active)[:, None]


def row_entropy(entropy: Tensor, active: Tensor) -> Tensor:
    """Return the mean entropy of the row, [B, 1], in nats.

    >>> row_entropy(tensor([[0.5, 1.5]]), tensor([[True, True]])).tolist()
    [[1.0]]
    """
    return row_means(entropy, active)[:, None]


def credit_ratio(advantages: Tensor, delta: Tensor) -> Tensor:
    """Return exp(sign(A)·clip(d, ±10)): above 1 for rewarded tokens the hint favours and penalised ones it disfavours.

    >>> credit_ratio(tensor([[1.0, -1.0]]), tensor([[1.0, 1.0]])).round(decimals=2).tolist()
    [[2.72, 0.37]]
    """
    return (advantages.sign() * capped_delta(delta)).exp()


def verifier_weights(
    advantages: Tensor, delta: Tensor, active: Tensor, weight_clip: float, mix: float, mix_decay_steps: int, step: int
) -> Tensor:
    """Return weights (1 − λ) + λ·w_t for the advantages; in every row, their mean over the `active` tokens is 1.

    In RLSD (arXiv:2604.03128) the verifier gives the advantage's sign and the hint its magnitude. The row mean of 1 is
    not in the paper. λ is `mix` at step 0 and falls linearly to 0 over `mix_decay_steps` (0: constant).
    w_t = clip(exp(sign(A_t)·clip(d_t, ±10)), 1 − weight_clip, 1 + weight_clip), divided by its mean over the row.
    The weights move a positive A towards tokens that the hint makes likelier, and a negative A towards the others. They
    keep every sign, and a row's sum if A is constant over the row. A term added to the advantage would instead pull the
    policy towards the policy with the hint, which leaks the hint (arXiv:2604.03128).

    >>> ones, active = tensor([[1.0, 1.0]]), tensor([[True, True]])
    >>> given = {"weight_clip": 0.25, "mix": 1.0, "mix_decay_steps": 0, "step": 0}
    >>> verifier_weights(ones, tensor([[1.0, -1.0]]), active, **given).tolist()
    [[1.25, 0.75]]
    """
    if mix_decay_steps:
        mix *= max(0.0, 1 - step / mix_decay_steps)
    weights = credit_ratio(advantages, delta).clamp(1 - weight_clip, 1 + weight_clip)
    total = masked_sum(weights, active, dim=-1)[:, None]
    num_tokens = active.sum(dim=-1, keepdim=True)
    # The total is 0 for a row without active tokens.
    weights = weights * num_tokens / total.clamp(min=1 - weight_clip)
    return (1 - mix) + mix * weights

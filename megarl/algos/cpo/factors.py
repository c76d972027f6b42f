"""Compute the finite factors of CPO's formulas, per token [B, T] or per row [B, 1]; `Terms` defines d and MI."""

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from megarl.algos.cpo.information import MAX_DELTA
from megarl.algos.cpo.terms import Terms
from megarl.algos.masked import masked_sum, row_means

Factor: TypeAlias = Callable[[Terms], Tensor]

_MAX_MI = 10.0
_RANGE_EPS = 1e-8


def mi(x: Terms) -> Tensor:
    """Return the mutual information of token and hint, by the configured estimator.

    >>> mi(terms([[1.0, -2.0]])).tolist()
    [[1.0, -2.0]]
    """
    return x.mi


def capped_mi(x: Terms) -> Tensor:
    """Return the mutual information capped at 10: min(MI, 10).

    >>> capped_mi(terms([[12.0, -2.0]], mi_estimator="p_weighted")).round(decimals=2).tolist()
    [[10.0, -0.01]]
    """
    return x.mi.clamp(max=_MAX_MI)


def capped_delta(x: Terms) -> Tensor:
    """Return the log-ratio clipped to ±10: clip(d, ±10).

    >>> capped_delta(terms([[12.0, -2.0]])).tolist()
    [[10.0, -2.0]]
    """
    return x.delta.clamp(-MAX_DELTA, MAX_DELTA)


def clamped_ratio(x: Terms) -> Tensor:
    """Return the clipped likelihood ratio clip(exp(d), 1/λ, λ), with λ = `ratio_clamp`.

    >>> clamped_ratio(terms([[0.0, 5.0]], ratio_clamp=2.0)).round(decimals=2).tolist()
    [[1.0, 2.0]]
    """
    bound = math.log(x.cfg.ratio_clamp)
    return x.delta.clamp(-bound, bound).exp()


def entropy(x: Terms) -> Tensor:
    """Return the entropy of each token.

    >>> entropy(terms([[0.0, 0.0]], entropy=[[0.5, 1.5]])).tolist()
    [[0.5, 1.5]]
    """
    return x.entropy


def entropy_gap(x: Terms) -> Tensor:
    """Return the highest entropy of the row minus the entropy of the token.

    >>> entropy_gap(terms([[0.0, 0.0]], entropy=[[0.5, 1.5]])).tolist()
    [[1.0, 0.0]]
    """
    return _highest_entropy(x) - x.entropy


def uncertainty(x: Terms) -> Tensor:
    """Return uncertainty u = (entropy − lowest of the row) / (highest − lowest + 1e-8), in [0, 1]; 0 if not `active`.

    >>> uncertainty(terms([[0.0, 0.0]], entropy=[[0.5, 1.5]])).round(decimals=2).tolist()
    [[0.0, 1.0]]
    """
    low = torch.where(x.active, x.entropy, math.inf).amin(dim=-1, keepdim=True)
    spread = _highest_entropy(x) - low
    return torch.where(x.active, (x.entropy - low) / (spread + _RANGE_EPS), 0.0)


def certainty(x: Terms) -> Tensor:
    """Return the certainty 1 − u, with u from `uncertainty`.

    >>> certainty(terms([[0.0, 0.0]], entropy=[[0.5, 1.5]])).round(decimals=2).tolist()
    [[1.0, 0.0]]
    """
    return 1 - uncertainty(x)


def one_plus_uncertainty(x: Terms) -> Tensor:
    """Return the factor 1 + u, with u from `uncertainty`.

    >>> one_plus_uncertainty(terms([[0.0, 0.0]], entropy=[[0.5, 1.5]])).round(decimals=2).tolist()
    [[1.0, 2.0]]
    """
    return 1 + uncertainty(x)


def two_minus_uncertainty(x: Terms) -> Tensor:
    """Return the factor 2 − u, with u from `uncertainty`.

    >>> two_minus_uncertainty(terms([[0.0, 0.0]], entropy=[[0.5, 1.5]])).round(decimals=2).tolist()
    [[2.0, 1.0]]
    """
    return 2 - uncertainty(x)


def vocab_certainty(x: Terms) -> Tensor:
    """Return the certainty relative to the vocabulary: 1 − entropy / ln(vocab_size).

    >>> vocab_certainty(terms([[0.0, 0.0]], entropy=[[0.0, math.log(10) / 2]])).round(decimals=2).tolist()
    [[1.0, 0.5]]
    """
    return 1 - x.entropy / math.log(x.inputs.vocab_size)


def row_delta(x: Terms) -> Tensor:
    """Return the mean of d over the row.

    >>> row_delta(terms([[1.0, -2.0]])).tolist()
    [[-0.5]]
    """
    return row_means(x.delta, x.active)[:, None]


def row_capped_delta(x: Terms) -> Tensor:
    """Return the mean of clip(d, ±10) over the row.

    >>> row_capped_delta(terms([[12.0, -2.0]])).tolist()
    [[4.0]]
    """
    return row_means(capped_delta(x), x.active)[:, None]


def row_mi_sum(x: Terms) -> Tensor:
    """Return the sum of MI over the row, which grows with the row's length.

    >>> row_mi_sum(terms([[1.0, -2.0]])).tolist()
    [[-1.0]]
    """
    return masked_sum(x.mi, x.active, dim=-1)[:, None]


def row_mi_mean(x: Terms) -> Tensor:
    """Return the mean of MI over the row.

    >>> row_mi_mean(terms([[1.0, -2.0]])).tolist()
    [[-0.5]]
    """
    return row_means(x.mi, x.active)[:, None]


def row_entropy(x: Terms) -> Tensor:
    """Return the mean entropy of the row.

    >>> row_entropy(terms([[0.0, 0.0]], entropy=[[0.5, 1.5]])).tolist()
    [[1.0]]
    """
    return row_means(x.entropy, x.active)[:, None]


def _highest_entropy(x: Terms) -> Tensor:
    # Entropies are at least 0, and exactly 0 outside the active tokens.
    return x.entropy.amax(dim=-1, keepdim=True)


def verifier_weights(x: Terms) -> Tensor:
    """Return weights (1 − λ) + λ·w_t, whose mean over the tokens that may change is 1 in every row.

    The verifier gives the sign and the hint only the magnitude (RLSD, arXiv:2604.03128); the row mean of 1 is an
    addition to the paper. λ is `mix` at step 0 and falls linearly to 0 over `mix_decay_steps` (0: constant).
    w_t = clip(exp(sign(A_t)·clip(d_t, ±10)), 1 − weight_clip, 1 + weight_clip), divided by its mean over the row.
    Tokens that the hint makes likelier get more of a row's credit, those it makes less likely more of its blame. Signs
    are kept, and so is the row's sum where A is constant over the row. Terms added to the advantage would instead
    pull the policy towards the hinted one, which leaks the hint (arXiv:2604.03128).

    >>> verifier_weights(terms([[1.0, -1.0]], weight_clip=0.25)).tolist()
    [[1.25, 0.75]]
    """
    clip, mix, decay_steps = x.cfg.weight_clip, x.cfg.mix, x.cfg.mix_decay_steps
    if decay_steps:
        mix *= max(0.0, 1 - x.inputs.step / decay_steps)
    weights = (x.advantages.sign() * capped_delta(x)).exp().clamp(1 - clip, 1 + clip)
    total = masked_sum(weights, x.active, dim=-1)[:, None]
    num_tokens = x.active.sum(dim=-1, keepdim=True)
    # The total is 0 for a row without active tokens.
    weights = weights * num_tokens / total.clamp(min=1 - clip)
    return (1 - mix) + mix * weights


# The factors that read the mutual information.
MI_FACTORS: frozenset[Factor] = frozenset({mi, capped_mi, row_mi_sum, row_mi_mean})
# The factors that need entropies, from whichever source.
ENTROPY_FACTORS: frozenset[Factor] = frozenset(
    {
        entropy,
        entropy_gap,
        uncertainty,
        certainty,
        one_plus_uncertainty,
        two_minus_uncertainty,
        vocab_certainty,
        row_entropy,
    }
)

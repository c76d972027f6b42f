"""Compute the loss of rows that start with a demonstration: LUFFY's loss (arXiv:2504.14945), or imitation next to RL.

`demonstration_mask` marks the demonstration tokens. Policy tokens are all other loss tokens. Tensors are [B, T].
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from megarl.algos.aggregation import RowCounts
from megarl.algos.policy_losses import PolicyLossInputs, clipped_surrogate
from megarl.algos.prefixes import DEMONSTRATION
from megarl.algos.reshape import demonstration_reshape, ratio_reshape
from megarl.config.algo import OffPolicyConfig, PolicyLossConfig
from megarl.config.torch_later import Tensor, torch
from megarl.types import Row

# Added to the demonstrator's probabilities before dividing by them.
_PROBABILITY_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedLossTerms:
    """The loss of each token, with graph, and diagnostics of policy tokens and of demonstration tokens, without graph.

    Diagnostics are keyed by metric name and averaged over the tokens of their kind. The configured aggregation sums
    the loss over loss tokens. Values outside the loss mask are undefined.
    """

    loss: Tensor
    policy: Mapping[str, Tensor]
    demonstration: Mapping[str, Tensor]


def luffy_loss(
    x: PolicyLossInputs,
    demonstration_mask: Tensor,
    cfg: OffPolicyConfig,
    clip: PolicyLossConfig,
    target_probs: Tensor | None = None,
) -> MixedLossTerms:
    """Compute LUFFY's loss per token (arXiv:2504.14945).

    Policy tokens: the clipped surrogate of `ppo_clip` on the reshaped ratio R', with the upper clip
    max(1 + clip_high, clip_upper_bound), or −A·R' with `remove_clip`; times the correction weights, if there are any.
    Demonstration tokens: −A·f(P) with P = exp(logprobs). No old policy enters: the demonstrator's probability counts
    as 1. If it is known (`target_probs` q ≥ 0), P / (q + 1e-6) replaces f(P). f is clamped to [min_clip, max_clip],
    and has no gradient where the clamp acts.
    Without demonstration tokens and remove_clip, with R' = R and clip_upper_bound ≤ 1 + clip_high, this is `ppo_clip`.

    >>> x, given = loss_inputs([[1.0, 2.0]], [[1.0, 1.0]]), tensor([[False, False]])
    >>> luffy_loss(x, given, OffPolicyConfig(clip_upper_bound=1.0), PolicyLossConfig()).loss.tolist()
    [[-1.0, -1.2]]
    """
    demonstrated = x.loss_mask & demonstration_mask
    # Inputs are set to 0 outside the tokens they are for, so that a NaN there cannot spoil a gradient.
    own = x.loss_mask & ~demonstrated
    logprobs, old_logprobs = (torch.where(own, v, 0.0) for v in (x.logprobs, x.old_logprobs.detach()))
    surrogate = clipped_surrogate(
        ratio_reshape(cfg).of_ratio(logprobs, old_logprobs),
        torch.where(own, x.advantages, 0.0),
        low=-torch.inf if cfg.remove_clip else 1 - clip.clip_low,
        high=torch.inf if cfg.remove_clip else max(1 + clip.clip_high, cfg.clip_upper_bound),
        dual_clip=None if cfg.remove_clip else clip.dual_clip,
    )
    given = torch.where(demonstrated, x.logprobs, 0.0)
    raw = demonstration_reshape(cfg).of_probability(given)
    if target_probs is not None:
        known = target_probs >= 0
        raw = torch.where(known, given.exp() / (torch.where(known, target_probs, 1.0) + _PROBABILITY_EPS), raw)
    ratio = raw.clamp(cfg.min_clip, cfg.max_clip) if (cfg.min_clip, cfg.max_clip) != (None, None) else raw
    demonstration_loss = -torch.where(demonstrated, x.advantages, 0.0) * ratio
    policy_loss = surrogate.loss if x.correction is None else surrogate.loss * x.correction.detach()
    dtype = x.logprobs.dtype
    return MixedLossTerms(
        loss=torch.where(demonstrated, demonstration_loss, policy_loss),
        policy={
            "actor/on_pg_loss": surrogate.loss.detach(),
            "actor/pg_clipfrac": surrogate.clipped.to(dtype),
            "actor/pg_clipfrac_lower": surrogate.dual_clipped.to(dtype),
            "actor/ppo_kl": -(logprobs - old_logprobs).detach(),
        },
        demonstration={
            "actor/off_pg_loss": demonstration_loss.detach(),
            "actor/off_ratio": ratio.detach(),
            "actor/off_clipfrac": (ratio != raw).to(dtype),
        },
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ImitationMasks:
    """Two disjoint masks, bool [B, T]: the loss tokens of the policy loss, and the tokens of the imitation loss."""

    policy: Tensor
    imitated: Tensor


def imitation_masks(
    loss_mask: Tensor, demonstration_mask: Tensor, tokens: Literal["demonstration", "row"]
) -> ImitationMasks:
    """Mark which tokens get the imitation loss: in rows with a demonstration, its tokens or the whole row.

    loss = agg(policy loss over `policy`) − sft_coef · mean over `imitated` of logprobs

    >>> masks = imitation_masks(tensor([[True, True]]), tensor([[True, False]]), "demonstration")
    >>> masks.policy.tolist(), masks.imitated.tolist()
    ([[False, False]], [[True, False]])
    """
    demonstrated = loss_mask & demonstration_mask
    in_row = demonstrated.any(dim=-1, keepdim=True)
    return ImitationMasks(
        policy=loss_mask & ~in_row, imitated=demonstrated if tokens == "demonstration" else loss_mask & in_row
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedCounts:
    """Counts of an optimizer mini-batch over all ranks, known before its first backward pass.

    policy_loss: rows and tokens of the policy loss. num_policy_tokens, num_demonstration_tokens: loss tokens by who
    wrote them. num_imitated_tokens: tokens of the imitation loss, 0 unless off_policy.loss=sft.
    """

    policy_loss: RowCounts
    num_policy_tokens: int
    num_demonstration_tokens: int
    num_imitated_tokens: int


def count_mixed(rows: Sequence[Row], cfg: OffPolicyConfig) -> MixedCounts:
    """Count rows and tokens by kind; the quantity `demonstration`, if rows have it, marks demonstration tokens.

    >>> count_mixed([row([1, 1, 1], demonstration=[1, 0, 0])], OffPolicyConfig()).num_demonstration_tokens
    1
    """
    num_rows, num_tokens, num_loss, num_demonstrated, num_imitated = 0, 0, 0, 0, 0
    for row in rows:
        own, given = row.num_loss_tokens, row.quantities.get(DEMONSTRATION)
        marked = 0 if given is None else int(np.count_nonzero(row.loss_mask & (given != 0)))
        seen = own
        if cfg.loss == "sft" and marked:
            # As in `imitation_masks`.
            seen, num_imitated = 0, num_imitated + (marked if cfg.sft_tokens == "demonstration" else own)
        num_rows, num_loss = num_rows + (seen > 0), num_loss + seen
        num_tokens, num_demonstrated = num_tokens + own, num_demonstrated + marked
    return MixedCounts(
        policy_loss=RowCounts(num_rows=num_rows, num_tokens=num_loss),
        num_policy_tokens=num_tokens - num_demonstrated,
        num_demonstration_tokens=num_demonstrated,
        num_imitated_tokens=num_imitated,
    )

"""Policy losses per token. Gradients flow through the current policy's log-probs only."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from megarl.algos.registry import Registry
from megarl.config.schema import PolicyLossConfig

# Bounds exp(): a ratio of e^±20 is far outside any clip range, and finite in float32.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLossInputs:
    """Complete rows, every tensor [B, T]; `loss_mask` is bool."""

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    loss_mask: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLossTerms:
    """loss: [B, T] with graph. diagnostics: [B, T] without graph, by metric name; token means are logged.

    Places outside the loss mask carry no meaning.
    """

    loss: Tensor
    diagnostics: Mapping[str, Tensor]


PolicyLoss: TypeAlias = Callable[[PolicyLossInputs, PolicyLossConfig], PolicyLossTerms]

POLICY_LOSSES: Registry[PolicyLoss] = Registry("policy loss", key="algo.policy_loss.name")


@POLICY_LOSSES.register("ppo_clip")
def ppo_clip(x: PolicyLossInputs, cfg: PolicyLossConfig) -> PolicyLossTerms:
    """PPO's clipped surrogate (arXiv:1707.06347) with the dual clip (arXiv:1912.09729), per token.

    r = exp(logprobs − old_logprobs); l = max(−r·A, −clip(r, 1 − clip_low, 1 + clip_high)·A);
    where A < 0, l = min(l, −dual_clip·A). `dual_clip` None turns the last line off.
    Diagnostics: whether the clip (dual clip) decided the loss, and old − new log-prob.
    """
    advantages = x.advantages
    log_ratio = (x.logprobs - x.old_logprobs.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)
    loss = torch.maximum(unclipped, clipped)
    hit_lower = torch.zeros_like(x.loss_mask)
    if cfg.dual_clip is not None:
        bound = -cfg.dual_clip * advantages
        hit_lower = (advantages < 0) & (loss > bound)
        loss = torch.where(hit_lower, bound, loss)
    return PolicyLossTerms(
        loss=loss,
        diagnostics={
            "actor/pg_clipfrac": (clipped > unclipped).to(loss.dtype),
            "actor/pg_clipfrac_lower": hit_lower.to(loss.dtype),
            "actor/ppo_kl": -log_ratio.detach(),
        },
    )


@POLICY_LOSSES.register("gspo")
def gspo(x: PolicyLossInputs, cfg: PolicyLossConfig) -> PolicyLossTerms:
    """Group sequence policy optimisation (arXiv:2507.18071): one ratio per row, the same on all its tokens.

    s = exp(Σ m·(logprobs − old_logprobs) / Σ m) over the row; l = max(−s·A, −clip(s, 1 − clip_low, 1 + clip_high)·A).
    It belongs to the aggregation seq-mean-token-mean. The paper clips at 3e-4 and 4e-4; `dual_clip` is not part of it.
    """
    mask = x.loss_mask.to(x.logprobs.dtype)
    log_ratio = torch.where(x.loss_mask, x.logprobs - x.old_logprobs.detach(), 0.0)
    row_log_ratio = log_ratio.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    ratio = row_log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().expand_as(x.logprobs)
    unclipped = -x.advantages * ratio
    clipped = -x.advantages * ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)
    return PolicyLossTerms(
        loss=torch.maximum(unclipped, clipped),
        diagnostics={
            "actor/pg_clipfrac": (clipped > unclipped).to(ratio.dtype),
            "actor/ppo_kl": -log_ratio.detach(),
        },
    )

"""Compute score centering (arXiv:2609.20807) from the head of likeliest tokens that the engine recorded.

For the tokens H of a token's head, p and q are the probabilities of the policy as it is now and of the engine, both
normalised over all that could be sampled, and P = Σ_H p, Q = Σ_H q. With a weight f of the ratio p/q,

    κ = max(1 − Q, ε)/max(1 − P, ε),  α = κ·f(1/κ),  c_v = sg(q_v·f(p_v/q_v) − α·p_v),  C = Σ_H c_v·log p_v,
    l = −A·(sg(f(p_a/q_a))·log p_a − C),  ε = 1e-6,

where outside H, q is taken as κ·p. f is 1 (`none`), clip(r, low, high) (`tis`), or r where low ≤ r ≤ high, else 0
(`mis`, as IcePop). Where top-k or top-p cut the distribution, H is all that was left: P = Q = 1, and C is exact. A full
head centres the score: Σ_a q_a·∇l_a = 0. `megarl.parallel.head.recorded` finds p over the sharded vocabulary.

Disagreements: ε bounds both masses here and in vime; the author and NeMo RL bound 1 − P alone. vime exponentiates p/q;
here products are formed, which cannot overflow. The author adds Σ p·log p over the vocabulary to C, which has no
gradient. NeMo RL adds A·C to a clipped loss; vime, the author and this module require REINFORCE. Nobody else states the
error: the tail's model moves at most 2·(1 − Q)·max f of mass, so that the L1 error of a token's gradient by its logits
is at most 4·|A|·(1 − Q)·max f while ε is not reached.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np

from megarl.algos.masked import kept, row_means
from megarl.algos.policy_losses import MAX_LOG_RATIO, POLICY_LOSSES, PolicyLossInputs, PolicyLossTerms
from megarl.config.algo import PolicyLossConfig
from megarl.config.torch_later import Tensor, torch
from megarl.errors import DataError, RunError
from megarl.types import Advantages, Row, ScoredBatch
from megarl.types.objectives import HeadProbs

FLOOR = 1e-6
# Name of the quantity with 1 − Q.
ENGINE_TAIL = "engine_tail"
# The bounds of the weight where the settings name none: vime's.
_BOUNDS: Mapping[str, tuple[float, float]] = {"none": (1.0, 1.0), "tis": (0.0, 2.0), "mis": (0.5, 5.0)}
# By what of the head's comparison, the metrics.
_METRICS = {
    "teacher_mass": "actor/sc_engine_head_mass",
    "student_mass": "actor/sc_policy_head_mass",
    "forward_kl": "actor/sc_engine_kl",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Centering:
    """Score centering's C of each token as the head computes it; see the module. low, high: bounds of the weight."""

    weight: Literal["none", "tis", "mis"]
    low: float
    high: float
    # Centering must not depend on which token was sampled.
    keeps_sampled: ClassVar[bool] = False

    @classmethod
    def of(cls, cfg: PolicyLossConfig) -> "Centering":
        """Return the centering of a loss's settings."""
        low, high = _BOUNDS[cfg.center_weight]
        return cls(
            weight=cfg.center_weight,
            low=low if cfg.center_low is None else cfg.center_low,
            high=high if cfg.center_high is None else cfg.center_high,
        )

    def of_ratio(self, log_ratio: Tensor) -> Tensor:
        """Return f(r) of log-ratios, clamped to ±20."""
        log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        if self.weight == "none":
            return torch.ones_like(log_ratio)
        ratio = log_ratio.exp()
        return self._masked(ratio, log_ratio) if self.weight == "mis" else ratio.clamp(self.low, self.high)

    def slopes(self, x: HeadProbs) -> Tensor:
        """Return c_v, [n, K]; 0 where there is no token."""
        p, q = x.log_p.exp(), x.log_q.exp()
        kappa = (x.rest_q.clamp(min=FLOOR) / x.rest_p.clamp(min=FLOOR))[:, None]
        # Written over where it can be: there may be as many tokens as the vocabulary has.
        if self.weight == "none":
            return q.addcmul_(kappa, p, value=-1)
        one = torch.ones_like(kappa)
        if self.weight == "tis":
            weighed = torch.maximum(p, self.low * q) if self.low else p
            alpha = one.clamp(self.low * kappa, self.high * kappa)
            return torch.minimum(weighed, q.mul_(self.high), out=q).addcmul_(alpha, p, value=-1)
        return self._masked(p, x.log_p - x.log_q).addcmul_(self._masked(one, -kappa.log()), p, value=-1)

    def value(self, x: HeadProbs, slopes: Tensor | None) -> Tensor:
        """Return C, [n]."""
        assert slopes is not None
        return torch.linalg.vecdot(slopes, x.log_p)

    def _masked(self, values: Tensor, log_ratio: Tensor) -> Tensor:
        low, high = (log_ratio.new_tensor(bound).log() for bound in (self.low, self.high))
        return torch.where((log_ratio >= low) & (log_ratio <= high), values, 0.0)


@POLICY_LOSSES.register(
    "score_centering",
    options=("compared_with", "kept_versions", "center_weight", "center_low", "center_high", "max_head_error"),
    reads=("rollout_logprobs",),
    measure=Centering.of,
)
def score_centering(x: PolicyLossInputs, cfg: PolicyLossConfig) -> PolicyLossTerms:
    """Compute score centering: l = −A·(sg(f(p_a/q_a))·logprobs − C), with C of the head, which has a gradient.

    The ratio p_a/q_a is that of the current policy to the engine, also where the token is not in the head.

    >>> x = replace(loss_inputs([[2.0]], [[1.0]]), rollout_logprobs=tensor([[-1.0]]), beside=tensor([[0.25]]))
    >>> cfg = PolicyLossConfig(name="score_centering", center_weight="tis", center_high=1.5)
    >>> score_centering(x, cfg).loss.round(decimals=4).tolist()
    [[0.7103]]
    """
    if x.beside is None or x.rollout_logprobs is None:
        raise ValueError(
            "score_centering: nothing compared the policy with the sampler's distribution; it needs megarl train"
        )
    weight = Centering.of(cfg).of_ratio(x.logprobs.detach() - x.rollout_logprobs)
    return PolicyLossTerms(
        loss=-x.advantages * (weight * x.logprobs - x.beside),
        diagnostics={
            "actor/sc_correction": x.beside.detach(),
            "actor/sc_importance_weight": weight,
            "actor/ppo_kl": -x.log_ratio.detach(),
        },
    )


def comparison(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what the head found beside the engine's, per token, by the names of metrics.

    >>> {name: values.tolist() for name, values in comparison({"teacher_mass": tensor([[0.75]])}).items()}
    {'actor/sc_engine_head_mass': [[0.75]]}
    """
    return {_METRICS[name]: values for name, values in found.items() if name in _METRICS}


def with_head(row: Row, *, keeps_sampled: bool) -> Row:
    """Return a row whose head is checked, with the probability `ENGINE_TAIL` that it lacks; 0 where top-k cut.

    keeps_sampled: keep the sampled token, which comes last where it is not among the likeliest. DataError if a token
    that trains has no head.

    >>> from megarl.types import LikelyTokens
    >>> head = LikelyTokens(ids=np.array([[3, 4, 9]]), logprobs=np.log([[0.5, 0.25, 0.125]]))
    >>> found = with_head(replace(row([1]), likely=head), keeps_sampled=False)
    >>> found.likely.ids.tolist(), found.quantities[ENGINE_TAIL].tolist()
    ([[3, 4]], [0.25])
    """
    head = row.likely
    lacking = row.loss_mask if head is None else row.loss_mask & (head.ids < 0).all(1)
    if head is None or lacking.any():
        raise DataError(
            f"row {row.label}: its rollout recorded no likeliest tokens of the engine for response token "
            f"{int(lacking.argmax())}; sample with rollout.head_tokens, or replay a record of a run that did"
        )
    whole = np.ones_like(row.loss_mask) if row.nucleus is None else row.nucleus[:, 0] < 0
    if not keeps_sampled and row.nucleus is None:
        head = head.at((slice(None), slice(-1)))
    mass = np.exp(head.logprobs).sum(1, dtype=np.float64)
    tail = np.where(row.loss_mask & whole, np.clip(1 - mass, 0.0, 1.0), 0.0).astype(np.float32)
    return replace(row, likely=head, quantities={**row.quantities, ENGINE_TAIL: tail})


def bounded_error(advantages: Tensor, batch: ScoredBatch, cfg: PolicyLossConfig) -> Advantages:
    """Return advantages unchanged, with the mean and the largest row's mean of the bound 4·|A|·(1 − Q)·max f.

    RunError if a row's mean exceeds `max_head_error`.

    >>> cfg = PolicyLossConfig(name="score_centering", max_head_error=1.0)
    >>> batch = step("a", [1.0], engine_tail=[[0.0, 0.25]])
    >>> bounded_error(tensor([[9.0, -0.5]]), batch, cfg).metrics
    {'actor/sc_error_bound': 0.25, 'actor/sc_error_bound_max': 0.25, 'actor/sc_tail_mass': 0.125}
    """
    mask, tail = batch.loss_mask, batch.quantity(ENGINE_TAIL)
    rule = Centering.of(cfg)
    bound = 4 * advantages.abs() * tail * max(1.0, rule.high)
    by_row = row_means(bound, mask)
    if len(by_row) and cfg.max_head_error is not None and by_row.max() > cfg.max_head_error:
        i = int(by_row.argmax())
        raise RunError(
            f"algo.policy_loss.max_head_error: score centering may change the gradient of row {i}, of prompt "
            f"{batch.uids[i]}, by {by_row[i].item():.3g} per token, expected at most {cfg.max_head_error:g}, as the "
            f"recorded heads lack {row_means(tail, mask)[i].item():.3g} of the engine's probability; raise "
            "rollout.head_tokens or max_head_error, or truncate with rollout.top_k"
        )
    count = mask.sum().clamp(min=1)
    return Advantages(
        values=advantages,
        metrics={
            "actor/sc_error_bound": float(kept(bound, mask).sum() / count),
            "actor/sc_error_bound_max": float(by_row.max()) if len(by_row) else 0.0,
            "actor/sc_tail_mass": float(kept(tail, mask).sum() / count),
        },
    )

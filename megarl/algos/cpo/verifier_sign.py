"""The verifier gives the sign, the hint only the magnitude (RLSD, arXiv:2604.03128); the row's mean of 1 is ours."""

from torch import Tensor

from megarl.algos.cpo.factors import capped_delta
from megarl.algos.cpo.terms import Terms
from megarl.algos.masked import masked_sum
from megarl.config.algo import CpoConfig


def mix_at(cfg: CpoConfig, step: int) -> float:
    """λ: `mix` at step 0, falling linearly to 0 over `mix_decay_steps` (0: constant)."""
    if not cfg.mix_decay_steps:
        return cfg.mix
    return cfg.mix * max(0.0, 1 - step / cfg.mix_decay_steps)


def verifier_weights(x: Terms) -> Tensor:
    """[B, T] weights (1 − λ) + λ·w_t, whose mean over the tokens that may change is 1 in every row.

    w_t = clip(exp(sign(A_t)·clip(d_t, ±10)), 1 − weight_clip, 1 + weight_clip), divided by its mean over the row:
    of a row's credit (or blame) more falls on the tokens that the hint makes likelier (or less likely). Signs stay,
    and where A is constant over a row, so does its sum. Terms that are added to the advantage pull the policy towards
    the hinted one instead, which leaks the hint (arXiv:2604.03128).
    """
    clip = x.cfg.weight_clip
    weights = (x.advantages.sign() * capped_delta(x)).exp().clamp(1 - clip, 1 + clip)
    total = masked_sum(weights, x.active, dim=-1)[:, None]
    num_tokens = x.active.sum(dim=-1, keepdim=True)
    # A row where nothing may change has total 0.
    weights = weights * num_tokens / total.clamp(min=1 - clip)
    mix = mix_at(x.cfg, x.inputs.step)
    return (1 - mix) + mix * weights

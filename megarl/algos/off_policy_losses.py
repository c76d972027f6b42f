"""Compute policy losses for samples that are stale, or whose log-probs differ from the engine's.

The anchor is what `old_logprobs` hold: with algo.correction.name=rollout_ratio, as in the files of `configs/algo`, the
sampler's log-probs, otherwise the trainer's from the start of the step. r = exp(logprobs − anchor), with the exponent
clamped to ±20; sg is the stop-gradient. All masks and weights are detached.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

from megarl.algos.masked import row_means
from megarl.algos.policy_losses import (
    MAX_LOG_RATIO,
    POLICY_LOSSES,
    PolicyLossInputs,
    PolicyLossTerms,
    clipped_surrogate,
    token_ratio,
)
from megarl.config.algo import PolicyLossConfig
from megarl.config.torch_later import Tensor, torch
from megarl.types.objectives import HeadProbs

# The cap of CTPO's cumulative log-ratios, from above only.
_MAX_CUMULATIVE = 10.0


def _terms(x: PolicyLossInputs, loss: Tensor, **diagnostics: Tensor) -> PolicyLossTerms:
    named = {f"actor/{name}": value.detach().to(loss.dtype) for name, value in diagnostics.items()}
    return PolicyLossTerms(loss=loss, diagnostics={**named, "actor/ppo_kl": -x.log_ratio.detach()})


def binary_tv(logprobs: Tensor, anchor: Tensor) -> Tensor:
    """Return |p − q|, the total variation between "this token" and "another" of policy and anchor; no gradient.

    >>> binary_tv(tensor([0.5]).log(), tensor([0.75]).log()).tolist()
    [0.25]
    """
    return (logprobs.detach().exp() - anchor.exp()).abs()


def binary_kl(logprobs: Tensor, anchor: Tensor) -> Tensor:
    """Return q·ln(q/p) + (1 − q)·ln((1 − q)/(1 − p)) of anchor q and policy p; no gradient.

    1 − q is computed as −expm1(ln q), without the 1e-8 that public code adds. Log-probs are taken to be at most what a
    probability of 1 is rounded from, so that D is finite.

    >>> binary_kl(tensor([0.5]).log(), tensor([0.75]).log()).round(decimals=4).tolist()
    [0.1308]
    """
    nearest = -torch.finfo(logprobs.dtype).eps / 2
    logprobs, anchor = (values.detach().clamp(max=nearest) for values in (logprobs, anchor))
    rest = -anchor.expm1()
    return anchor.exp() * (anchor - logprobs) + rest * (rest.log() - (-logprobs.expm1()).log())


@dataclass(frozen=True, slots=True, kw_only=True)
class TopDivergence:
    """The divergence of policy from engine where each of the engine's k likeliest tokens and the sampled one is an
    outcome of its own, and all others are one; a lower bound of that over the whole vocabulary. It has no gradient.
    """

    kind: Literal["tv", "kl"]
    keeps_sampled: ClassVar[bool] = True

    def slopes(self, x: HeadProbs) -> Tensor | None:
        return None

    def value(self, x: HeadProbs, slopes: Tensor | None) -> Tensor:
        """Return ½·Σ|p − q|, or Σ q·ln(q/p), [n]."""
        q = x.log_q.exp()
        if self.kind == "tv":
            return ((x.log_p.exp() - q).abs().sum(1) + (x.rest_p - x.rest_q).abs()) / 2
        least = torch.finfo(q.dtype).tiny
        rests = x.rest_q * (x.rest_q.clamp(min=least) / x.rest_p.clamp(min=least)).log()
        return torch.where(q > 0, q * (x.log_q - x.log_p), 0.0).sum(1) + rests


def _dppo(x: PolicyLossInputs, cfg: PolicyLossConfig, apart: Tensor) -> PolicyLossTerms:
    moved = x.log_ratio.detach()
    raised = (x.advantages > 0) & (moved > 0) & (apart > cfg.clip_high)
    lowered = (x.advantages < 0) & (moved < 0) & (apart > cfg.clip_low)
    blocked = raised | lowered
    return _terms(x, torch.where(blocked, 0.0, -x.advantages * token_ratio(x)), pg_clipfrac=blocked)


_DPPO_RANGE = ("clip_low", "clip_high")
_DPPO_TOP = (*_DPPO_RANGE, "compared_with", "kept_versions")


@POLICY_LOSSES.register("dppo_tv", options=_DPPO_RANGE)
def dppo_tv(x: PolicyLossInputs, cfg: PolicyLossConfig) -> PolicyLossTerms:
    """Compute DPPO (arXiv:2602.04879) with the binary total variation D = |p − q|: l = −M·r·A.

    M = 0 where A > 0, r > 1 and D > `clip_high`, or A < 0, r < 1 and D > `clip_low`; elsewhere 1. The paper, Stable-RL,
    SkyRL and prime-rl anchor at the sampler; verl at `old`, with −A·sg(min(r, 3))·logprobs·M. 0.2 in all four.

    >>> dppo_tv(loss_inputs([[2.0, 0.5]], [[1.0, 1.0]]), PolicyLossConfig()).loss.round(decimals=2).tolist()
    [[0.0, -0.5]]
    """
    return _dppo(x, cfg, binary_tv(x.logprobs, x.old_logprobs.detach()))


@POLICY_LOSSES.register(
    "dppo_kl", options=_DPPO_RANGE, tuned_clip=0.1, clip_note="its bound is a KL divergence, and SkyRL advises 0.05"
)
def dppo_kl(x: PolicyLossInputs, cfg: PolicyLossConfig) -> PolicyLossTerms:
    """Compute DPPO as `dppo_tv` does, with the divergence `binary_kl`; SkyRL advises 0.05 for both bounds.

    >>> cfg = PolicyLossConfig(clip_high=0.05)
    >>> dppo_kl(loss_inputs([[2.0, 0.5]], [[1.0, 1.0]]), cfg).loss.round(decimals=2).tolist()
    [[0.0, -0.5]]
    """
    return _dppo(x, cfg, binary_kl(x.logprobs, x.old_logprobs.detach()))


def _beside(x: PolicyLossInputs) -> Tensor:
    if x.beside is None:
        raise ValueError("nothing compared the policy with the engine's head; it needs megarl train")
    return x.beside.detach()


@POLICY_LOSSES.register("dppo_top_tv", options=_DPPO_TOP, measure=lambda cfg: TopDivergence(kind="tv"))
def dppo_top_tv(x: PolicyLossInputs, cfg: PolicyLossConfig) -> PolicyLossTerms:
    """Compute DPPO as `dppo_tv` does, with the total variation between the engine's recorded head and the policy, or
    with `compared_with: trainer` over the whole vocabulary, between the policy when it sampled and now.

    It is never below the binary one, so bounds do not carry over. SkyRL reports no gain over `dppo_tv`.

    >>> x = replace(loss_inputs([[2.0]], [[1.0]]), beside=tensor([[0.25]]))
    >>> dppo_top_tv(x, PolicyLossConfig()).loss.tolist()
    [[0.0]]
    """
    return _dppo(x, cfg, _beside(x))


@POLICY_LOSSES.register(
    "dppo_top_kl",
    options=_DPPO_TOP,
    tuned_clip=0.1,
    clip_note="whose bound is a KL divergence; SkyRL advises 0.05 for `dppo_kl`, which is never above it",
    measure=lambda cfg: TopDivergence(kind="kl"),
)
def dppo_top_kl(x: PolicyLossInputs, cfg: PolicyLossConfig) -> PolicyLossTerms:
    """Compute DPPO as `dppo_top_tv` does, with KL(engine ‖ policy) over the head, the token, and all others as one.

    >>> x = replace(loss_inputs([[2.0]], [[1.0]]), beside=tensor([[0.04]]))
    >>> dppo_top_kl(x, PolicyLossConfig(clip_high=0.05)).loss.tolist()
    [[-2.0]]
    """
    return _dppo(x, cfg, _beside(x))


@POLICY_LOSSES.register("drpo", options=("drpo_delta",))
def drpo(x: PolicyLossInputs, cfg: PolicyLossConfig) -> PolicyLossTerms:
    """Compute DRPO (arXiv:2606.09821): l = −A·r + |A|·q·(r − 1)²/(2δ), with the anchor's probability q detached.

    The gradient is that of −A·r times 1 − sign(A·(r − 1))·|p − q|/δ. As |p − q| ≤ 1, it ends nowhere for the authors'
    δ = 12.5, only shrinks by up to 8 %; δ < 1 makes a trust region as DPPO's. They take one update per batch, and
    advantages without division by std. Their ARDRPO's `tv` and `kl` are DPPO.

    >>> drpo(loss_inputs([[2.0]], [[1.0]]), PolicyLossConfig(drpo_delta=0.5)).loss.round(decimals=4).tolist()
    [[-1.6321]]
    """
    ratio, anchor = token_ratio(x), x.old_logprobs.detach().exp()
    pull = x.advantages.abs() * anchor * (ratio - 1).square() / (2 * cfg.drpo_delta)
    return _terms(x, pull - x.advantages * ratio)


@POLICY_LOSSES.register("topr", token_local=False)
def topr(x: PolicyLossInputs, cfg: PolicyLossConfig) -> PolicyLossTerms:
    """Compute TOPR (arXiv:2503.14286): l = −w·A·logprobs, w = 1 where A ≥ 0, else sg(min(Π r, 1)) over the row.

    The paper multiplies rewards; here advantages decide the sign. ROLL clips the ratio of each token instead.

    >>> topr(loss_inputs([[0.5, 1.0]], [[-1.0, -1.0]]), PolicyLossConfig()).loss.round(decimals=2).tolist()
    [[-0.85, -0.5]]
    """
    log_ratio = x.log_ratio.detach().sum(-1, keepdim=True).clamp(-MAX_LOG_RATIO, 0.0)
    weight = torch.where(x.advantages < 0, log_ratio.exp(), 1.0)
    return _terms(x, -weight * x.advantages * x.logprobs, pg_weight=weight)


@POLICY_LOSSES.register("vespo", options=("vespo_pos", "vespo_neg"), token_local=False, takes_weights=True)
def vespo(x: PolicyLossInputs, cfg: PolicyLossConfig) -> PolicyLossTerms:
    """Compute VESPO (arXiv:2602.10693): l = −sg(φ)·A·logprobs, φ = w^k·e^{λ(1 − w)} for a weight w of the row.

    ln w = Σ clip(logprobs − old_logprobs, ±20) + Σ ln of the correction's weights, clamped to ±20; it is not divided by
    the length. k, λ = `vespo_pos` where A ≥ 0, else `vespo_neg`, with the defaults of the authors' code; its docstring
    has (2, 1.5) and (4, 2.5). TRL ends ln w at −18.4 below.

    >>> vespo(loss_inputs([[1.0]], [[2.0]]), PolicyLossConfig()).loss.tolist()
    [[2.0]]
    """
    log_weight = x.log_ratio.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).sum(-1, keepdim=True)
    if x.correction is not None:
        log_weight = log_weight + torch.where(x.loss_mask, x.correction.detach().log(), 0.0).sum(-1, keepdim=True)
    log_weight = log_weight.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    k, rate = (
        torch.where(x.advantages < 0, negative, log_weight.new_tensor(positive))
        for positive, negative in zip(cfg.vespo_pos, cfg.vespo_neg, strict=True)
    )
    weight = (rate + k * log_weight - rate * log_weight.exp()).exp()
    return _terms(x, -weight * x.advantages * x.logprobs, pg_weight=weight)


@POLICY_LOSSES.register(
    "flowrl",
    options=("clip_low", "clip_high", "flowrl_beta"),
    reads=("old_logprobs", "ref_logprobs", "log_z"),
    token_local=False,
    row_ratio=True,
)
def flowrl(x: PolicyLossInputs, cfg: PolicyLossConfig) -> PolicyLossTerms:
    """Compute FlowRL (arXiv:2509.15207): l = sg(w)·(ln Z + mean of ln(π/π_ref) − β·mean of A)² on all tokens of a row.

    w = Π r, clipped to [1 − clip_low, 1 + clip_high], as in one of the authors' versions; others do not clip it, or end
    it at 10. Their ln Z is learned, by a network that reads the prompt's hidden states. Here it is the group's own, of
    `estimate_log_z`: what is squared has the mean 0 over a group at the start of a step.

    >>> x = loss_inputs([[1.0, 1.0]], [[1.0, 1.0]])
    >>> x = replace(x, ref_logprobs=tensor([[-1.0, -1.0]]), log_z=tensor([[4.0, 4.0]]))
    >>> flowrl(x, PolicyLossConfig(flowrl_beta=2.0)).loss.tolist()
    [[4.0, 4.0]]
    """
    assert x.ref_logprobs is not None
    assert x.log_z is not None, "flowrl needs the groups' ln Z"
    log_weight = x.log_ratio.detach().sum(-1, keepdim=True).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    weight = log_weight.exp().clamp(1 - cfg.clip_low, 1 + cfg.clip_high)
    away = x.logprobs - x.ref_logprobs.detach() - cfg.flowrl_beta * x.advantages + x.log_z
    residual = row_means(away, x.loss_mask)[:, None]
    loss = (weight * residual.square()).expand_as(x.logprobs)
    return _terms(x, loss, pg_weight=weight.expand_as(loss), flowrl_residual=residual.expand_as(loss))


_CTPO_NOTE = "its bounds are log-ratios times a root of the place, and the paper uses 0.025 and 0.05"


def _ctpo(x: PolicyLossInputs, cfg: PolicyLossConfig, *, mean: bool) -> PolicyLossTerms:
    place = x.loss_mask.cumsum(-1).clamp(min=1).to(x.logprobs.dtype)
    total = x.log_ratio.detach().cumsum(-1)
    log_ratio = (total / place if mean else total) + x.logprobs - x.logprobs.detach()
    width = place**-0.5 if mean else place**0.5
    surrogate = clipped_surrogate(
        log_ratio.clamp(max=_MAX_CUMULATIVE).exp(),
        x.advantages,
        low=(-cfg.clip_low * width).exp(),
        high=(cfg.clip_high * width).exp(),
        dual_clip=(cfg.ctpo_dual * width).exp(),
    )
    return _terms(x, surrogate.loss, pg_clipfrac=surrogate.clipped, pg_clipfrac_lower=surrogate.dual_clipped)


_register_ctpo = partial(
    POLICY_LOSSES.register,
    options=(*_DPPO_RANGE, "ctpo_dual"),
    token_local=False,
    tuned_clip=0.1,
    clip_note=_CTPO_NOTE,
)


@_register_ctpo("ctpo")
def ctpo(x: PolicyLossInputs, cfg: PolicyLossConfig) -> PolicyLossTerms:
    """Compute CTPO (arXiv:2605.07331): PPO's surrogate with the ratio R_t of the row up to the token, within ±√t.

    ln R_t = Σ_{j ≤ t} (logprobs − old_logprobs), with a gradient through token t alone; t counts loss tokens. R is
    bounded by exp(−`clip_low`·√t) and exp(`clip_high`·√t), and l by −A·exp(`ctpo_dual`·√t) where A < 0. ln R is capped
    at 10 from above only, and has no gradient there.

    >>> cfg = PolicyLossConfig(clip_low=0.025, clip_high=0.7)
    >>> ctpo(loss_inputs([[1.0, 2.0]], [[1.0, 1.0]]), cfg).loss.round(decimals=2).tolist()
    [[-1.0, -2.0]]
    """
    return _ctpo(x, cfg, mean=False)


@_register_ctpo("ctpo_geomean")
def ctpo_geomean(x: PolicyLossInputs, cfg: PolicyLossConfig) -> PolicyLossTerms:
    """Compute CTPO as `ctpo` does, with ln R_t divided by t, and bounds that narrow with 1/√t.

    >>> cfg = PolicyLossConfig(clip_low=0.025, clip_high=0.7)
    >>> ctpo_geomean(loss_inputs([[1.0, 2.0]], [[1.0, 1.0]]), cfg).loss.round(decimals=2).tolist()
    [[-1.0, -1.41]]
    """
    return _ctpo(x, cfg, mean=True)


def balanced_bounds(ratio: Tensor, advantages: Tensor, cfg: PolicyLossConfig) -> tuple[float, float]:
    """Return BAPO's bounds of the ratio for the tokens [N] of an optimizer batch.

    S₊ = Σ r·A over tokens with A ≥ 0 and r ≤ high, and S₋ = Σ r·|A| over those with A < 0 and r ≥ low: the tokens that
    have a gradient. While S₊/(S₋ + 1e-8) is below `bapo_target`, low rises, then high. Public code counts clipped
    tokens too, with max(r, low): raising low then raises S₋, and low always runs to its end. This is our variant.

    >>> balanced_bounds(tensor([1.0, 0.72]), tensor([1.0, -2.0]), PolicyLossConfig(name="bapo"))
    (0.75, 1.2)
    """
    mass = (ratio * advantages.abs()).double()
    positive = advantages >= 0
    (low, most_low), (high, most_high) = cfg.bapo_low, cfg.bapo_high
    # Steps are counted, so that none is lost to rounding.
    lows, highs = (
        [start + 0.05 * i for i in range(1 + math.floor((end - start) / 0.05 + 1e-6))]
        for start, end in ((low, most_low), (high, most_high))
    )
    pairs = [*((each, high) for each in lows), *((lows[-1], each) for each in highs[1:])]
    for low, high in pairs:
        gained = mass[positive & (ratio <= high)].sum()
        lost = mass[~positive & (ratio >= low)].sum()
        if not lost or gained / (lost + 1e-8) >= cfg.bapo_target:
            break
    return low, high


@POLICY_LOSSES.register(
    "bapo", options=("dual_clip", "bapo_low", "bapo_high", "bapo_target"), reads=("old_logprobs", "clip_bounds")
)
def bapo(x: PolicyLossInputs, cfg: PolicyLossConfig) -> PolicyLossTerms:
    """Compute BAPO (arXiv:2510.18927): PPO's surrogate and dual clip, with the bounds of `balanced_bounds`.

    They are searched over all tokens of a step, by the log-probs at its start; public code searches in micro-batches.

    >>> x = replace(loss_inputs([[2.0, 0.5]], [[1.0, -1.0]]), clip_bounds=tensor([[1.5, 0.75]]))
    >>> bapo(x, PolicyLossConfig(name="bapo")).loss.tolist()
    [[-1.5, 0.75]]
    """
    assert x.clip_bounds is not None, "bapo needs the bounds of its batch"
    is_lower, bounds = x.advantages < 0, x.clip_bounds.detach()
    surrogate = clipped_surrogate(
        token_ratio(x),
        x.advantages,
        low=torch.where(is_lower, bounds, 0.0),
        high=torch.where(is_lower, torch.inf, bounds),
        dual_clip=cfg.dual_clip,
    )
    return _terms(x, surrogate.loss, pg_clipfrac=surrogate.clipped, pg_clipfrac_lower=surrogate.dual_clipped)

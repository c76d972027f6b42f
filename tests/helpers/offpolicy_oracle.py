"""Dense float64 reference formulas for off-policy objectives.

Written from the papers' formulas by someone who had not seen our code; sections are numbered as methods came. Nothing
here is fast: every function is the plain formula on small dense
tensors, so that a faster implementation can be compared with it, value and gradient.

Conventions
-----------
* Shapes: `[...]` means any token shape, usually `[B, T]`; `[..., V]` adds the vocabulary; `[B]` is one value a row.
  `mask` is boolean, true on loss tokens. An advantage may be `[B]` (spread over the row's tokens) or `[B, T]`.
* `lp` is the current log-probability of the sampled token and carries the gradient. `old` is the proximal policy at
  the start of the step, `roll` the sampler. Both are constants, and so are advantages: all are detached here.
* A loss is the plain SUM over loss tokens (or rows). How the method itself aggregates is said in each docstring;
  divide by the count you need.
* Wherever a log-ratio is exponentiated it is first clamped to +-20, so beyond that its gradient is zero. The
  exceptions (section 8's one-sided cap, the effective sample size of correction 1) are said where they occur.
* The caller passes float64. Entries outside the mask may hold any finite number: they reach neither the result nor
  its gradient.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

CLAMP = 20.0  # log-ratios are clamped to [-CLAMP, CLAMP] before exp
TAIL_FLOOR = 1e-6  # section 1: least probability mass of a tail
NEAREST_TO_ONE = 2.0**-53  # section 2: least 1 - p that binary_kl resolves


# --------------------------------------------------------------------------------------------------------- helpers


def clamped_exp(log_ratio: Tensor) -> Tensor:
    """exp(clamp(x, -20, 20)); the gradient is zero outside the clamp."""
    return log_ratio.clamp(-CLAMP, CLAMP).exp()


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum of `values` where `mask` holds; whatever stands elsewhere is ignored."""
    return values.masked_fill(~mask, 0.0).sum()


def per_token(advantage: Tensor, mask: Tensor) -> Tensor:
    """The detached advantage in the shape of `mask`: `[B]` is spread over the row, `[B, T]` is kept."""
    a = advantage.detach()
    if a.dim() < mask.dim():
        a = a.unsqueeze(-1)
    return a.expand(mask.shape)


def token_logp(logits: Tensor, tokens: Tensor) -> Tensor:
    """log softmax(logits) at `tokens`: `[..., V]`, `[...]` -> `[...]`."""
    return logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def log1mexp(x: Tensor) -> Tensor:
    """log(1 - e^x) for x <= 0 without cancellation (correction 5); -inf at x = 0."""
    near_zero = x > -math.log(2.0)
    return torch.where(near_zero, torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(x)))


def ppo_term(ratio: Tensor, a: Tensor, low: Tensor | float, high: Tensor | float) -> Tensor:
    """max(-r A, -clip(r, low, high) A), token by token."""
    low_t = torch.as_tensor(low, dtype=ratio.dtype)
    high_t = torch.as_tensor(high, dtype=ratio.dtype)
    clipped = torch.clamp(ratio, low_t, high_t)  # gradient 1 at the bounds themselves
    return torch.maximum(-ratio * a, -clipped * a)


# ------------------------------------------------------------------------------------------- 1. score centering


def sc_weight(log_ratio: Tensor, mode: str, lo: float, hi: float) -> Tensor:
    """Section 1. f(r) at r = e^log_ratio, detached; the log-ratio is clamped to +-20 before exp.

    none: 1.   tis: clip(r, lo, hi).   mis: r * 1[lo <= r <= hi].
    """
    d = log_ratio.detach()
    r = clamped_exp(d)
    if mode == "none":
        return torch.ones_like(r)
    if mode == "tis":
        return r.clamp(lo, hi)
    if mode == "mis":
        return torch.where(_log_ratio_inside(d, lo, hi), r, torch.zeros_like(r))
    raise ValueError(mode)


def _log_ratio_inside(d: Tensor, lo: float, hi: float) -> Tensor:
    log_lo = math.log(lo) if lo > 0 else -math.inf
    log_hi = math.log(hi) if hi < math.inf else math.inf
    return (d >= log_lo) & (d <= log_hi)


def sc_q_times_f(logp: Tensor, logq: Tensor, mode: str, lo: float, hi: float) -> Tensor:
    """Section 1, product form: q * f(p/q), detached, formed without the quotient.

    none: q.   tis: clip(p, lo q, hi q).   mis: p * 1[log lo <= log p - log q <= log hi].
    No clamp is needed here, so for r < e^-20 it differs from q * sc_weight by less than q * e^-20.
    """
    p, q = logp.detach().exp(), logq.detach().exp()
    if mode == "none":
        return q
    if mode == "tis":
        out = torch.maximum(p, lo * q)
        return out if hi == math.inf else torch.minimum(out, hi * q)
    if mode == "mis":
        return torch.where(_log_ratio_inside(logp.detach() - logq.detach(), lo, hi), p, torch.zeros_like(p))
    raise ValueError(mode)


def sc_alpha(kappa: Tensor, mode: str, lo: float, hi: float) -> Tensor:
    """Section 1. alpha = kappa * f(1/kappa): the weight of the tail relative to p.

    none: kappa.   tis: clip(1, lo kappa, hi kappa).   mis: 1[1/hi <= kappa <= 1/lo].
    """
    if mode == "none":
        return kappa
    one = torch.ones_like(kappa)
    if mode == "tis":
        out = torch.maximum(one, lo * kappa)
        return out if hi == math.inf else torch.minimum(out, hi * kappa)
    if mode == "mis":
        inside = (kappa * hi >= 1.0) & (kappa * lo <= 1.0)
        return torch.where(inside, one, torch.zeros_like(kappa))
    raise ValueError(mode)


def sc_kappa(logp_head: Tensor, logq_head: Tensor, head_mask: Tensor) -> Tensor:
    """Section 1, tail model: kappa = max(1 - Q, 1e-6) / max(1 - P, 1e-6), P and Q the head's masses."""
    p_mass = logp_head.detach().exp().masked_fill(~head_mask, 0.0).sum(-1)
    q_mass = logq_head.detach().exp().masked_fill(~head_mask, 0.0).sum(-1)
    return (1.0 - q_mass).clamp(min=TAIL_FLOOR) / (1.0 - p_mass).clamp(min=TAIL_FLOOR)


def sc_head_coefficients(
    logp_head: Tensor, logq_head: Tensor, head_mask: Tensor, mode: str, lo: float, hi: float
) -> Tensor:
    """Section 1. c_v = sg(q_v f(p_v/q_v) - alpha p_v) on the head, 0 where `head_mask` is false. `[..., k]`."""
    alpha = sc_alpha(sc_kappa(logp_head, logq_head, head_mask), mode, lo, hi).unsqueeze(-1)
    c = sc_q_times_f(logp_head, logq_head, mode, lo, hi) - alpha * logp_head.detach().exp()
    return c.masked_fill(~head_mask, 0.0)


def score_centering_head(
    logits: Tensor,
    tokens: Tensor,
    token_logq: Tensor,
    head_ids: Tensor,
    head_logq: Tensor,
    head_mask: Tensor,
    advantage: Tensor,
    mask: Tensor,
    mode: str = "tis",
    lo: float = 0.0,
    hi: float = 2.0,
) -> Tensor:
    """Section 1, recorded head with tail model. Sum over loss tokens of

        L_t = -A [ sg(f(p_a/q_a)) lp_a - C ],   C = sum over the head of c_v lp_v.

    `logits` `[..., V]` current policy; `token_logq` `[...]` the sampler's log-prob of the sampled token, which need
    not lie in the head; `head_ids`, `head_logq`, `head_mask` `[..., k]` distinct ids, the sampler's log-probs
    normalised over all that could be sampled, and which entries are real. Only the final lp carry a gradient.
    The value is not that of the dense form (the tail's p lp is left out); the gradient is.
    Paper and vime: token mean over the batch.
    """
    logp = logits.log_softmax(-1)
    lp_a = logp.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    lp_head = logp.gather(-1, head_ids)
    c = sc_head_coefficients(lp_head, head_logq, head_mask, mode, lo, hi)
    correction = (c * lp_head).masked_fill(~head_mask, 0.0).sum(-1)
    weight = sc_weight(lp_a - token_logq, mode, lo, hi)
    return masked_sum(-per_token(advantage, mask) * (weight * lp_a - correction), mask)


def sc_support_coefficients(logp_s: Tensor, logq_s: Tensor, support: Tensor, mode: str, lo: float, hi: float) -> Tensor:
    """Section 1, full support. c_v = sg(q f(p/q) - f(1) p) on the support, 0 elsewhere. `[..., V]`."""
    f_one = sc_weight(torch.zeros((), dtype=logp_s.dtype), mode, lo, hi)
    c = sc_q_times_f(logp_s, logq_s, mode, lo, hi) - f_one * logp_s.detach().exp()
    return c.masked_fill(~support, 0.0)


def score_centering_support(
    logits: Tensor,
    tokens: Tensor,
    support: Tensor,
    logq_s: Tensor,
    advantage: Tensor,
    mask: Tensor,
    mode: str = "tis",
    lo: float = 0.0,
    hi: float = 2.0,
) -> Tensor:
    """Section 1, full support (0 < top_p < 1). Sum over loss tokens of L_t = -A [ sg(f(p_a/q_a)) lp_a - C ] with

        C = sum over S of sg(q f(p/q) - f(1) p) lp,

    everything normalised on the support S (`support` `[..., V]`, boolean, containing the sampled token); there is no
    tail. `logq_s` `[..., V]` holds the sampler's log-probs on S and anything finite outside.
    """
    logp = logits.masked_fill(~support, -math.inf).log_softmax(-1).masked_fill(~support, 0.0)
    lp_a = logp.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    logq_a = logq_s.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    c = sc_support_coefficients(logp, logq_s, support, mode, lo, hi)
    correction = (c * logp).sum(-1)
    weight = sc_weight(lp_a - logq_a, mode, lo, hi)
    return masked_sum(-per_token(advantage, mask) * (weight * lp_a - correction), mask)


# ------------------------------------------------------------------------------------------------------- 2. DPPO


def binary_tv(lp: Tensor, anchor: Tensor) -> Tensor:
    """Section 2. D = |p - e^b|, detached."""
    return (lp.detach().exp() - anchor.detach().exp()).abs()


def binary_kl(lp: Tensor, anchor: Tensor) -> Tensor:
    """Section 2, correction 5. D = e^b (b - lp) + (1 - e^b) log((1 - e^b)/(1 - p)), detached.

    1 - e^b and 1 - p come from log1mexp; the codes' 1e-8 is left out. A log-prob is taken as at most -2^-53, the
    resolution of float64 at probability 1: a log-prob that was rounded to 0 would make D infinite or NaN.
    """
    lp, b = lp.detach().clamp(max=-NEAREST_TO_ONE), anchor.detach().clamp(max=-NEAREST_TO_ONE)
    log_rest_b, log_rest_p = log1mexp(b), log1mexp(lp)
    return b.exp() * (b - lp) + log_rest_b.exp() * (log_rest_b - log_rest_p)


def _topk_sets(anchor_logp: Tensor, tokens: Tensor, k: int) -> Tensor:
    """Boolean `[..., V]`: the k likeliest ids of the anchor together with the sampled token."""
    ids = anchor_logp.detach().topk(min(k, anchor_logp.shape[-1]), dim=-1).indices
    chosen = torch.zeros_like(anchor_logp, dtype=torch.bool).scatter(-1, ids, True)
    return chosen.scatter(-1, tokens.unsqueeze(-1), True)


def topk_tv(logits: Tensor, anchor_logp: Tensor, tokens: Tensor, k: int) -> Tensor:
    """Section 2. D = 1/2 sum |p - e^b| over TopK(e^b, k) with the sampled token, and one "other" entry. Detached.

    "other" holds the remaining mass (summed directly rather than as 1 - sum).
    """
    p, q = logits.detach().softmax(-1), anchor_logp.detach().exp()
    chosen = _topk_sets(anchor_logp, tokens, k)
    inside = (p - q).abs().masked_fill(~chosen, 0.0).sum(-1)
    other = (p.masked_fill(chosen, 0.0).sum(-1) - q.masked_fill(chosen, 0.0).sum(-1)).abs()
    return 0.5 * (inside + other)


def topk_kl(logits: Tensor, anchor_logp: Tensor, tokens: Tensor, k: int) -> Tensor:
    """Section 2. D = sum e^b log(e^b/p) over TopK(e^b, k) with the sampled token, and one "other" entry. Detached.

    "other" is left out when it is empty (0 log 0 = 0).
    """
    logp, b = logits.detach().log_softmax(-1), anchor_logp.detach()
    chosen = _topk_sets(anchor_logp, tokens, k)
    inside = (b.exp() * (b - logp)).masked_fill(~chosen, 0.0).sum(-1)
    other_p = logp.masked_fill(chosen, -math.inf).logsumexp(-1)
    other_b = b.masked_fill(chosen, -math.inf).logsumexp(-1)
    empty = torch.isneginf(other_b)
    other = other_b.exp() * (other_b - other_p)
    return inside + torch.where(empty, torch.zeros_like(other), other)


def dppo_mask(
    lp: Tensor, anchor: Tensor, advantage: Tensor, mask: Tensor, divergence: Tensor, delta_low: float, delta_high: float
) -> Tensor:
    """Section 2. M = 0 iff (A > 0, r > 1, D > delta_high) or (A < 0, r < 1, D > delta_low); else 1. Boolean.

    Outside `mask` it is false.
    """
    a = per_token(advantage, mask)
    d = lp.detach() - anchor.detach()
    up = (a > 0) & (d > 0) & (divergence > delta_high)
    down = (a < 0) & (d < 0) & (divergence > delta_low)
    return mask & ~(up | down)


def dppo(
    lp: Tensor, anchor: Tensor, advantage: Tensor, mask: Tensor, divergence: Tensor, delta_low: float, delta_high: float
) -> Tensor:
    """Section 2. L = -sum M r A with r = exp(lp - b), untruncated (but for the +-20 clamp of the log-ratio).

    `anchor` is b at the sampled token (the paper: the sampler), `divergence` one of the functions above with the same
    anchor. Aggregation differs between the codes; prime-rl: sum over the global token count.
    """
    keep = dppo_mask(lp, anchor, advantage, mask, divergence, delta_low, delta_high)
    return masked_sum(-clamped_exp(lp - anchor.detach()) * per_token(advantage, mask), keep)


# ------------------------------------------------------------------------------------------------------- 3. DRPO


def drpo(lp: Tensor, roll: Tensor, advantage: Tensor, mask: Tensor, delta: float = 12.5) -> Tensor:
    """Section 3. L_t = -A r + |A| q (r - 1)^2 / (2 delta), r = exp(lp - roll) differentiated, q = e^roll a constant.

    Inside the clamp the gradient is -A w grad r with w = 1 - sign(A (r - 1)) |p - q| / delta.
    Published aggregation: sum over a row / 8192, then the mean over rows.
    """
    a = per_token(advantage, mask)
    r = clamped_exp(lp - roll.detach())
    return masked_sum(-a * r + a.abs() * roll.detach().exp() * (r - 1.0) ** 2 / (2.0 * delta), mask)


# ------------------------------------------------------------------------------------------------------- 4. M2PO


def m2po_keep(old: Tensor, roll: Tensor, mask: Tensor, tau: float = 0.04) -> Tensor:
    """Section 4. d = (old - roll)^2 over all loss tokens; drop the fewest largest d so that the mean of the rest is
    below `tau` (strictly); keep at least one. Boolean, false outside `mask`.

    Among equal d the earlier token (row by row) is kept. d is not exponentiated, so it is not clamped.
    """
    d = (old.detach() - roll.detach())[mask] ** 2
    keep = torch.zeros_like(mask)
    n = d.numel()
    if n == 0:
        return keep
    ordered, order = torch.sort(d, stable=True)  # ascending: the kept ones are a prefix
    size = 1
    for count in range(n, 0, -1):
        if bool(ordered[:count].mean() < tau):
            size = count
            break
    chosen = torch.zeros(n, dtype=torch.bool)
    chosen[order[:size]] = True
    keep[mask] = chosen
    return keep


def m2po(
    lp: Tensor,
    old: Tensor,
    roll: Tensor,
    advantage: Tensor,
    mask: Tensor,
    tau: float = 0.04,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Tensor:
    """Section 4. The decoupled PPO term on the kept tokens: sum of sg(rho) max(-r A, -clip(r, 1-eps, 1+eps) A),

    r = exp(lp - old), rho = exp(old - roll). AReaL's example has eps = 0.
    """
    keep = m2po_keep(old, roll, mask, tau)
    r, rho = clamped_exp(lp - old.detach()), clamped_exp((old - roll).detach())
    return masked_sum(rho * ppo_term(r, per_token(advantage, mask), 1.0 - eps_low, 1.0 + eps_high), keep)


# ------------------------------------------------------------------------------------------------------ 5. VESPO


def vespo_phi(
    lp: Tensor,
    old: Tensor,
    advantage: Tensor,
    mask: Tensor,
    log_tis: Tensor | None = None,
    positive: tuple[float, float] = (2.0, 3.0),
    negative: tuple[float, float] = (3.0, 2.0),
) -> Tensor:
    """Section 5. phi = exp(lam + k log w - lam w), detached, in the shape of `mask`; (k, lam) by the sign of A.

    log w_i = clamp(sum_t m clamp(lp - old, +-20) + sum_t m log TIS_t, +-20); lam >= 1e-4; NaN and infinity become 0.
    """
    a = per_token(advantage, mask)
    terms = (lp - old).detach().clamp(-CLAMP, CLAMP)
    if log_tis is not None:
        terms = terms + log_tis.detach()
    log_w = terms.masked_fill(~mask, 0.0).sum(-1, keepdim=True).clamp(-CLAMP, CLAMP)
    k = torch.where(a >= 0, torch.full_like(a, positive[0]), torch.full_like(a, negative[0]))
    lam = torch.where(a >= 0, torch.full_like(a, positive[1]), torch.full_like(a, negative[1])).clamp(min=1e-4)
    phi = torch.exp(lam + k * log_w - lam * log_w.exp())
    return torch.nan_to_num(phi, nan=0.0, posinf=0.0, neginf=0.0)


def vespo(
    lp: Tensor,
    old: Tensor,
    advantage: Tensor,
    mask: Tensor,
    log_tis: Tensor | None = None,
    positive: tuple[float, float] = (2.0, 3.0),
    negative: tuple[float, float] = (3.0, 2.0),
) -> Tensor:
    """Section 5. L_t = -sg(phi_i) A lp. Published aggregation: token mean."""
    phi = vespo_phi(lp, old, advantage, mask, log_tis, positive, negative)
    return masked_sum(-phi * per_token(advantage, mask) * lp, mask)


# ------------------------------------------------------------------------------------------------------ 6. LUSPO


def luspo(
    lp: Tensor, old: Tensor, advantage: Tensor, mask: Tensor, eps_low: float = 3e-4, eps_high: float = 4e-4
) -> Tensor:
    """Section 6. Row sum of T_i max(-s_i A_i, -clip(s_i, 1-eps_low, 1+eps_high) A_i), s_i = exp(mean_t(lp - old)).

    `advantage` `[B]`. The gradient flows through s_i. The mean log-ratio, not each token's, is clamped to +-20.
    Published aggregation: this sum / number of rows. A row without loss tokens gives 0.
    """
    count = mask.sum(-1)
    log_s = (lp - old.detach()).masked_fill(~mask, 0.0).sum(-1) / count.clamp(min=1)
    term = ppo_term(clamped_exp(log_s), advantage.detach(), 1.0 - eps_low, 1.0 + eps_high)
    return (count * term).sum()


# --------------------------------------------------------------------------------------- 7. optimal token baseline


def otb_sigma(logits: Tensor) -> Tensor:
    """Section 7. sigma = sum_v pi_v^2 = exp(LSE(2z) - 2 LSE(z)), detached. Logits at the sampling temperature."""
    z = logits.detach()
    return torch.exp((2.0 * z).logsumexp(-1) - 2.0 * z.logsumexp(-1))


def otb_energy(logits: Tensor, tokens: Tensor) -> Tensor:
    """Section 7. e_t = 1 - 2 pi_t + sigma_t: squared norm of the gradient of lp_t in the logits. Detached."""
    return 1.0 - 2.0 * token_logp(logits.detach(), tokens).exp() + otb_sigma(logits)


def otb_baseline(
    returns: Tensor,
    energy: Tensor,
    mask: Tensor,
    groups: Tensor,
    rho_bar: Tensor | None = None,
    zero_tail: bool = True,
    multi_turn: bool = False,
) -> Tensor:
    """Section 7. B_t per position over a group's rows, `[B, T]`, 0 outside `mask`.

        W_t = sum_{j<=t} m e_j rho_bar_j^2
        B_t = sum_i G_t W_t m / (sum_i W_t m + 1e-8)

    `returns` G is the reward to go, `groups` `[B]` an integer per row, `rho_bar` only with a correction. A group of one
    row: B = 0. `zero_tail`: B = 0 at the positions at or after the end (last loss token) of the second longest row,
    which only the longest has. `multi_turn`: a token's position is its number among the row's loss tokens, and a row's
    length their count.
    """
    rows, width = mask.shape
    step = energy.detach() if rho_bar is None else energy.detach() * rho_bar.detach() ** 2
    weight = step.masked_fill(~mask, 0.0).cumsum(-1)
    position = mask.cumsum(-1) - 1 if multi_turn else torch.arange(width).expand(rows, width)
    length = torch.where(mask, position + 1, 0).amax(-1)
    out = torch.zeros_like(returns)
    for i in range(rows):
        members = [j for j in range(rows) if int(groups[j]) == int(groups[i])]
        if len(members) == 1:
            continue
        second = int(length[members].sort(descending=True).values[1])
        for t in range(width):
            if not bool(mask[i, t]):
                continue
            at = int(position[i, t])
            if zero_tail and at >= second:
                continue
            top, bottom = torch.zeros((), dtype=out.dtype), torch.zeros((), dtype=out.dtype)
            for j in members:
                for u in range(width):
                    if bool(mask[j, u]) and int(position[j, u]) == at:
                        top = top + returns.detach()[j, u] * weight[j, u]
                        bottom = bottom + weight[j, u]
            out[i, t] = top / (bottom + 1e-8)
    return out


# ------------------------------------------------------------------------------------------------------- 8. CTPO


def ctpo(
    lp: Tensor,
    old: Tensor,
    advantage: Tensor,
    mask: Tensor,
    mode: str = "cumprod",
    low: float = 0.025,
    high: float = 0.05,
    dual: float = 0.05,
    cap: float = 10.0,
) -> Tensor:
    """Section 8. l_t = sum_{j<=t} m (lp - old) ("cumprod"), or that over the count n_t ("geomean");

        log R_t = min(sg(l_t) + lp_t - sg(lp_t), 10);   s = n_t^0.5 (cumprod) or n_t^-0.5 (geomean)
        L_t = max(-R A, -clip(R, e^{-0.025 s}, e^{0.05 s}) A), and for A < 0 then min(., -A e^{0.05 s}).

    n_t counts loss tokens from 1. The gradient goes through token t alone. The cap is one-sided and stops the gradient
    where it holds (correction 7); it stands in place of the +-20 clamp. Published aggregation: token mean.
    """
    a = per_token(advantage, mask)
    number = mask.cumsum(-1).clamp(min=1).to(lp.dtype)
    total = (lp - old).detach().masked_fill(~mask, 0.0).cumsum(-1)
    if mode == "cumprod":
        scale = number**0.5
    elif mode == "geomean":
        total, scale = total / number, number**-0.5
    else:
        raise ValueError(mode)
    ratio = (total + lp - lp.detach()).clamp(max=cap).exp()
    term = ppo_term(ratio, a, torch.exp(-low * scale), torch.exp(high * scale))
    term = torch.where(a < 0, torch.minimum(term, -a * torch.exp(dual * scale)), term)
    return masked_sum(term, mask)


# --------------------------------------------------------------------------- 9. effective sample size (VCPO)


def ess(old: Tensor, roll: Tensor, mask: Tensor, cap: float | None = None) -> Tensor:
    """Section 9, correction 1. l_i = sum_t m (old - roll), unclamped (or min(l, log cap));

    ESS = exp(2 LSE(l) - LSE(2 l)), between 1 and the number of rows. A row without loss tokens has weight 1.
    """
    log_w = (old - roll).detach().masked_fill(~mask, 0.0).sum(-1)
    if cap is not None:
        log_w = log_w.clamp(max=math.log(cap))
    return torch.exp(2.0 * log_w.logsumexp(0) - (2.0 * log_w).logsumexp(0))


# ------------------------------------------------------------------------------------------------------ 10. BAPO


def bapo_bounds(
    lp: Tensor,
    old: Tensor,
    advantage: Tensor,
    mask: Tensor,
    target: float = 1.0,
    low: tuple[float, float] = (0.6, 0.8),
    high: tuple[float, float] = (1.2, 2.0),
    step: float = 0.05,
) -> tuple[float, float]:
    """Section 10 as varied by correction 2: only tokens with a gradient are counted. Returns (c_l, c_h).

        S+ = sum over A >= 0, r <= c_h of r A;   S- = sum over A < 0, r >= c_l of r |A|
        while S+/(S- + 1e-8) < target: raise c_l by `step`, and when it is at its end raise c_h.

    S- = 0 counts as an infinite quotient. The search is over all tokens given. The grids are `start + i step`, rounded
    to 10 decimals.
    """
    a = per_token(advantage, mask)[mask]
    r = clamped_exp((lp - old).detach())[mask]
    lows = _grid(low[0], low[1], step)
    highs = _grid(high[0], high[1], step)
    i = j = 0
    while True:
        c_l, c_h = lows[i], highs[j]
        s_pos = (r * a)[(a >= 0) & (r <= c_h)].sum()
        s_neg = (r * a.abs())[(a < 0) & (r >= c_l)].sum()
        if float(s_neg) == 0.0 or float(s_pos / (s_neg + 1e-8)) >= target:
            return c_l, c_h
        if i + 1 < len(lows):
            i += 1
        elif j + 1 < len(highs):
            j += 1
        else:
            return c_l, c_h


def _grid(start: float, end: float, step: float) -> list[float]:
    return [round(start + i * step, 10) for i in range(round((end - start) / step) + 1)]


def bapo(lp: Tensor, old: Tensor, advantage: Tensor, mask: Tensor, target: float = 1.0, dual: float = 3.0) -> Tensor:
    """Section 10, correction 2. PPO with the bounds found: max(-r A, -clip(r, c_l, c_h) A), and for A < 0 then

    min(., -A dual). Sum over loss tokens.
    """
    a = per_token(advantage, mask)
    c_l, c_h = bapo_bounds(lp, old, advantage, mask, target)
    term = ppo_term(clamped_exp(lp - old.detach()), a, c_l, c_h)
    return masked_sum(torch.where(a < 0, torch.minimum(term, -a * dual), term), mask)


# ------------------------------------------------------------------------------------------------------ 11. ECHO


def echo_observation_sum(lp: Tensor, observation_mask: Tensor) -> Tensor:
    """Section 11. Sum of -lp over the tool-reply tokens O' (warnings and template marks already left out)."""
    return masked_sum(-lp, observation_mask)


def echo(policy_term: Tensor, lp: Tensor, mask: Tensor, observation_mask: Tensor, weight: float = 0.1) -> Tensor:
    """Section 11. L = mean over action tokens of `policy_term` + weight * mean over O' of -lp.

    Each mean has its own count, that of the global batch; `policy_term` `[B, T]` holds the GRPO loss of each token.
    A part without tokens is 0. This one is a sum of means, as the method defines it.
    """
    action = masked_sum(policy_term, mask) / mask.sum().clamp(min=1)
    return action + weight * echo_observation_sum(lp, observation_mask) / observation_mask.sum().clamp(min=1)


# ------------------------------------------------------------------------------------------------------ 12. TOPR


def topr_weight(lp: Tensor, roll: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
    """Section 12, sequence ratio. 1 for A_i >= 0; exp(clamp(sum_t m (lp - roll), -20, 0)) for A_i < 0."""
    log_w = (lp - roll).detach().masked_fill(~mask, 0.0).sum(-1).clamp(-CLAMP, 0.0)
    return torch.where(advantage >= 0, torch.ones_like(log_w), log_w.exp())


def topr(lp: Tensor, roll: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
    """Section 12. Sum over rows of -sg(w_i) A_i sum_t m lp, with w_i from `topr_weight`. `advantage` `[B]`.

    lp_seq is a sum, not a mean, over the row. The paper takes the reward where this has the advantage.
    """
    w = topr_weight(lp, roll, advantage, mask)
    return (-w * advantage.detach() * lp.masked_fill(~mask, 0.0).sum(-1)).sum()


# ---------------------------------------------------------------------------------------------------- 13. FlowRL


def flowrl_residual(
    log_z: Tensor, lp: Tensor, ref: Tensor, advantage: Tensor, mask: Tensor, beta: float = 15.0
) -> Tensor:
    """Section 13. Delta_i = log Z_i + mean_t lp - beta mean_t A - mean_t ref, `[B]`; log Z and lp carry gradients."""
    count = mask.sum(-1).clamp(min=1)

    def mean(x: Tensor) -> Tensor:
        return x.masked_fill(~mask, 0.0).sum(-1) / count

    return log_z + mean(lp) - beta * mean(per_token(advantage, mask)) - mean(ref.detach())


def flowrl(
    log_z: Tensor,
    lp: Tensor,
    old: Tensor,
    ref: Tensor,
    advantage: Tensor,
    mask: Tensor,
    beta: float = 15.0,
    eps: float | None = None,
) -> Tensor:
    """Section 13. Sum over rows of sg(w_i) Delta_i^2, w = exp(clamp(sum_t m (lp - old), +-20)), in one published

    version clamped to [1 - eps, 1 + eps]. A row without loss tokens gives 0. Published aggregation: mean over rows.
    """
    w = clamped_exp((lp - old).detach().masked_fill(~mask, 0.0).sum(-1))
    if eps is not None:
        w = w.clamp(1.0 - eps, 1.0 + eps)
    delta = flowrl_residual(log_z, lp, ref, advantage, mask, beta)
    return masked_sum(w * delta**2, mask.any(-1))


# --------------------------------------------------------------------------------------- 14. high-entropy tokens


def token_entropy(logits: Tensor) -> Tensor:
    """Section 14. H_t = -sum_v p_v log p_v, detached, in nats."""
    logp = logits.detach().log_softmax(-1)
    return -(logp.exp() * logp).sum(-1)


def high_entropy_keep(entropy: Tensor, mask: Tensor, rho: float = 0.2) -> Tensor:
    """Section 14. Keep the loss tokens with H >= the (1 - rho) quantile of H over all loss tokens; ties are kept.

    The quantile is interpolated linearly between the two nearest order statistics (as torch.quantile does).
    Boolean, false outside `mask`.
    """
    if not bool(mask.any()):
        return torch.zeros_like(mask)
    threshold = torch.quantile(entropy.detach()[mask], 1.0 - rho)
    return mask & (entropy.detach() >= threshold)

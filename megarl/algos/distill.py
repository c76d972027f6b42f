"""Learn a teacher's distribution from the policy's own samples: log-ratios as advantages, divergences as losses.

With p the policy and q the teacher, both at the training temperature, in nats: on tokens that the policy sampled,
log p − log q estimates the reverse KL(p ‖ q), and log q − log p as an advantage has its gradient in expectation
(on-policy distillation: Gu et al., MiniLLM, arXiv:2306.08543; Agarwal et al., GKD, arXiv:2306.13649; Lu and Thinking
Machines Lab, "On-policy distillation", 2025). For a single optimizer step on fresh samples this is the gradient of the
KL estimator k2 in the loss.

A teacher may be the policy itself with a hint in its prompt. Then log q − log p is the d of CPO (`megarl.algos.cpo`).
"""

from collections.abc import Mapping

from megarl.algos.corrections import CORRECTION, CORRECTIONS
from megarl.algos.cpo import EXCLUDED
from megarl.algos.masked import kept, masked_sum
from megarl.algos.mixed_groups import demonstration_mask
from megarl.algos.token_rewards import returns_to_go
from megarl.config.algo import AlgoConfig, DistillConfig
from megarl.config.torch_later import Tensor, torch
from megarl.types import Advantages, PolicyOutputs, RowBatch, ScoredBatch, TokenQuantity

# Name of the quantity with log q − log p of tokens whose advantages have it already.
LOG_RATIO = "distill_log_ratio"
REVERSE_KL = "distill/reverse_kl"
# Name of the quantity with the share of `coef` that counts on each token, where it is not 1 on all of them.
SHARE = "distill_share"
# The columns of rows that the loss reads.
LOSS_QUANTITIES = frozenset({TokenQuantity.TEACHER_LOGPROBS, LOG_RATIO, SHARE})


def required_quantities(cfg: DistillConfig) -> frozenset[TokenQuantity]:
    """Return the quantities of rows that distillation needs before the update.

    >>> sorted(required_quantities(DistillConfig(teacher="model")))
    [<TokenQuantity.TEACHER_LOGPROBS: 'teacher_logprobs'>]
    """
    # An update with an exact divergence computes the teacher itself.
    if cfg.teacher == "none" or cfg.mode == "exact":
        return frozenset()
    baseline = {TokenQuantity.TEACHER_BASELINE_LOGPROBS} if cfg.shuffled_baseline else set()
    return frozenset({TokenQuantity.TEACHER_LOGPROBS, *baseline})


def token_share(batch: ScoredBatch, cfg: DistillConfig) -> Tensor | None:
    """Return the share of `coef` that counts on each token, [B, T], or None if all of it does.

    It decays over steps, and is 0 in rows without a hint and, with `exclude_answer`, in final answers.

    >>> cfg = DistillConfig(teacher="hint", decay_steps=4)
    >>> token_share(step("a", [0.0], cpo_excluded=[[0.0, 1.0]]), cfg).tolist()
    [[1.0, 0.0]]
    """
    # Only a teacher with hints excludes tokens.
    excluded = batch.quantities.get(EXCLUDED) if cfg.teacher == "hint" else None
    if not cfg.decay_steps and excluded is None:
        return None
    decayed = max(0.0, 1 - max(batch.step - 1, 0) / cfg.decay_steps) if cfg.decay_steps else 1.0
    share = torch.full_like(batch.loss_mask, decayed, dtype=batch.rewards.dtype)
    return share if excluded is None else share * (1 - excluded)


def log_ratio_advantages(log_ratio: Tensor, mask: Tensor, cfg: DistillConfig, share: Tensor | None = None) -> Tensor:
    """Return coef·Σ_{s ≥ t} γ^(s − t)·(log q − log p)_s, [B, T], where s and t count the tokens under the mask alone.

    γ is `discount`. The advantage is 0 outside the mask. share: what of `coef` counts on each token; None: all.

    >>> cfg = DistillConfig(teacher="model", coef=2.0, discount=0.5)
    >>> log_ratio_advantages(tensor([[1.0, 9.0, 1.0]]), tensor([[True, False, True]]), cfg).tolist()
    [[3.0, 0.0, 2.0]]
    """
    inside = cfg.coef * kept(log_ratio if share is None else share * log_ratio, mask)
    if cfg.discount:
        inside = kept(returns_to_go(inside, mask * (cfg.discount - 1) + 1), mask)
    return inside


def distilled_advantages(advantages: Tensor, batch: ScoredBatch, cfg: AlgoConfig) -> Advantages:
    """Return advantages with the teacher's log-ratios on the tokens that the policy wrote, if old log-probs are scored.

    Where exactly one optimizer step on fresh samples follows, they are not: the loss then adds log-ratios of the
    current log-probs, which are the same, without a pass to score them.

    >>> cfg = AlgoConfig(distill=DistillConfig(teacher="model"))
    >>> batch = step("a", [0.0], old_logprobs=[[-2.0, -1.0]], teacher_logprobs=[[-1.0, -1.5]])
    >>> distilled_advantages(tensor([[0.0, 1.0]]), batch, cfg).values.tolist()
    [[1.0, 0.5]]
    """
    if cfg.distill.teacher == "none":
        return Advantages(values=advantages)
    share = token_share(batch, cfg.distill)
    quantities = {} if share is None else {SHARE: share}
    if cfg.distill.is_dense:
        return Advantages(values=advantages, quantities=quantities)
    mask, teacher = batch.loss_mask & ~demonstration_mask(batch), batch.quantity(TokenQuantity.TEACHER_LOGPROBS)
    metrics: dict[str, float] = {}
    if TokenQuantity.TEACHER_ENTROPY in batch.quantities:
        entropy = masked_sum(batch.quantity(TokenQuantity.TEACHER_ENTROPY), mask)
        metrics["distill/teacher_entropy"] = float(entropy / mask.sum().clamp(min=1))
    to_engine = CORRECTIONS.get(cfg.correction.name).rollout_ratio
    baseline: str = TokenQuantity.OLD_LOGPROBS
    if cfg.distill.shuffled_baseline:
        baseline = TokenQuantity.TEACHER_BASELINE_LOGPROBS
    elif baseline not in batch.quantities:
        if not to_engine:
            return Advantages(values=advantages, quantities=quantities, metrics=metrics)
        baseline = "rollout_logprobs"
    log_ratio = kept(teacher - batch.quantity(baseline), mask)
    values = advantages + log_ratio_advantages(log_ratio, mask, cfg.distill, share)
    return Advantages(values=values, quantities={**quantities, LOG_RATIO: log_ratio}, metrics=metrics)


def weighed_divergence(rows: RowBatch, out: PolicyOutputs, cfg: DistillConfig) -> Tensor:
    """Return coef·divergence, times the correction weights and the tokens' shares if rows carry any, [B, T], 0 outside
    the loss mask.

    >>> batch, cfg = rows([[1, 1]], correction=[[1.0, 0.5]]), DistillConfig(teacher="model", mode="exact", coef=2.0)
    >>> out = outputs([[-2.0, -1.0]], divergence=[[0.5, 1.0]])
    >>> weighed_divergence(batch, out, cfg).tolist()
    [[1.0, 1.0]]
    """
    assert out.divergence is not None, "the head was not asked to compare with a teacher"
    divergence = cfg.coef * kept(out.divergence, rows.loss_mask)
    for weights in (CORRECTION, SHARE):
        divergence = divergence * rows.quantities[weights] if weights in rows.quantities else divergence
    return divergence


def comparison(out: PolicyOutputs, cfg: DistillConfig) -> dict[str, Tensor]:
    """Return what the head found beside the teacher, per token, by the names of metrics.

    >>> out = outputs([[-2.0]], reverse_kl=[[0.25]], teacher_mass=[[0.75]])
    >>> {name: values.tolist() for name, values in comparison(out, DistillConfig(mode="topk")).items()}
    {'distill/reverse_kl': [[0.25]], 'distill/mass_in_top_k': [[0.75]]}
    """
    names = {name: f"distill/{name}" for name in ("reverse_kl", "forward_kl", "teacher_entropy", "agreement")}
    if cfg.mode == "topk":
        names["teacher_mass"] = "distill/mass_in_top_k"
    return {names[name]: values for name, values in out.comparison.items() if name in names}


def distill_in_loss(
    advantages: Tensor, rows: RowBatch, out: PolicyOutputs, cfg: AlgoConfig
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Return advantages with the log-ratios of the current log-probs, unless they have those of scored ones, and
    diagnostics per token.

    >>> cfg = AlgoConfig(distill=DistillConfig(teacher="model"))
    >>> batch, out = rows([[1, 1]], teacher_logprobs=[[-1.0, -1.5]]), outputs([[-2.0, -1.0]])
    >>> distill_in_loss(tensor([[0.0, 1.0]]), batch, out, cfg)[0].tolist()
    [[1.0, 0.5]]
    """
    if not cfg.distill.is_sampled:
        return advantages, {}
    mask = rows.loss_mask & ~demonstration_mask(rows)
    if LOG_RATIO in rows.quantities:
        return advantages, {REVERSE_KL: -rows.quantity(LOG_RATIO)}
    log_ratio = kept(rows.quantity(TokenQuantity.TEACHER_LOGPROBS) - out.logprobs.detach(), mask)
    added = log_ratio_advantages(log_ratio, mask, cfg.distill, rows.quantities.get(SHARE))
    return advantages + added, {REVERSE_KL: -log_ratio}

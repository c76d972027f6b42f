"""Compute metrics of a step's importance ratios over all tokens, including tokens that a correction's gate rejects."""

from torch import Tensor

from megarl.algos.masked import masked_sum, row_means
from megarl.algos.policy_losses import MAX_LOG_RATIO


def correction_metrics(
    *, log_ratio: Tensor, sampled: Tensor, weights: Tensor, accepted: Tensor, advantages: Tensor
) -> dict[str, float]:
    """Compute the metrics is/* over the n tokens that the engine sampled; all are 0 if there are none.

    `log_ratio` is ln ρ [B, T] in float64, and 0 outside `sampled`. `weights` are from before gate and veto.

    accept_frac: share of tokens accepted. w_mean, w_max and ess = (Σ w)² / (n Σ w²) describe `weights`.
    chi2_token = mean ρ² − 1 and chi2_seq = mean over rows of (Π ρ)² − 1: χ²(trainer ‖ engine).
    k3 = mean(ρ − 1 − ln ρ): KL(engine ‖ trainer). log_ppl_gap: mean over rows of −mean ln ρ, the trainer's
    log-perplexity minus the engine's. rejected_advantage_pos and _neg: the sums of positive and of negative advantages
    of rejected tokens, each / n. If the two do not cancel, rejecting tokens biases the policy gradient. In the χ² and
    in k3, ln ρ and its sums are clamped to ±20.

    >>> both, zeros = tensor([[True, True]]), tensor([[0.0, 0.0]])
    >>> metrics = correction_metrics(
    ...     log_ratio=zeros, sampled=both, weights=zeros + 1, accepted=tensor([[True, False]]), advantages=zeros
    ... )
    >>> metrics["is/accept_frac"], metrics["is/w_mean"]
    (0.5, 1.0)
    """
    num_tokens = sampled.sum().clamp(min=1)
    rows = sampled.any(-1)
    num_rows = rows.sum().clamp(min=1)

    def token_mean(values: Tensor) -> float:
        return float(masked_sum(values.double(), sampled) / num_tokens)

    row_sum = log_ratio.sum(-1).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    token = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    sum_w, sum_w2 = masked_sum(weights, sampled), masked_sum(weights.square(), sampled)
    rejected = advantages.masked_fill(accepted, 0.0)
    return {
        "is/accept_frac": token_mean(accepted),
        "is/w_mean": token_mean(weights),
        "is/w_max": float(weights.masked_fill(~sampled, 0.0).max()) if weights.numel() else 0.0,
        "is/ess": float(sum_w.square() / (num_tokens * sum_w2)) if float(sum_w2) > 0 else 0.0,
        "is/chi2_token": token_mean((2 * token).expm1()),
        "is/chi2_seq": float(masked_sum((2 * row_sum).expm1(), rows) / num_rows),
        "is/k3": token_mean(token.expm1() - token),
        "is/log_ppl_gap": float(-row_means(log_ratio, sampled).sum() / num_rows),
        "is/rejected_advantage_pos": token_mean(rejected.clamp(min=0)),
        "is/rejected_advantage_neg": token_mean(rejected.clamp(max=0)),
    }

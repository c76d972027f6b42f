"""Compute metrics of a step's importance ratios over all tokens, including tokens that a correction's gate rejects."""

from dataclasses import dataclass
from typing import ClassVar

from megarl.algos.masked import BlockSums, masked_sum, row_means
from megarl.algos.policy_losses import MAX_LOG_RATIO
from megarl.config.torch_later import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioSums(BlockSums):
    """Sums over the tokens that the engine sampled, and over rows that have any.

    weight, weight_square, weight_max: of weights from before gate and veto. kept_weight: after both.
    """

    largest: ClassVar[str] = "weight_max"
    num_tokens: float = 0.0
    num_rows: float = 0.0
    num_accepted: float = 0.0
    num_vetoed: float = 0.0
    weight: float = 0.0
    weight_square: float = 0.0
    weight_max: float = 0.0
    kept_weight: float = 0.0
    chi2_token: float = 0.0
    chi2_seq: float = 0.0
    k3: float = 0.0
    log_ppl_gap: float = 0.0
    rejected_pos: float = 0.0
    rejected_neg: float = 0.0

    def metrics(self) -> dict[str, float]:
        """Compute the metrics is/* over the n sampled tokens; all are 0 if there are none.

        accept_frac: share of tokens accepted. veto_frac: share of rows vetoed. w_mean, w_max and
        ess = (Σ w)² / (n Σ w²) describe the weights. chi2_token = mean ρ² − 1 and chi2_seq = mean over rows of
        (Π ρ)² − 1: χ²(trainer ‖ engine). k3 = mean(ρ − 1 − ln ρ): KL(engine ‖ trainer). log_ppl_gap: mean over rows of
        −mean ln ρ, the trainer's log-perplexity minus the engine's. rejected_advantage_pos and _neg: the sums of
        positive and of negative advantages of rejected tokens, each / n. If the two do not cancel, rejecting tokens
        biases the policy gradient. In the χ² and in k3, ln ρ and its sums are clamped to ±20.
        """
        tokens, rows = max(self.num_tokens, 1.0), max(self.num_rows, 1.0)
        return {
            "is/accept_frac": self.num_accepted / tokens,
            "is/w_mean": self.weight / tokens,
            "is/w_max": self.weight_max,
            "is/ess": self.weight**2 / (tokens * self.weight_square) if self.weight_square > 0 else 0.0,
            "is/chi2_token": self.chi2_token / tokens,
            "is/chi2_seq": self.chi2_seq / rows,
            "is/k3": self.k3 / tokens,
            "is/log_ppl_gap": self.log_ppl_gap / rows,
            "is/rejected_advantage_pos": self.rejected_pos / tokens,
            "is/rejected_advantage_neg": self.rejected_neg / tokens,
            "is/veto_frac": self.num_vetoed / rows,
        }


def ratio_sums(
    *, log_ratio: Tensor, sampled: Tensor, weights: Tensor, accepted: Tensor, vetoed: Tensor, advantages: Tensor
) -> RatioSums:
    """Sum up what the metrics need of rows [B, T]; `vetoed` [B].

    `log_ratio` is ln ρ in float64, and 0 outside `sampled`. `weights` are from before gate and veto.

    >>> both, zeros = tensor([[True, True]]), tensor([[0.0, 0.0]])
    >>> accepted, vetoed = tensor([[True, False]]), tensor([False])
    >>> sums = ratio_sums(
    ...     log_ratio=zeros, sampled=both, weights=zeros + 1, accepted=accepted, vetoed=vetoed, advantages=zeros
    ... )
    >>> sums.metrics()["is/accept_frac"], sums.metrics()["is/w_mean"]
    (0.5, 1.0)
    """
    rows, token = sampled.any(-1), log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    row_sum = log_ratio.sum(-1).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    inside = weights.masked_fill(~sampled, 0.0).double()
    rejected = advantages.masked_fill(accepted | ~sampled, 0.0).double()
    return RatioSums(
        num_tokens=float(sampled.sum()),
        num_rows=float(rows.sum()),
        num_accepted=float(accepted.sum()),
        num_vetoed=float(vetoed.sum()),
        weight=float(inside.sum()),
        weight_square=float(inside.square().sum()),
        weight_max=float(inside.max()) if inside.numel() else 0.0,
        kept_weight=float(masked_sum(inside, accepted)),
        chi2_token=float((2 * token).expm1().sum()),
        chi2_seq=float(masked_sum((2 * row_sum).expm1(), rows)),
        k3=float((token.expm1() - token).sum()),
        log_ppl_gap=-float(row_means(log_ratio, sampled).sum()),
        rejected_pos=float(rejected.clamp(min=0).sum()),
        rejected_neg=float(rejected.clamp(max=0).sum()),
    )

"""Groups in which some samples start with a demonstration: their advantages, which tokens and rows train, metrics."""

import torch
from torch import Tensor

from megarl.algos.masked import group_stats, masked_sum
from megarl.config.algo import OffPolicyConfig
from megarl.types import ScoredBatch


def weight_advantages(advantages: Tensor, batch: ScoredBatch, cfg: OffPolicyConfig) -> Tensor:
    """Advantages [B, T] as `algo.off_policy` changes them, in this order; a new tensor, 0 outside the loss mask.

    On demonstration tokens A becomes prefix_reward / group size, if that is set, and max(A, 0) with `only_positive`;
    A is multiplied by `demonstration_weight` (α) on demonstration tokens, by `policy_weight` (β) on all others, also
    those that follow a demonstration (LUFFY, arXiv:2504.14945); truncated rows get 0 with `drop_truncated`.
    """
    demonstrated = batch.demonstration_mask
    on_demonstration = advantages
    if cfg.prefix_reward is not None:
        size = group_stats(batch.rewards, batch.uids).size[:, None]
        on_demonstration = (cfg.prefix_reward / size).to(advantages.dtype).expand_as(advantages)
    if cfg.only_positive:
        on_demonstration = on_demonstration.clamp(min=0)
    weighted = torch.where(demonstrated, cfg.demonstration_weight * on_demonstration, cfg.policy_weight * advantages)
    kept = batch.loss_mask
    if cfg.drop_truncated and batch.truncated is not None:
        kept = kept & ~batch.truncated[:, None]
    return torch.where(kept, weighted, 0.0)


def kept_tokens(old_logprobs: Tensor, loss_mask: Tensor, drop_above: float) -> Tensor:
    """Loss tokens whose probability is at most `drop_above`, bool [B, T]: the others train nothing, uncounted.

    Judged by the old policy, not by the current one, so that the count is known before the first backward and the
    objective does not depend on how rows are split; both agree at the first optimizer step of a batch.
    """
    return loss_mask & (old_logprobs.exp() <= drop_above)


def unneeded_demonstrations(batch: ScoredBatch, max_group_accuracy: float) -> Tensor:
    """Rows [B] bool that start with a demonstration although their group does not need it.

    A group needs its demonstration if the accuracy of its samples without one is at most `max_group_accuracy`, or if
    it has no such samples.
    """
    off_policy = batch.demonstration_mask.any(dim=-1)
    own_correct = (batch.correct & ~off_policy).double()
    stats_correct, stats_own = (group_stats(v, batch.uids) for v in (own_correct, (~off_policy).double()))
    accuracy = stats_correct.mean / stats_own.mean.clamp(min=torch.finfo(torch.float64).tiny)
    return off_policy & (stats_own.mean > 0) & (accuracy > max_group_accuracy)


def mixed_metrics(batch: ScoredBatch) -> dict[str, float]:
    """What a step's groups look like.

    batch/solve_none, solve_all: prompts of which no sample, every sample is correct; batch/solved, failed: shares of
    rows; batch/on_solved, off_solved: share of correct rows among those without and with a demonstration;
    batch/demonstration_frac: its share of the loss tokens; on_off_metrics/{on,off}_{score,response_tokens}_mean. A mean
    over nothing is 0.
    """
    off_policy, lengths = batch.demonstration_mask.any(dim=-1), batch.loss_mask.sum(dim=-1).double()
    correct, scores = batch.correct.double(), batch.rewards.double()
    accuracies = dict(zip(batch.uids, group_stats(correct, batch.uids).mean.tolist(), strict=True)).values()
    metrics = {
        "batch/solve_none": float(sum(accuracy == 0 for accuracy in accuracies)),
        "batch/solve_all": float(sum(accuracy == 1 for accuracy in accuracies)),
        "batch/solved": _mean(correct, torch.ones_like(off_policy)),
        "batch/failed": _mean(1 - correct, torch.ones_like(off_policy)),
        "batch/demonstration_frac": float(batch.demonstration_mask.sum() / batch.loss_mask.sum().clamp(min=1)),
    }
    for name, rows in (("on", ~off_policy), ("off", off_policy)):
        metrics[f"batch/{name}_solved"] = _mean(correct, rows)
        metrics[f"on_off_metrics/{name}_score_mean"] = _mean(scores, rows)
        metrics[f"on_off_metrics/{name}_response_tokens_mean"] = _mean(lengths, rows)
    return metrics


def _mean(values: Tensor, mask: Tensor) -> float:
    return float(masked_sum(values, mask) / mask.sum().clamp(min=1))

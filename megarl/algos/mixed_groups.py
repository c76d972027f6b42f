"""Handle groups in which some samples start with a demonstration: weigh advantages, mask tokens, log metrics."""

from megarl.algos.masked import group_stats, masked_sum
from megarl.algos.prefixes import DEMONSTRATION
from megarl.config.algo import OffPolicyConfig
from megarl.config.torch_later import Tensor, torch
from megarl.types import RowBatch, ScoredBatch


def demonstration_mask(batch: ScoredBatch | RowBatch) -> Tensor:
    """Return [B, T] bool, true on the loss tokens that a demonstration provided and the policy did not sample.

    >>> batch = step("aa", [1.0, 0.0], demonstration=[[1.0, 0.0], [0.0, 0.0]])
    >>> demonstration_mask(batch).tolist()
    [[True, False], [False, False]]
    """
    if DEMONSTRATION not in batch.quantities:
        return torch.zeros_like(batch.loss_mask)
    return batch.quantities[DEMONSTRATION].bool() & batch.loss_mask


def weight_advantages(advantages: Tensor, batch: ScoredBatch, cfg: OffPolicyConfig) -> Tensor:
    """Return advantages [B, T], 0 outside the loss mask, after these changes of `algo.off_policy`, in this order.

    1. On demonstration tokens, A becomes prefix_reward / group size if `prefix_reward` is set, and then, with
    `only_positive`, max(A, 0). 2. A is multiplied by `demonstration_weight` (α) on demonstration tokens and by
    `policy_weight` (β) on all other tokens (LUFFY, arXiv:2504.14945). 3. `without_truncated` is applied.

    >>> batch = step("aa", [1.0, 0.0], demonstration=[[1.0, 0.0], [0.0, 0.0]])
    >>> cfg = OffPolicyConfig(demonstration_weight=0.5)
    >>> weight_advantages(tensor([[1.0, 1.0], [-1.0, -1.0]]), batch, cfg).tolist()
    [[0.5, 1.0], [-1.0, -1.0]]
    """
    if DEMONSTRATION not in batch.quantities:
        weighted = advantages if cfg.policy_weight == 1 else cfg.policy_weight * advantages
        return without_truncated(weighted, batch, cfg)
    demonstrated = demonstration_mask(batch)
    on_demonstration = advantages
    if cfg.prefix_reward is not None:
        size = group_stats(batch.rewards, batch.uids).size[:, None]
        on_demonstration = (cfg.prefix_reward / size).to(advantages.dtype).expand_as(advantages)
    if cfg.only_positive:
        on_demonstration = on_demonstration.clamp(min=0)
    weighted = torch.where(demonstrated, cfg.demonstration_weight * on_demonstration, cfg.policy_weight * advantages)
    return without_truncated(torch.where(batch.loss_mask, weighted, 0.0), batch, cfg)


def without_truncated(advantages: Tensor, batch: ScoredBatch, cfg: OffPolicyConfig) -> Tensor:
    """Return advantages [B, T]. With `drop_truncated`, rows that were cut at the length limit have advantage 0.

    >>> batch = step("aa", [1.0, 0.0], truncated=[True, False])
    >>> without_truncated(tensor([[1.0], [-1.0]]), batch, OffPolicyConfig(drop_truncated=True)).tolist()
    [[0.0], [-1.0]]
    """
    if not cfg.drop_truncated or batch.truncated is None:
        return advantages
    return torch.where(batch.truncated[:, None], 0.0, advantages)


def kept_tokens(old_logprobs: Tensor, loss_mask: Tensor, drop_above: float) -> Tensor:
    """Return [B, T] bool, true on loss tokens of probability ≤ `drop_above`. The other tokens neither train nor count.

    The probability is the old policy's, so the number of tokens is known before the first backward pass, and the
    objective does not depend on how rows are split. In the first optimizer step of a batch, the current policy has the
    same one.

    >>> kept_tokens(tensor([[-0.01, -1.0]]), tensor([[True, True]]), 0.9).tolist()
    [[False, True]]
    """
    return loss_mask & (old_logprobs.exp() <= drop_above)


def unneeded_demonstrations(batch: ScoredBatch, max_group_accuracy: float) -> Tensor:
    """Return [B] bool, true for rows that start with a demonstration although the policy solves their prompt without
    it.

    The policy solves a prompt if the accuracy of its samples without demonstration is above `max_group_accuracy`. A
    prompt without such samples counts as unsolved.

    >>> batch = step("aaa", [1.0, 1.0, 0.0], demonstration=[[1.0], [0.0], [0.0]])
    >>> unneeded_demonstrations(batch, 0.25).tolist()
    [True, False, False]
    """
    off_policy = demonstration_mask(batch).any(dim=-1)
    own = group_stats(batch.correct, batch.uids, where=~off_policy)
    return off_policy & (own.size > 0) & (own.mean > max_group_accuracy)


def mixed_metrics(batch: ScoredBatch) -> dict[str, float]:
    """Compute metrics of the demonstrations in the rows that train; `filters.group_metrics` covers all sampled rows.

    batch/demonstration_frac: share of demonstration tokens among loss tokens. on_off_metrics/{on,off}_*_mean: mean
    score and response_tokens of rows without (on) and with (off) a demonstration. A mean over no rows is 0.

    >>> batch = step("aa", [1.0, 0.0], demonstration=[[1.0, 0.0], [0.0, 0.0]])
    >>> mixed_metrics(batch)["batch/demonstration_frac"]
    0.25
    """
    off_policy, lengths = demonstration_mask(batch).any(dim=-1), batch.loss_mask.sum(dim=-1).double()
    scores = batch.rewards.double()
    share = int(demonstration_mask(batch).sum()) / max(int(batch.loss_mask.sum()), 1)
    metrics = {"batch/demonstration_frac": share}
    for name, rows in (("on", ~off_policy), ("off", off_policy)):
        for what, values in (("score", scores), ("response_tokens", lengths)):
            mean = masked_sum(values, rows) / rows.sum().clamp(min=1)
            metrics[f"on_off_metrics/{name}_{what}_mean"] = float(mean)
    return metrics

"""Advantage estimators: from the sequence rewards of complete groups to one number per token."""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from megarl.algos.masked import group_stats
from megarl.algos.registry import Registry
from megarl.config.schema import AdvantageConfig
from megarl.errors import DataError
from megarl.types import ScoredBatch

AdvantageEstimator: TypeAlias = Callable[[ScoredBatch, AdvantageConfig], Tensor]

ADVANTAGE_ESTIMATORS: Registry[AdvantageEstimator] = Registry("advantage estimator", key="algo.advantage.estimator")

# Keeps groups of equal rewards at 0 instead of 0/0; small against the spread of rewards that carry a signal.
_STD_EPS = 1e-6


def compute_advantages(batch: ScoredBatch, cfg: AdvantageConfig) -> Tensor:
    """Advantages [B, T] by the configured estimator, 0 outside the loss mask; rewards must be finite."""
    bad_rows = (~batch.rewards.isfinite()).nonzero().flatten().tolist()
    if bad_rows:
        i = bad_rows[0]
        raise DataError(
            f"reward of row {i} (uid {batch.uids[i]!r}): got {batch.rewards[i].item()}, expected a finite "
            f"number; check the scorer and, with KL in the reward, the log-probs"
        )
    return ADVANTAGE_ESTIMATORS.get(cfg.estimator)(batch, cfg)


@ADVANTAGE_ESTIMATORS.register("grpo")
def grpo(batch: ScoredBatch, cfg: AdvantageConfig) -> Tensor:
    """GRPO (arXiv:2402.03300): A = (r − mean_group) / (std_group + 1e-6), the same on every token of a row.

    The deviation is unbiased. A group of one has mean 0 and deviation 1. Without `norm_by_std`,
    A = r − mean_group (Dr. GRPO, arXiv:2503.20783).
    """
    stats = group_stats(batch.rewards, batch.uids)
    single = stats.size == 1
    centred = batch.rewards.double() - torch.where(single, 0.0, stats.mean)
    if cfg.norm_by_std:
        centred = centred / (torch.where(single, 1.0, stats.std) + _STD_EPS)
    return torch.where(batch.loss_mask, centred[:, None], 0.0).to(batch.rewards.dtype)

"""Random rows that all peers are asked about, and how our side of a comparison is put together."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from megarl.algos.advantages import compute_advantages
from megarl.algos.aggregation import AGGREGATIONS, RowCounts, global_denominator
from megarl.algos.corrections import Correction, CorrectionInputs, compute_correction
from megarl.algos.policy_losses import PolicyLossInputs, policy_loss
from megarl.algos.token_rewards import place_reward
from megarl.config.algo import AdvantageConfig, CorrectionConfig, PolicyLossConfig
from megarl.types import ScoredBatch

SEEDS = range(5)
# Tokens of the longest row, and what some aggregations divide by.
NUM_TOKENS = 9
HORIZON_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows of float64 numbers, [B, T] under a bool mask; rewards [B]. Ratios are wide enough for every clip to act."""

    uids: tuple[str, ...]
    mask: Tensor
    rewards: Tensor
    logprobs: Tensor
    old_logprobs: Tensor
    rollout_logprobs: Tensor
    ref_logprobs: Tensor
    advantages: Tensor
    values: Tensor
    returns: Tensor

    @property
    def token_rewards(self) -> Tensor:
        """[B, T] the reward on the last loss token, where every peer wants it."""
        return place_reward(self.rewards, self.mask)

    @property
    def num_rows(self) -> int:
        """Rows with loss tokens."""
        return int(self.mask.any(dim=-1).sum())

    @property
    def num_tokens(self) -> int:
        return int(self.mask.sum())

    def scored(self, **quantities: Tensor) -> ScoredBatch:
        """What our advantage estimators read; `quantities` besides the values."""
        return ScoredBatch(
            uids=self.uids,
            rewards=self.rewards,
            correct=self.rewards > 0,
            loss_mask=self.mask,
            quantities={"values": self.values, **quantities},
        )


def random_batch(seed: int, *, group_sizes: tuple[int, ...] = (4, 3, 2, 4), holes: bool = False) -> Batch:
    """Groups in a random order, rows of 1 to 9 loss tokens, with `holes` between them where an environment wrote.

    Rewards of odd seeds are 0 or 1, so that groups of equal rewards occur; those of even seeds are any number.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float = 1.0) -> Tensor:
        return scale * torch.randn(num_rows, NUM_TOKENS, generator=generator, dtype=torch.float64)

    num_rows = sum(group_sizes)
    uids = [f"q{i}" for i, size in enumerate(group_sizes) for _ in range(size)]
    lengths = torch.randint(1, NUM_TOKENS + 1, (num_rows,), generator=generator)
    lengths[0] = NUM_TOKENS
    mask = torch.arange(NUM_TOKENS) < lengths[:, None]
    if holes:
        mask &= (torch.rand(num_rows, NUM_TOKENS, generator=generator) < 0.7) | (torch.arange(NUM_TOKENS) == 0)
    binary = torch.randint(0, 2, (num_rows,), generator=generator).double()
    real = torch.randn(num_rows, generator=generator, dtype=torch.float64)
    logprobs = -normal(2).abs()
    old_logprobs = logprobs + normal(0.6)
    return Batch(
        uids=tuple(uids[i] for i in torch.randperm(num_rows, generator=generator)),
        mask=mask,
        rewards=binary if seed % 2 else real,
        logprobs=logprobs,
        old_logprobs=old_logprobs,
        rollout_logprobs=old_logprobs + normal(0.6),
        ref_logprobs=logprobs + normal(1.5),
        advantages=normal(),
        values=normal(),
        returns=normal(),
    )


def with_row_advantages(batch: Batch) -> Batch:
    """The batch with one advantage per row, as estimators without a critic give."""
    return replace(batch, advantages=batch.advantages[:, :1].expand_as(batch.advantages))


def with_empty_rows(batch: Batch) -> Batch:
    """The batch with two rows of which no token trains."""
    mask = batch.mask.clone()
    mask[[1, 4]] = False
    return replace(batch, mask=mask)


def near_reference(batch: Batch) -> Batch:
    """The batch with a reference so near that no KL estimator reaches 10, where some are cut."""
    return replace(batch, ref_logprobs=batch.logprobs + 0.3 * (batch.ref_logprobs - batch.logprobs))


def group_order(uids: Sequence[str]) -> Tensor:
    """The rows' numbers [B], group by group."""
    return torch.tensor(sorted(range(len(uids)), key=uids.__getitem__))


def reordered(batch: Batch, order: Tensor) -> Batch:
    """The same rows in another order."""
    tensors = {f.name: getattr(batch, f.name)[order] for f in fields(batch) if f.name != "uids"}
    return Batch(uids=tuple(batch.uids[i] for i in order.tolist()), **tensors)


def our_advantages(batch: Batch, cfg: AdvantageConfig, **quantities: Tensor) -> Tensor:
    return compute_advantages(batch.scored(**quantities), cfg).advantages


def objective(loss: Tensor, mask: Tensor, aggregation: str) -> Tensor:
    """Our objective of a whole optimizer mini-batch from the loss per token [B, T]."""
    entry = AGGREGATIONS.get(aggregation)
    counts = RowCounts(num_rows=int(mask.any(dim=-1).sum()), num_tokens=int(mask.sum()))
    return entry.local_sum(loss, mask) / global_denominator(entry, counts, horizon_tokens=HORIZON_TOKENS)


def our_policy_loss(
    batch: Batch, logprobs: Tensor, cfg: PolicyLossConfig, aggregation: str, correction: Tensor | None = None
) -> Tensor:
    x = PolicyLossInputs(
        logprobs=logprobs,
        old_logprobs=batch.old_logprobs,
        advantages=batch.advantages,
        loss_mask=batch.mask,
        correction=correction,
    )
    return objective(policy_loss(x, cfg).loss, batch.mask, aggregation)


def our_correction(batch: Batch, cfg: CorrectionConfig) -> Correction:
    inputs = CorrectionInputs(
        old_logprobs=batch.old_logprobs,
        rollout_logprobs=batch.rollout_logprobs,
        advantages=batch.advantages,
        loss_mask=batch.mask,
        demonstration_mask=torch.zeros_like(batch.mask),
    )
    return compute_correction(inputs, cfg)

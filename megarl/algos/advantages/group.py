"""Estimate advantages by comparing the samples of a prompt (a group): all loss tokens of a sample get the same number.

The reward r is a sample's reward minus its KL penalty. In a group of one sample, mean_group is 0 and std_group is 1.
"""

from collections.abc import Callable, Sequence
from math import comb

from megarl.algos.advantages.estimator import ADVANTAGE_ESTIMATORS, required_detail
from megarl.algos.masked import GroupStats, group_index, group_stats
from megarl.algos.mixed_groups import demonstration_mask
from megarl.algos.token_rewards import sequence_rewards
from megarl.config.algo import AdvantageConfig
from megarl.config.torch_later import Tensor, torch
from megarl.errors import DataError
from megarl.types import ScoredBatch

# Rounding leaves about 1e-17 on a token that should be 0.
ZERO = 1e-12
# Makes groups of equal rewards give 0 instead of 0/0; small compared with the spread of rewards that carry a signal.
_STD_EPS = 1e-6
_GROUP_NORM_EPS = 1e-9

# Rewards of a group with a smaller deviation count as equal; rounding alone leaves about 1e-16.
EQUAL_REWARDS_STD = 1e-8


def centred(rewards: Tensor, stats: GroupStats) -> Tensor:
    """Return the rewards [B], each minus the mean reward of its group.

    >>> centred(tensor([1.0, 0.0]), group_stats(tensor([1.0, 0.0]), "aa")).tolist()
    [0.5, -0.5]
    """
    return rewards - torch.where(stats.size == 1, 0.0, stats.mean)


def _deviation(stats: GroupStats) -> Tensor:
    return torch.where(stats.size == 1, 1.0, stats.std)


@ADVANTAGE_ESTIMATORS.register("grpo", options=("norm_by_std",), min_group=2)
def grpo(batch: ScoredBatch, cfg: AdvantageConfig) -> Tensor:
    """Compute GRPO's A = (r − mean_group) / (std_group + 1e-6), with the unbiased deviation (arXiv:2402.03300).

    Without `norm_by_std`, A = r − mean_group (Dr. GRPO, arXiv:2503.20783).

    >>> grpo(step("aa", [1.0, 0.0]), AdvantageConfig()).round(decimals=2).tolist()
    [0.71, -0.71]
    """
    rewards = sequence_rewards(batch)
    return _compared(rewards, group_stats(rewards, batch.uids), cfg)


def _compared(rewards: Tensor, stats: GroupStats, cfg: AdvantageConfig) -> Tensor:
    difference = centred(rewards, stats)
    return difference / (_deviation(stats) + _STD_EPS) if cfg.norm_by_std else difference


@ADVANTAGE_ESTIMATORS.register("grpo_split", options=("norm_by_std",), min_group=2)
def grpo_split(batch: ScoredBatch, cfg: AdvantageConfig) -> Tensor:
    """Compute GRPO's A with mean and deviation over rows without demonstration tokens (LUFFY, arXiv:2504.14945).

    A deviation of 0 is replaced by 1: a row with a demonstration then still differs from a group of equal rewards. If
    all rows of a group have demonstrations, all of them are used. `norm_by_std` acts as in `grpo`.

    >>> batch = step("aaa", [1.0, 0.0, 1.0], demonstration=[[1.0], [0.0], [0.0]])
    >>> grpo_split(batch, AdvantageConfig()).round(decimals=2).tolist()
    [0.71, -0.71, 0.71]
    """
    rewards = sequence_rewards(batch)
    on_policy = group_stats(rewards, batch.uids, where=~demonstration_mask(batch).any(dim=-1))
    every = group_stats(rewards, batch.uids)
    fall_back = on_policy.size == 0
    stats = GroupStats(
        size=torch.where(fall_back, every.size, on_policy.size),
        mean=torch.where(fall_back, every.mean, on_policy.mean),
        std=torch.where(fall_back, every.std, on_policy.std),
    )
    difference = centred(rewards, stats)
    deviation = torch.where(stats.std < EQUAL_REWARDS_STD, 1.0, stats.std)
    return difference / (deviation + _STD_EPS) if cfg.norm_by_std else difference


@ADVANTAGE_ESTIMATORS.register("dr_grpo", min_group=2)
def dr_grpo(batch: ScoredBatch, cfg: AdvantageConfig) -> Tensor:
    """Compute Dr. GRPO's A = r − mean_group (arXiv:2503.20783).

    >>> dr_grpo(step("aa", [1.0, 0.0]), AdvantageConfig()).tolist()
    [0.5, -0.5]
    """
    rewards = sequence_rewards(batch)
    return centred(rewards, group_stats(rewards, batch.uids))


@ADVANTAGE_ESTIMATORS.register("group_norm", min_group=2)
def group_norm(batch: ScoredBatch, cfg: AdvantageConfig) -> Tensor:
    """Compute GRPO's advantage with OpenRLHF's constant 1e-9: A = (r − mean_group) / (std_group + 1e-9).

    >>> group_norm(step("aa", [1.0, 0.0]), AdvantageConfig()).round(decimals=2).tolist()
    [0.71, -0.71]
    """
    rewards = sequence_rewards(batch)
    stats = group_stats(rewards, batch.uids)
    return centred(rewards, stats) / (_deviation(stats) + _GROUP_NORM_EPS)


def leave_one_out(rewards: Tensor, stats: GroupStats) -> Tensor:
    """Return the rewards [B], each minus the mean reward of the n − 1 other rows of its group: n/(n − 1)·(r − mean).

    >>> leave_one_out(tensor([1.0, 0.0]), group_stats(tensor([1.0, 0.0]), "aa")).tolist()
    [1.0, -1.0]
    """
    return centred(rewards, stats) * stats.size / (stats.size - 1).clamp(min=1)


@ADVANTAGE_ESTIMATORS.register("rloo", min_group=2)
def rloo(batch: ScoredBatch, cfg: AdvantageConfig) -> Tensor:
    """Compute RLOO's A_i = r_i − (Σ r − r_i)/(n − 1) over the n rows of a group (arXiv:2402.14740).

    >>> rloo(step("aaa", [1.0, 0.0, 0.0]), AdvantageConfig()).tolist()
    [1.0, -0.5, -0.5]
    """
    rewards = sequence_rewards(batch)
    return leave_one_out(rewards, group_stats(rewards, batch.uids))


@ADVANTAGE_ESTIMATORS.register("opo", min_group=2)
def opo(batch: ScoredBatch, cfg: AdvantageConfig) -> Tensor:
    """Compute OPO's A = r − Σ l·r / Σ l over the group, l being a row's number of loss tokens (arXiv:2505.23585).

    This baseline minimises the variance of the gradient if the squared gradient of a row's log-prob grows with l. In a
    group of one row, or one without loss tokens, it is 0.

    >>> opo(step("aa", [1.0, 0.0], [[1, 0, 0], [1, 1, 1]]), AdvantageConfig()).tolist()
    [0.75, -0.25]
    """
    rewards = sequence_rewards(batch)
    lengths = batch.loss_mask.sum(dim=-1).double()
    length, weighted = group_stats(lengths, batch.uids), group_stats(lengths * rewards, batch.uids)
    has_baseline = (length.size > 1) & (length.mean > 0)
    return rewards - torch.where(has_baseline, weighted.mean / torch.where(has_baseline, length.mean, 1.0), 0.0)


def equal_rewards(batch: ScoredBatch) -> Tensor:
    """Return [B] bool, true for rows in a group of at least two rows whose rewards before the KL penalty are all equal.

    >>> equal_rewards(step("aabb", [1.0, 1.0, 1.0, 0.0])).tolist()
    [True, True, False, False]
    """
    stats = group_stats(batch.rewards, batch.uids)
    return (stats.size > 1) & (stats.std < EQUAL_REWARDS_STD)


@ADVANTAGE_ESTIMATORS.register("gpg", min_group=2)
def gpg(batch: ScoredBatch, cfg: AdvantageConfig) -> Tensor:
    """Compute GPG's A = α·(r − mean_group), α = rows / rows in groups of unequal rewards (arXiv:2504.02546).

    α makes up for the groups of equal rewards, which add nothing to the gradient but count in its mean.

    >>> gpg(step("aabb", [1.0, 0.0, 1.0, 1.0]), AdvantageConfig()).tolist()
    [1.0, -1.0, 0.0, 0.0]
    """
    rewards = sequence_rewards(batch)
    alpha = len(batch.uids) / max(int((~equal_rewards(batch)).sum()), 1)
    return alpha * centred(rewards, group_stats(rewards, batch.uids))


@ADVANTAGE_ESTIMATORS.register("gdpo", options=("components", "norm_by_std"), min_group=2)
def gdpo(batch: ScoredBatch, cfg: AdvantageConfig) -> Tensor:
    """Compute GDPO (arXiv:2601.05242): normalise the parts of a reward in each group, their sum over the batch.

    S = Σ w·A over `components`, with weight w and the advantage A that `grpo` computes of the component alone. Then
    A = (S − mean) / (std + 1e-6) over all rows of the batch. A row on which nobody has an opinion (`no_opinion`) is
    left out of the component's mean and deviation, and has A = 0 from it; so has the only row of a larger group on
    which somebody has one. Raises DataError for another row that lacks a component.

    >>> batch = step("aab", [1.0, 0.0, 0.0])
    >>> gdpo(batch, AdvantageConfig(components={"correct": 1.0, "score": 1.0})).round(decimals=2).tolist()
    [1.0, -1.0, 0.0]
    """
    total = torch.zeros_like(batch.rewards, dtype=torch.float64)
    sizes = group_stats(batch.rewards, batch.uids).size
    remedy = "change algo.advantage.components, or let the scorer report a finite number of this name for every row"
    for name, weight in cfg.components.items():
        if weight == 0:
            continue
        values = required_detail(batch, name, remedy)
        heard = ~values.isnan()
        stats = group_stats(values, batch.uids, where=heard)
        is_comparable = heard & ((stats.size > 1) | (sizes == 1))
        total += weight * torch.where(is_comparable, _compared(values, stats, cfg), 0.0)
    of_batch = group_stats(total, [""] * len(total))
    shifted = total - of_batch.mean
    # Rounding leaves about 1e-17 where the mean is met; its sign would depend on the order of rows.
    return torch.where(shifted.abs() < ZERO, 0.0, shifted) / (of_batch.std + _STD_EPS)


def _by_group(rewards: Tensor, uids: Sequence[str], estimate: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply `estimate`, which maps the rewards [n] of one group to advantages [n], to every group; return them for all
    rows.
    """
    index, num_groups = group_index(uids, rewards.device)
    result = torch.zeros_like(rewards)
    for group in range(num_groups):
        rows = index == group
        result[rows] = estimate(rewards[rows])
    return result


@ADVANTAGE_ESTIMATORS.register("passk", options=("k",), min_group=2)
def passk(batch: ScoredBatch, cfg: AdvantageConfig) -> Tensor:
    """Compute the advantage for pass@k, the probability that at least one of k samples is correct (arXiv:2508.10751).

    The reward of a set of k rows is the highest reward among them. Over all sets of k rows of a group, these rewards
    have a mean and a (population) deviation. A is the mean of (reward − mean) / (deviation + 1e-6) over the sets that
    contain the row. For rewards of 0 and 1 this is the paper's formula. If k is the group's size or more, there is one
    set, and A is 0.

    >>> passk(step("aaa", [1.0, 0.0, 0.0]), AdvantageConfig(k=2)).round(decimals=2).tolist()
    [0.71, -0.35, -0.35]
    """

    def estimate(rewards: Tensor) -> Tensor:
        n = len(rewards)
        k = min(cfg.k, n)
        ordered, order = rewards.sort()
        # The row of rank i is the highest of C(i, k − 1) sets; those with another row j < i in them: C(i − 1, k − 2).
        highest_of = rewards.new_tensor([comb(i, k - 1) / comb(n, k) for i in range(n)])
        with_other = [comb(i - 1, k - 2) / comb(n - 1, k - 1) if i and k > 1 else 0.0 for i in range(n)]
        above = rewards.new_tensor(with_other) * ordered
        own = highest_of * n / k * ordered
        mean = (highest_of * ordered).sum()
        deviation = (highest_of * (ordered - mean).square()).sum().sqrt()
        of_rank = (own + above.sum() - above.cumsum(0) - mean) / (deviation + _STD_EPS)
        return torch.empty_like(of_rank).scatter(0, order, of_rank)

    return _by_group(sequence_rewards(batch), batch.uids, estimate)


@ADVANTAGE_ESTIMATORS.register("passk_best", options=("norm_by_std",), min_group=2)
def passk_best(batch: ScoredBatch, cfg: AdvantageConfig) -> Tensor:
    """Compute A = (r − r_second) / (std_group + 1e-6) for the best row of a group, 0 for others (arXiv:2503.19595).

    r_second is the next highest reward, so that two equally good best rows both have A = 0. Without `norm_by_std`,
    A = r − r_second.

    >>> passk_best(step("aaa", [1.0, 0.0, 0.5]), AdvantageConfig(norm_by_std=False)).tolist()
    [0.5, 0.0, 0.0]
    """

    def estimate(rewards: Tensor) -> Tensor:
        highest = rewards.sort(descending=True).values
        second = highest[1] if len(rewards) > 1 else rewards.new_zeros(())
        return torch.where(rewards == highest[0], rewards - second, 0.0)

    rewards = sequence_rewards(batch)
    difference = _by_group(rewards, batch.uids, estimate)
    deviation = _deviation(group_stats(rewards, batch.uids))
    return difference / (deviation + _STD_EPS) if cfg.norm_by_std else difference


@ADVANTAGE_ESTIMATORS.register("maxrl", min_group=2, refuses_negative=True)
def maxrl(batch: ScoredBatch, cfg: AdvantageConfig) -> Tensor:
    """Compute MaxRL's A = (r − mean_group) / mean_group, or 0 in a group whose mean is 0 (arXiv:2602.02710).

    For r ∈ {0, 1}, mean_group estimates the probability p of success. A then gives the gradient of log p, not of p.
    A group of one row has A = 0. Raises DataError for a negative reward, because mean_group is then no probability.

    >>> maxrl(step("aa", [1.0, 0.0]), AdvantageConfig()).tolist()
    [1.0, -1.0]
    """
    rewards = sequence_rewards(batch)
    negative = (rewards < 0).nonzero().flatten().tolist()
    if negative:
        i = negative[0]
        raise DataError(
            f"reward of row {i} (uid {batch.uids[i]!r}): got {rewards[i].item()}, expected >= 0 with "
            f"algo.advantage.estimator=maxrl; use a scorer of 0 and 1, or another estimator"
        )
    mean = group_stats(rewards, batch.uids).mean
    return torch.where(mean > 0, (rewards - mean) / torch.where(mean > 0, mean, 1.0), 0.0)

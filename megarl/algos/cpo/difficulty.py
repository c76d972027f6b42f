"""Judge how hard a prompt is for the policy from the correctness and rewards of its samples (rows with one uid)."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from megarl.algos.masked import group_stats
from megarl.config.algo import CpoConfig
from megarl.config.torch_later import Tensor, torch
from megarl.registry import Registry

# (uids, correct [B] bool, rewards [B]) → difficulty level of each row, [B] int64.
Difficulty: TypeAlias = Callable[[Sequence[str], Tensor, Tensor], Tensor]

DIFFICULTIES: Registry[Difficulty] = Registry("difficulty", key="algo.cpo.difficulty")

# Names of the difficulties in metrics.
LEVELS: Mapping[str, int] = {"easy": 1, "medium": 0, "hard": -1}

_EASY_VARIANCE = 0.1
_HARD_STD = math.sqrt(0.5)


@DIFFICULTIES.register("three_way")
def three_way(uids: Sequence[str], correct: Tensor, rewards: Tensor) -> Tensor:
    """Return [B], the level of each row's group: 1 if all its samples are correct, −1 if none is correct, else 0.

    >>> three_way("aab", torch.tensor([True, False, True]), tensor([1.0, 0.0, 1.0])).tolist()
    [0, 0, 1]
    """
    share = group_stats(correct, uids).mean
    return (share == 1).long() - (share == 0).long()


@DIFFICULTIES.register("five_way")
def five_way(uids: Sequence[str], correct: Tensor, rewards: Tensor) -> Tensor:
    """Return the level for c of n samples correct: −2 if c = 0, −1 if c ≤ n/4, 0 if c ≤ 5n/8, 2 if c = n, else 1.

    >>> correct = torch.tensor([True, False, False, False])
    >>> five_way("aaaa", correct, tensor([1.0, 0.0, 0.0, 0.0])).tolist()
    [-1, -1, -1, -1]
    """
    group = group_stats(correct, uids)
    num_correct = (group.mean * group.size).round()
    level = (8 * num_correct > 2 * group.size).long() + (8 * num_correct > 5 * group.size).long() - 1
    return level + (num_correct == group.size).long() - (num_correct == 0).long()


@DIFFICULTIES.register("variance")
def variance(uids: Sequence[str], correct: Tensor, rewards: Tensor) -> Tensor:
    """Return the level by the unbiased variance of a group's rewards: 1 (easy) below 0.1, −1 (hard) above 0.5, else 0.

    This is CPO's published rule. It calls a group without any correct sample easy; `variance_signed` does not.

    >>> variance("aabb", torch.tensor([True, False, True, True]), tensor([2.0, 0.0, 1.0, 1.0])).tolist()
    [-1, -1, 1, 1]
    """
    std = group_stats(rewards, uids).std
    return (std.square() < _EASY_VARIANCE).long() - (std > _HARD_STD).long()


@DIFFICULTIES.register("variance_signed")
def variance_signed(uids: Sequence[str], correct: Tensor, rewards: Tensor) -> Tensor:
    """Return the level of `variance`, except that low variance is hard (−1) if fewer than half are correct, 0 at one
    half.

    >>> correct = torch.tensor([False, False, True, True])
    >>> variance_signed("aabb", correct, tensor([0.0, 0.0, 1.0, 1.0])).tolist()
    [-1, -1, 1, 1]
    """
    by_variance = variance(uids, correct, rewards)
    majority = (group_stats(correct, uids).mean - 0.5).sign().long()
    return torch.where(by_variance == 1, majority, by_variance)


def group_difficulty(uids: Sequence[str], correct: Tensor, rewards: Tensor, cfg: CpoConfig) -> Tensor:
    """Return the difficulty [B] that CPO's methods read: 1 (easy), 0 or −1 (hard), the sign of the configured level.

    Levels 1 and 2 of `five_way` are therefore both easy, and −1 and −2 are both hard.

    >>> group_difficulty("aab", torch.tensor([True, False, True]), tensor([1.0, 0.0, 1.0]), CpoConfig()).tolist()
    [0, 0, 1]
    """
    return DIFFICULTIES.get(cfg.difficulty)(uids, correct, rewards).sign()


def difficulty_metrics(uids: Sequence[str], correct: Tensor, difficulty: Tensor) -> Mapping[str, float]:
    """Compute the shares of prompts with all samples wrong, mixed, or all correct, and of prompts of each difficulty.

    `difficulty` [B] in {−1, 0, 1} is the result of `group_difficulty`. Without rows there are no metrics.

    >>> metrics = difficulty_metrics("aab", torch.tensor([True, False, True]), torch.tensor([-1, -1, 1]))
    >>> metrics["cpo/difficulty_mixed_frac"], metrics["cpo/difficulty_hard_frac"]
    (0.5, 0.5)
    """
    if not uids:
        return {}
    by_row = zip(group_stats(correct, uids).mean.tolist(), difficulty.tolist(), strict=True)
    shares, levels = zip(*dict(zip(uids, by_row, strict=True)).values(), strict=True)
    all_correct, all_wrong = shares.count(1.0) / len(shares), shares.count(0.0) / len(shares)
    return {
        "cpo/difficulty_all_wrong_frac": all_wrong,
        "cpo/difficulty_mixed_frac": sum(0 < share < 1 for share in shares) / len(shares),
        "cpo/difficulty_all_correct_frac": all_correct,
        "train/difficulty_all_correct_ratio": all_correct,
        "cpo/difficulty_easy_frac": levels.count(LEVELS["easy"]) / len(levels),
        "cpo/difficulty_medium_frac": levels.count(LEVELS["medium"]) / len(levels),
        "cpo/difficulty_hard_frac": levels.count(LEVELS["hard"]) / len(levels),
    }

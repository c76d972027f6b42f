"""How hard a prompt is for the policy, judged by the samples of its group (rows of equal uid)."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from megarl.algos.masked import group_stats
from megarl.config.algo import CpoConfig
from megarl.registry import Registry

# (uids, correct [B] bool, rewards [B]) → [B] int64.
Difficulty: TypeAlias = Callable[[Sequence[str], Tensor, Tensor], Tensor]

DIFFICULTIES: Registry[Difficulty] = Registry("difficulty", key="algo.cpo.difficulty")

_EASY_VARIANCE = 0.1
_HARD_STD = math.sqrt(0.5)


@DIFFICULTIES.register("three_way")
def three_way(uids: Sequence[str], correct: Tensor, rewards: Tensor) -> Tensor:
    """Level 1 if all samples are correct, −1 if none is, else 0.

    >>> three_way("aab", torch.tensor([True, False, True]), tensor([1.0, 0.0, 1.0])).tolist()
    [0, 0, 1]
    """
    share = group_stats(correct, uids).mean
    return (share == 1).long() - (share == 0).long()


@DIFFICULTIES.register("five_way")
def five_way(uids: Sequence[str], correct: Tensor, rewards: Tensor) -> Tensor:
    """Level by c of n correct samples: 0 → −2, up to n/4 → −1, up to 5n/8 → 0, more → 1, n → 2.

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
    """Level by the unbiased variance of rewards: below 0.1 → 1, above 0.5 → −1, else 0.

    As CPO was described. It calls a group without a correct sample easy; see `variance_signed`.

    >>> variance("aabb", torch.tensor([True, False, True, True]), tensor([2.0, 0.0, 1.0, 1.0])).tolist()
    [-1, -1, 1, 1]
    """
    std = group_stats(rewards, uids).std
    return (std.square() < _EASY_VARIANCE).long() - (std > _HARD_STD).long()


@DIFFICULTIES.register("variance_signed")
def variance_signed(uids: Sequence[str], correct: Tensor, rewards: Tensor) -> Tensor:
    """Level as in `variance`, but a group of low variance is 1 if most of its samples are correct and −1 if most are
    not.

    >>> correct = torch.tensor([False, False, True, True])
    >>> variance_signed("aabb", correct, tensor([0.0, 0.0, 1.0, 1.0])).tolist()
    [-1, -1, 1, 1]
    """
    by_variance = variance(uids, correct, rewards)
    majority = (group_stats(correct, uids).mean - 0.5).sign().long()
    return torch.where(by_variance == 1, majority, by_variance)


def group_difficulty(uids: Sequence[str], correct: Tensor, rewards: Tensor, cfg: CpoConfig) -> Tensor:
    """Return levels [B] in {−1, 0, 1} as the methods read it; of five levels only the outermost are not 0.

    >>> group_difficulty("aab", torch.tensor([True, False, True]), tensor([1.0, 0.0, 1.0]), CpoConfig()).tolist()
    [0, 0, 1]
    """
    level = DIFFICULTIES.get(cfg.difficulty)(uids, correct, rewards)
    return level.div(2, rounding_mode="trunc") if cfg.difficulty == "five_way" else level


def difficulty_metrics(uids: Sequence[str], correct: Tensor) -> Mapping[str, float]:
    """Compute the shares of prompts, not of rows, whose samples are all wrong, mixed and all correct. Nothing without
    rows.

    >>> difficulty_metrics("aab", torch.tensor([True, False, True]))["cpo/difficulty_mixed_frac"]
    0.5
    """
    if not uids:
        return {}
    share = group_stats(correct, uids).mean.tolist()
    by_prompt = torch.tensor(list(dict(zip(uids, share, strict=True)).values()))
    all_correct, all_wrong = (by_prompt == 1).double().mean().item(), (by_prompt == 0).double().mean().item()
    return {
        "cpo/difficulty_all_wrong_frac": all_wrong,
        "cpo/difficulty_mixed_frac": ((by_prompt > 0) & (by_prompt < 1)).double().mean().item(),
        "cpo/difficulty_all_correct_frac": all_correct,
        "train/difficulty_all_correct_ratio": all_correct,
    }

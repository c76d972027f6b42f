"""Difficulty of prompts from the samples of their groups."""

from typing import Any

import pytest
import torch

from megarl.algos.cpo import difficulty_metrics, group_difficulty
from megarl.algos.cpo.difficulty import DIFFICULTIES
from megarl.config.algo import CpoConfig


def levels(name: str, uids: list[str], rewards: list[float]) -> list[int]:
    r = torch.tensor(rewards, dtype=torch.float64)
    return DIFFICULTIES.get(name)(uids, r > 0, r).tolist()


@pytest.mark.parametrize("case_id", ["A.difficulty.n8", "A.difficulty.n4_five", "A.difficulty.reward01"])
def test_golden(case_id: str, golden: Any) -> None:
    case = golden(case_id)
    for key, expected in case["expected"].items():
        name = {"three": "three_way", "five": "five_way", "variance": "variance"}[key]
        assert levels(name, case["inputs"]["uid"], case["inputs"]["reward"]) == expected


def test_variance_signed_knows_an_all_wrong_group() -> None:
    uids = ["a"] * 4 + ["b"] * 4 + ["c"] * 4
    rewards = [-1.0] * 4 + [1.0] * 4 + [1.0, -1.0, 1.0, -1.0]
    assert levels("variance", uids, rewards) == [1] * 4 + [1] * 4 + [-1] * 4
    assert levels("variance_signed", uids, rewards) == [-1] * 4 + [1] * 4 + [-1] * 4


def test_a_correct_row_is_what_the_verifier_says() -> None:
    """A format bonus makes all rewards positive; the group is still one without a correct sample."""
    correct, rewards = torch.tensor([False, False]), torch.tensor([0.1, 0.2])
    assert group_difficulty(["q", "q"], correct, rewards, CpoConfig()).tolist() == [-1, -1]


def test_of_five_levels_the_sign_counts() -> None:
    uids = [f"q{i}" for i in range(5) for _ in range(8)]
    correct = torch.tensor([k < c for c in (0, 2, 4, 6, 8) for k in range(8)])
    got = group_difficulty(uids, correct, correct.float(), CpoConfig(difficulty="five_way"))
    assert got.reshape(5, 8)[:, 0].tolist() == [-1, -1, 0, 1, 1]


def test_metrics_count_prompts_not_rows() -> None:
    uids = ["a", "b", "b", "b", "c", "c", "d"]
    correct = torch.tensor([True, False, False, False, True, False, True])
    difficulty = torch.tensor([1, -1, -1, -1, 0, 0, -1])
    assert difficulty_metrics(uids, correct, difficulty) == {
        "cpo/difficulty_all_wrong_frac": 0.25,
        "cpo/difficulty_mixed_frac": 0.25,
        "cpo/difficulty_all_correct_frac": 0.5,
        "train/difficulty_all_correct_ratio": 0.5,
        "cpo/difficulty_easy_frac": 0.25,
        "cpo/difficulty_medium_frac": 0.25,
        "cpo/difficulty_hard_frac": 0.5,
    }
    assert difficulty_metrics([], correct[:0], difficulty[:0]) == {}

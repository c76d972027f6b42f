"""Difficulty of prompts from the samples of their groups."""

from typing import Any

import pytest
import torch

from megarl.algos.cpo import difficulty_metrics
from megarl.algos.cpo.difficulty import DIFFICULTIES


def levels(name: str, uids: list[str], rewards: list[float]) -> list[int]:
    r = torch.tensor(rewards, dtype=torch.float64)
    return DIFFICULTIES.get(name)(uids, r > 0, r).tolist()


@pytest.mark.parametrize("case_id", ["A.difficulty.n8", "A.difficulty.n4_five", "A.difficulty.reward01"])
def test_golden(case_id: str, golden: Any) -> None:
    case = golden(case_id)
    for key, expected in case["expected"].items():
        name = {"three": "three_way", "five": "five_way", "variance": "variance"}[key]
        assert levels(name, case["inputs"]["uid"], case["inputs"]["reward"]) == expected


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

import math
from collections.abc import Callable
from typing import Any

import torch

from megarl.algos.token_rewards import last_token, place_reward, returns_to_go, sequence_rewards, token_rewards
from megarl.types import ScoredBatch

MakeScored = Callable[..., ScoredBatch]


def test_sparse_reward_golden(golden: Any, check_golden: Any) -> None:
    case = golden("A.sparse_reward")
    mask = torch.tensor([case["inputs"]["response_mask"]]).bool()
    got = place_reward(torch.tensor([case["inputs"]["score"]], dtype=torch.float64), mask)
    check_golden(got[0], case["expected"], case)


def test_last_token_of_masks_with_gaps_and_of_none() -> None:
    mask = torch.tensor([[True, False, True, False], [False, False, False, False], [True, False, False, False]])
    assert last_token(mask).tolist() == [[False, False, True, False], [False] * 4, [True, False, False, False]]


def test_rows_without_loss_tokens_have_no_token_reward_but_keep_their_score(make_scored: MakeScored) -> None:
    mask = torch.tensor([[True, True], [False, False]])
    penalty = torch.tensor([[0.25, 0.5], [math.nan, math.nan]], dtype=torch.float64)
    batch = make_scored(["a", "a"], [1.0, 2.0], mask, kl_penalty=penalty)
    assert token_rewards(batch).tolist() == [[-0.25, 0.5], [0.0, 0.0]]
    assert sequence_rewards(batch).tolist() == [0.25, 2.0]


def test_returns_to_go() -> None:
    assert returns_to_go(torch.tensor([[1.0, 2.0, 4.0]])).tolist() == [[7.0, 6.0, 4.0]]


def test_discounted_returns_leave_their_input() -> None:
    x = torch.tensor([[1.0], [2.0]], dtype=torch.float64)
    assert returns_to_go(x.t(), 0.5).tolist() == [[2.0, 2.0]]
    assert returns_to_go(x, 0.5).tolist() == [[1.0], [2.0]]
    assert x.tolist() == [[1.0], [2.0]]

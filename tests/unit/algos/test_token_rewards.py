from typing import Any

import torch

from megarl.algos.token_rewards import place_reward


def test_sparse_reward_golden(golden: Any, check_golden: Any) -> None:
    case = golden("A.sparse_reward")
    mask = torch.tensor([case["inputs"]["response_mask"]]).bool()
    got = place_reward(torch.tensor([case["inputs"]["score"]], dtype=torch.float64), mask)
    check_golden(got[0], case["expected"], case)

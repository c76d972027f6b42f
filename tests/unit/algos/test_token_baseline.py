"""The optimal token baseline by hand."""

import math

import pytest
import torch

from megarl.algos import build_algorithm
from megarl.algos.advantages import compute_advantages
from megarl.algos.advantages.turns import token_baseline
from megarl.config.algo import AdvantageConfig, AlgoConfig, CpoConfig
from megarl.errors import ConfigError
from megarl.types import ScoredBatch

MASK = torch.tensor([[True, False, True], [True, True, True], [True, False, False]])


def batch(**quantities: list[list[float]]) -> ScoredBatch:
    """Rewards 1, 0 and 0 at the rows' last loss tokens; Σ p² = 1 + p, so that e = 2 − p of the first policy."""
    old = torch.tensor([[0.5, 0.5, 0.25], [0.25, 0.5, 0.5], [0.5, 0.5, 0.5]], dtype=torch.float64)
    given = {name: torch.tensor(values, dtype=torch.float64) for name, values in quantities.items()}
    return ScoredBatch(
        uids=("a", "a", "b"),
        rewards=torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64),
        correct=torch.tensor([True, False, False]),
        loss_mask=MASK,
        quantities={"old_logprobs": old.log(), "old_squares": 1 + old, **given},
    )


def advantages(data: ScoredBatch, **options: object) -> list[list[float]]:
    return compute_advantages(data, AdvantageConfig(estimator="otb", **options)).advantages.tolist()  # type: ignore[arg-type]


def test_by_hand() -> None:
    # W = 1.5, –, 3.25 | 1.75, 3.25, 4.75. Columns 1 and 3: 1.5/3.25 and 3.25/8; column 2 has one row, not the longest.
    first, third = 1.5 / 3.25, 3.25 / 8
    assert advantages(batch()) == [
        pytest.approx([1 - first, 0, 1 - third], abs=1e-8),
        pytest.approx([-first, 0, -third], abs=1e-8),
        # The only row of its group.
        [0, 0, 0],
    ]
    # By the number of loss tokens: the second of row 1 beside the second of row 2; row 2 alone has a third.
    second = 3.25 / 6.5
    assert advantages(batch(), places="loss") == [
        pytest.approx([1 - first, 0, 1 - second], abs=1e-8),
        pytest.approx([-first, -second, 0], abs=1e-8),
        [0, 0, 0],
    ]


def test_tokens_count_by_their_truncated_ratios() -> None:
    """Row 1's ratios are 2 and 8, row 2's 1: squares of 4 and, at most, 9."""
    old = batch().quantities["old_logprobs"]
    log_ratios = torch.tensor([[math.log(2), 0, math.log(8)], [0, 0, 0], [0, 0, 0]], dtype=torch.float64)
    data = batch(rollout_logprobs=(old - log_ratios).tolist())
    third = (1.5 * 4 + 1.75 * 9) / (1.5 * 4 + 1.75 * 9 + 4.75)
    assert advantages(data, weight_cap=3.0)[1][2] == pytest.approx(-third)


def test_nothing_to_compare() -> None:
    nothing = torch.zeros(0, 3, dtype=torch.float64)
    assert token_baseline(nothing, nothing, nothing.bool(), []).shape == (0, 3)
    empty = torch.zeros(2, 0, dtype=torch.float64)
    assert token_baseline(empty, empty, empty.bool(), ["a", "a"]).shape == (2, 0)


def test_it_asks_for_what_it_reads_and_refuses_passes_that_lack_it() -> None:
    cfg = AlgoConfig(advantage=AdvantageConfig(estimator="otb"))
    asked = {str(name) for name in build_algorithm(cfg, max_response_tokens=8).requires()}
    assert asked == {"old_logprobs", "old_squares"}
    with pytest.raises(ConfigError, match="choose another estimator"):
        build_algorithm(
            AlgoConfig(advantage=AdvantageConfig(estimator="otb"), cpo=CpoConfig(method="mi")), max_response_tokens=8
        )

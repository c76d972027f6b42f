import math

import pytest
import torch

from megarl.algos.preference import BradleyTerry
from megarl.types import AlgoState, RowBatch, ValueOutputs, row_batch, row_read_at_end
from tests.helpers.rows import random_rows


def batch(*margins: float) -> RowBatch:
    """Pairs with these margins."""
    both = [*margins, *(0.0 for _ in margins)]
    return RowBatch(
        labels=tuple(map(str, range(len(both)))),
        loss_mask=torch.ones(len(both), 1, dtype=torch.bool),
        scores={"margin": torch.tensor(both)[:, None]},
    )


def test_the_likelihood_of_two_preferences() -> None:
    # Differences 2 − 0 = 2 with margin 2, and 1 − 2 = −1 without: σ(0) = ½ and σ(−1) = 1/(1 + e).
    values = torch.tensor([[2.0], [1.0], [0.0], [2.0]], requires_grad=True)
    sums = BradleyTerry().loss(batch(2.0, 0.0), ValueOutputs(values=values), AlgoState())
    assert sums.objective["pairs"].item() == pytest.approx(math.log(2) + math.log(1 + math.e))
    sums.objective["pairs"].backward()
    # d/dx −log σ(x) = σ(x) − 1.
    assert values.grad is not None
    assert values.grad[:, 0].tolist() == pytest.approx([-0.5, -math.e / (1 + math.e), 0.5, math.e / (1 + math.e)])
    assert {name: part.item() for name, part in sums.metrics["pairs"].items()} == {
        "reward_model/accuracy": 1,
        "reward_model/margin": 1,
        "reward_model/score_chosen": 3,
        "reward_model/score_rejected": 2,
    }


def test_equal_scores_prefer_nothing() -> None:
    sums = BradleyTerry().loss(batch(0.0), ValueOutputs(values=torch.zeros(2, 1)), AlgoState())
    assert sums.metrics["pairs"]["reward_model/accuracy"].item() == 0


def test_large_differences_stay_finite() -> None:
    values = torch.tensor([[-500.0], [500.0]])
    assert BradleyTerry().loss(batch(0.0), ValueOutputs(values=values), AlgoState()).objective["pairs"].item() == 1000


def test_a_mean_over_pairs() -> None:
    rows = random_rows([(2, 1)] * 6, holes=False)
    assert BradleyTerry().denominators(rows) == {"pairs": 3.0}
    assert BradleyTerry().denominators([]) == {"pairs": 1.0}


def test_a_micro_batch_without_pairs_adds_nothing() -> None:
    rows = row_batch([], device=torch.device("cpu"))
    values = torch.zeros(0, 0, requires_grad=True)
    sums = BradleyTerry().loss(rows, ValueOutputs(values=values), AlgoState())
    sums.objective["pairs"].backward()
    assert sums.objective["pairs"].item() == 0
    assert all(part.item() == 0 for part in sums.metrics["pairs"].values())


def test_a_row_that_is_read_at_its_end() -> None:
    row = row_read_at_end("a", 1, torch.tensor([5, 6, 7]).numpy(), margin=0.5)
    # The value of the fourth token is said from the third, the last of the sequence.
    assert (row.num_prompt_tokens, row.token_ids[:3].tolist(), row.num_response_tokens) == (3, [5, 6, 7], 1)
    assert (row.loss_mask.tolist(), row.scores["margin"].tolist()) == ([True], [0.5])

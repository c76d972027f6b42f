"""Statistics of a whole batch, by hand, and that neither the order of rows nor padding changes them."""

import math

import numpy as np
import pytest
import torch

from megarl.algos import build_algorithm
from megarl.algos.batch_statistics import (
    LOG_WEIGHT,
    effective_sample_size,
    high_entropy,
    step_scale,
    within_second_moment,
)
from megarl.config.algo import AlgoConfig, PolicyLossConfig
from megarl.types import Row
from tests.helpers.steps import MAX_RESPONSE_TOKENS, random_step


def row_of(log_weights: list[float]) -> Row:
    return Row(
        uid="a",
        sample_index=0,
        token_ids=np.arange(len(log_weights) + 1),
        num_prompt_tokens=1,
        loss_mask=np.ones(len(log_weights), np.bool_),
        quantities={LOG_WEIGHT: np.array(log_weights, np.float32)},
    )


def test_the_highest_entropies_are_above_an_interpolated_quantile() -> None:
    mask = torch.tensor([[True, True, True], [True, True, False]])
    entropy = torch.tensor([[0.0, 4.0, 2.0], [3.0, 1.0, 9.0]])
    # The 0.8-quantile of 0, 1, 2, 3, 4 is 3.2; the 0.5-quantile is 2, which stays.
    assert high_entropy(entropy, mask, 0.2).tolist() == [[False, True, False], [False, False, False]]
    assert high_entropy(entropy, mask, 0.5).tolist() == [[False, True, True], [True, False, False]]
    assert high_entropy(entropy, mask, 1.0).equal(mask)
    assert not high_entropy(entropy, mask & False, 0.2).any()


@pytest.mark.parametrize(
    ("log_ratios", "kept"),
    [
        ([0.0, 0.0], [True, True]),
        ([0.1, 0.5, -0.1, 0.3], [True, False, True, True]),  # means 0.01, 0.01, 0.037, 0.09
        ([3.0, 1.0, -1.0], [False, True, False]),  # none is small enough; one stays
        ([0.25, 0.25, -0.25, 0.0], [True, False, False, True]),  # means 0, 0.031, 0.042: the first of equal ones
        ([], []),
    ],
)
def test_the_fewest_of_the_largest_squares_go(log_ratios: list[float], kept: list[bool]) -> None:
    assert within_second_moment(torch.tensor(log_ratios, dtype=torch.float64), 0.04).tolist() == kept


@pytest.mark.parametrize("shift", [0.0, -15.0, 800.0])
def test_the_effective_size_does_not_depend_on_the_scale_of_weights(shift: float) -> None:
    assert effective_sample_size(torch.full((64,), shift)) == pytest.approx(64, rel=1e-9)
    # (1 + ½)²/(1 + ¼).
    assert effective_sample_size(torch.tensor([shift, shift - math.log(2)])) == pytest.approx(1.8, rel=1e-4)


def test_the_step_shrinks_by_the_root_of_the_share_of_rows_that_count() -> None:
    cfg = AlgoConfig(step_scale_power=0.5)
    rows = [row_of([0.5, -0.5]), row_of([0.0]), row_of([-60.0]), row_of([-30.0, -30.0])]
    assert step_scale(rows, cfg) == pytest.approx(math.sqrt(0.5))
    assert step_scale(rows, AlgoConfig(step_scale_power=1.0, step_scale_ess=0.8)) == pytest.approx(0.625)
    assert step_scale(rows, AlgoConfig(step_scale_power=1.0, step_scale_ess=0.4)) == 1.0
    assert step_scale(rows, AlgoConfig()) == step_scale([], cfg) == 1.0


def test_a_step_keeps_what_its_own_rows_say() -> None:
    """Of the log-weights of rows, and what lies in tokens of low entropy."""
    step = random_step([4, 4], 3)
    cfg = AlgoConfig(high_entropy_share=0.25, step_scale_power=0.5, policy_loss=PolicyLossConfig(name="reinforce"))
    algo = build_algorithm(cfg, max_response_tokens=MAX_RESPONSE_TOKENS)
    assert {"old_logprobs", "old_entropy"} <= {str(name) for name in algo.requires()}
    found = algo.advantages(step.batch, algo.initial_state())
    mask, entropy = step.batch.loss_mask, step.batch.quantities["old_entropy"]
    plain = build_algorithm(AlgoConfig(), max_response_tokens=MAX_RESPONSE_TOKENS)
    expected = plain.advantages(step.batch, plain.initial_state()).values
    high = mask & (entropy >= np.quantile(entropy[mask].numpy(), 0.75))
    torch.testing.assert_close(found.values, torch.where(high, expected, 0.0))
    ratios = step.batch.quantities["old_logprobs"] - step.batch.quantities["rollout_logprobs"]
    torch.testing.assert_close(found.quantities[LOG_WEIGHT], torch.where(mask, ratios, 0.0))
    sums = ratios.where(mask, 0.0).sum(-1)[mask.any(-1)].exp()
    assert found.metrics["is/row_ess"] == pytest.approx(float(sums.sum() ** 2 / sums.square().sum() / len(sums)))

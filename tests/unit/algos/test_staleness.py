"""Lags and drift of a step, with numbers by hand."""

import math

import pytest
import torch

from megarl.algos.staleness import drift_metrics, staleness_metrics


def test_shares_drift_and_rows_across_versions() -> None:
    lag = torch.tensor([[2.0, 2.0, 0.0, 0.0], [0.0, 0.0, 9.0, 0.0]])
    # The 9 is no loss token, and the second row has a single one.
    sampled = torch.tensor([[True, True, True, False], [True, False, False, False]])
    rollout = torch.tensor([[-1.0, -2.0, -3.0, -9.0], [-1.0, -9.0, -9.0, -9.0]])
    old = torch.tensor([[-1.5, -1.0, -3.0, 0.0], [-1.25, 0.0, 0.0, 0.0]])
    assert staleness_metrics(lag, sampled) == {
        "staleness/lag_mean": 1.0,
        "staleness/lag_max": 2.0,
        "staleness/spanning_frac": 0.5,
        "staleness/frac_lag_0": 0.5,
        "staleness/frac_lag_1": 0.0,
        "staleness/frac_lag_2": 0.5,
    }
    # |−0.5| and |1|; no token has lag 1, and what differs at lag 0 is no drift.
    drift = drift_metrics(lag, sampled, rollout_logprobs=rollout, old_logprobs=old)
    # Squares 0 and 1/16 of fresh tokens; ¼ and 1 of stale ones.
    assert drift == pytest.approx(
        {
            "staleness/drift_abs_mean_lag_2": 0.75,
            "staleness/gap_engine": math.sqrt(1 / 32),
            "staleness/gap_staleness": math.sqrt(5 / 8 - 1 / 32),
        }
    )


def test_the_gap_is_not_split_without_tokens_of_both_kinds_and_keeps_nan() -> None:
    zeros, every = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    for lag in (zeros, zeros + 1):
        found = drift_metrics(lag, every, rollout_logprobs=zeros, old_logprobs=zeros + 1)
        assert not [name for name in found if "gap" in name]
    # Where the engine differs more on fresh tokens than on stale ones, nothing is left for updates.
    lag, old = torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.5]])
    assert drift_metrics(lag, every, rollout_logprobs=zeros, old_logprobs=old)["staleness/gap_staleness"] == 0
    spoiled = drift_metrics(lag, every, rollout_logprobs=zeros, old_logprobs=old * math.nan)
    assert math.isnan(spoiled["staleness/gap_staleness"])


@pytest.mark.parametrize("shape", [(0, 0), (2, 3)])
def test_without_sampled_tokens_there_is_nothing_to_measure(shape: tuple[int, int]) -> None:
    zeros = torch.zeros(shape)
    assert staleness_metrics(zeros, zeros > 0) == {}
    assert drift_metrics(zeros + 1, zeros > 0, rollout_logprobs=zeros, old_logprobs=zeros + 1) == {}

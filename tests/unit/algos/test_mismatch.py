import math

import pytest
import torch

from megarl.algos.mismatch import MismatchSums, mismatch_sums

# Row 0 has two loss tokens, row 1 one, row 2 none.
MASK = torch.tensor([[True, True, False], [False, True, False], [False, False, False]])
ROLLOUT = torch.tensor([[-1.0, -2.0, 7.0], [7.0, -0.5, 7.0], [7.0, 7.0, 7.0]], dtype=torch.float64)
DELTA = torch.tensor([[1.0, -0.25, 3.0], [9.0, 0.5, 0.0], [4.0, 4.0, 4.0]], dtype=torch.float64)


def k3(delta: float) -> float:
    return math.exp(-delta) + delta - 1


def test_metrics_by_hand() -> None:
    metrics = mismatch_sums(ROLLOUT, ROLLOUT - DELTA, MASK).metrics()
    assert metrics == pytest.approx(
        {
            "mismatch/abs_mean": (1.0 + 0.25 + 0.5) / 3,
            "mismatch/k1": (1.0 - 0.25 + 0.5) / 3,
            "mismatch/k3": (k3(1.0) + k3(-0.25) + k3(0.5)) / 3,
            "mismatch/abs_max": 1.0,
            # Only |Δ| = 1 exceeds ln 2.
            "mismatch/frac_above_2x": 1 / 3,
            # Rows with loss tokens: |1 − 0.25| and |0.5|.
            "mismatch/seq_abs_mean": (0.75 + 0.5) / 2,
        }
    )


def test_merging_parts_gives_the_whole() -> None:
    whole = mismatch_sums(ROLLOUT, ROLLOUT - DELTA, MASK)
    merged = MismatchSums()
    for i in range(3):
        merged = merged.merged(mismatch_sums(ROLLOUT[i : i + 1], (ROLLOUT - DELTA)[i : i + 1], MASK[i : i + 1]))
    assert (merged.num_tokens, merged.num_rows, merged.num_above_2x) == (3, 2, 1)
    assert merged.metrics() == pytest.approx(whole.metrics())


def test_equal_logprobs_do_not_mismatch() -> None:
    assert set(mismatch_sums(ROLLOUT, ROLLOUT.clone(), MASK).metrics().values()) == {0.0}


@pytest.mark.parametrize("shape", [(0, 0), (2, 0), (2, 3)])
def test_nothing_to_compare(shape: tuple[int, int]) -> None:
    ones = torch.ones(shape)
    sums = mismatch_sums(ones, 2 * ones, torch.zeros(shape, dtype=torch.bool))
    assert sums == MismatchSums()
    assert set(sums.metrics().values()) == {0.0}


def test_nan_is_not_hidden_in_either_order_of_merging() -> None:
    bad = ROLLOUT.clone()
    bad[0, 0] = math.nan
    with_nan, clean = mismatch_sums(bad, ROLLOUT, MASK), mismatch_sums(ROLLOUT, ROLLOUT, MASK)
    for merged in (with_nan.merged(clean), clean.merged(with_nan)):
        metrics = merged.metrics()
        assert all(math.isnan(metrics[f"mismatch/{n}"]) for n in ("abs_mean", "k1", "k3", "abs_max"))


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match="expected one shape"):
        mismatch_sums(ROLLOUT, ROLLOUT[:, :2], MASK)


def test_inputs_are_not_mutated() -> None:
    rollout, trainer, mask = ROLLOUT.clone(), ROLLOUT - DELTA, MASK.clone()
    mismatch_sums(rollout, trainer, mask)
    assert torch.equal(rollout, ROLLOUT)
    assert torch.equal(trainer, ROLLOUT - DELTA)
    assert torch.equal(mask, MASK)

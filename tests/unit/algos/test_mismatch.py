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


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match="expected one shape"):
        mismatch_sums(ROLLOUT, ROLLOUT[:, :2], MASK)

"""What is logged of the shaping, by hand."""

import math

import pytest
import torch

from megarl.algos.cpo import CpoInputs, cpo_metrics, shape_advantages
from megarl.config.algo import CpoConfig


def row() -> CpoInputs:
    """MI = d·exp(hint): 2·e^−1 and −1·e^−2; a padded token; λ = 5 clamps the first only."""
    return CpoInputs(
        advantages=torch.tensor([[0.05, 0.01, 9.0]], dtype=torch.float64),
        loss_mask=torch.tensor([[True, True, False]]),
        correct=torch.tensor([True]),
        difficulty=torch.tensor([0]),
        vocab_size=10,
        old_logprobs=torch.tensor([[-3.0, -1.0, math.nan]], dtype=torch.float64),
        hint_logprobs=torch.tensor([[-1.0, -2.0, math.nan]], dtype=torch.float64),
    )


def test_by_hand() -> None:
    x, cfg = row(), CpoConfig(method="mi", mi_alpha=0.1)
    up, down = 2 * math.exp(-1), -math.exp(-2)
    got = cpo_metrics(x.advantages, shape_advantages(x, cfg), x, cfg)
    assert got == pytest.approx(
        {
            "cpo/mi_mean": (up + down) / 2,
            "cpo/mi_std": (up - down) / 2,
            "cpo/mi_min": down,
            "cpo/mi_max": up,
            "cpo/mi_pos_ratio": 0.5,
            "cpo/mi_right": (up + down) / 2,
            "cpo/mi_medium": (up + down) / 2,
            "cpo/delta_mean": 0.5,
            "cpo/delta_std": 1.5,
            "cpo/delta_min": -1.0,
            "cpo/delta_max": 2.0,
            "cpo/delta_pos_ratio": 0.5,
            "cpo/delta_right": 0.5,
            "cpo/delta_medium": 0.5,
            "cpo/ratio_clamped_frac": 0.5,
            "train/mi_mean": (up + down) / 2,
            "cpo/adv_delta_mean": 0.1 * (up + down) / 2,
            "cpo/adv_delta_abs_mean": 0.1 * (up - down) / 2,
            "cpo/adv_delta_right": 0.1 * (up + down) / 2,
            "cpo/adv_delta_medium": 0.1 * (up + down) / 2,
            "cpo/adv_flip_frac": 0.5,  # 0.01 − 0.0135 < 0
            "train/advantage_mean": 0.03 + 0.1 * (up + down) / 2,
        }
    )

"""What is logged of the shaping, by hand."""

import math

import pytest
import torch

from megarl.algos.cpo import CpoInputs, cpo_metrics, shape_advantages, shift_diagnostics
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
            "cpo/ratio_clamped_frac": 0.5,
            "train/mi_mean": (up + down) / 2,
            "cpo/adv_delta_mean": 0.1 * (up + down) / 2,
            "cpo/adv_delta_abs_mean": 0.1 * (up - down) / 2,
            "cpo/adv_flip_frac": 0.5,  # 0.01 − 0.0135 < 0
            "train/advantage_mean": 0.03 + 0.1 * (up + down) / 2,
        }
    )


def test_methods_without_a_hint_and_batches_without_tokens() -> None:
    x = row()
    got = cpo_metrics(x.advantages, x.advantages, x, CpoConfig())
    assert got == {
        "cpo/adv_delta_mean": 0.0,
        "cpo/adv_delta_abs_mean": 0.0,
        "cpo/adv_flip_frac": 0.0,
        "train/advantage_mean": pytest.approx(0.03),
    }
    nothing = CpoInputs(
        advantages=x.advantages,
        loss_mask=torch.zeros(1, 3, dtype=torch.bool),
        correct=x.correct,
        difficulty=x.difficulty,
        vocab_size=10,
        old_logprobs=x.old_logprobs,
        hint_logprobs=x.hint_logprobs,
    )
    assert cpo_metrics(x.advantages, x.advantages, nothing, CpoConfig(method="mi")) == {}


def test_shift_of_every_token() -> None:
    before, after = torch.tensor([[1.0, -1.0, 2.0]]), torch.tensor([[1.5, 0.5, 2.0]])
    assert {name: value.tolist() for name, value in shift_diagnostics(before, after).items()} == {
        "cpo/adv_delta_mean": [[0.5, 1.5, 0.0]],
        "cpo/adv_delta_abs_mean": [[0.5, 1.5, 0.0]],
        "cpo/adv_flip_frac": [[0.0, 1.0, 0.0]],
        "train/advantage_mean": [[1.5, 0.5, 2.0]],
    }

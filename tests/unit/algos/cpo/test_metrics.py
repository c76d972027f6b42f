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


def test_methods_without_a_hint_and_batches_without_tokens() -> None:
    x = row()
    got = cpo_metrics(x.advantages, x.advantages, x, CpoConfig())
    assert got == {
        "cpo/adv_delta_mean": 0.0,
        "cpo/adv_delta_abs_mean": 0.0,
        "cpo/adv_delta_right": 0.0,
        "cpo/adv_delta_medium": 0.0,
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


def two_rows(**quantities: torch.Tensor) -> CpoInputs:
    """A right and easy row, and a wrong and hard one: d = 2, −1 and 0.1, 3."""
    old = torch.full((2, 2), -3.0, dtype=torch.float64)
    return CpoInputs(
        advantages=torch.tensor([[1.0, 1.0], [-1.0, -1.0]], dtype=torch.float64),
        loss_mask=torch.ones(2, 2, dtype=torch.bool),
        correct=torch.tensor([True, False]),
        difficulty=torch.tensor([1, -1]),
        vocab_size=10,
        old_logprobs=old,
        hint_logprobs=old + torch.tensor([[2.0, -1.0], [0.1, 3.0]]),
        **quantities,
    )


def test_the_recommended_method_logs_what_it_uses() -> None:
    """Weights e^2, e^−1, e^−0.1 and e^−3: within 1 ± 0.2 is the third alone. No mutual information is read."""
    x, cfg = two_rows(), CpoConfig(method="verifier_sign", weight_clip=0.2)
    got = cpo_metrics(x.advantages, shape_advantages(x, cfg), x, cfg)
    assert got["cpo/weight_clipped_frac"] == pytest.approx(0.75)
    assert got["cpo/delta_mean"] == pytest.approx(4.1 / 4)
    assert not [name for name in got if "mi_" in name]


def test_signals_and_changes_by_verdict_and_difficulty() -> None:
    x, cfg = two_rows(), CpoConfig(method="mi", mi_estimator="pmi", mi_alpha=0.1)
    got = cpo_metrics(x.advantages, shape_advantages(x, cfg), x, cfg)
    for rows, mean in (("right", 0.5), ("easy", 0.5), ("wrong", 1.55), ("hard", 1.55)):
        assert got[f"cpo/delta_{rows}"] == got[f"cpo/mi_{rows}"] == pytest.approx(mean)
        assert got[f"cpo/adv_delta_{rows}"] == pytest.approx(0.1 * mean)
    assert "cpo/mi_medium" not in got


def test_a_shuffled_hint_has_a_mean_of_its_own() -> None:
    """Another prompt's hint changes log-probs by 0.5 everywhere; the row's d is what its own adds to that."""
    x = two_rows(shuffled_hint_logprobs=torch.full((2, 2), -2.5, dtype=torch.float64))
    got = cpo_metrics(x.advantages, x.advantages, x, CpoConfig(method="verifier_sign", shuffled_baseline=True))
    assert got["cpo/shuffled_mi_mean"] == pytest.approx(0.5)
    assert got["cpo/delta_mean"] == pytest.approx(4.1 / 4 - 0.5)

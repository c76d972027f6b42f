"""Estimators of what a hint tells."""

import math
from typing import Any

import pytest
import torch

from megarl.algos.cpo import CpoInputs
from megarl.algos.cpo.factors import clamped_ratio
from megarl.algos.cpo.information import MI_ESTIMATORS
from megarl.algos.cpo.shaping import terms_of
from megarl.config.algo import CpoConfig


def test_golden(golden: Any, check_golden: Any) -> None:
    case = golden("A.mi_terms")
    old, hint = (torch.tensor(case["inputs"][k], dtype=torch.float64) for k in ("lp", "lp_hint"))
    for key, name in {"mi": "p_weighted", "pmi": "pmi", "kl_is": "kl_is"}.items():
        check_golden(MI_ESTIMATORS.get(name).of(hint - old, hint, None), case["expected"][key], case)
    ones = torch.ones(1, 3, dtype=torch.float64)
    x = CpoInputs(
        advantages=ones,
        loss_mask=ones.bool(),
        correct=torch.tensor([True]),
        difficulty=torch.tensor([0]),
        vocab_size=10,
        old_logprobs=old[None],
        hint_logprobs=hint[None],
    )
    terms = terms_of(x, CpoConfig(method="mi", ratio_clamp=case["params"]["cpo_lambda"]))
    check_golden(terms.mi[0], case["expected"]["mi"], case)
    check_golden(clamped_ratio(terms.delta, terms.cfg.ratio_clamp)[0], case["expected"]["clamped_ratio"], case)


@pytest.mark.parametrize(
    ("name", "expected"),
    # d = 14.99 counts as 10, in exp(d)·d as ln 5; p_weighted takes it as it is.
    [("p_weighted", 14.99 * math.exp(-0.01)), ("pmi", 10.0), ("kl_is", 5 * math.log(5))],
)
def test_far_tokens_are_bounded_but_in_the_described_estimator(name: Any, expected: float) -> None:
    x = CpoInputs(
        advantages=torch.zeros(1, 1, dtype=torch.float64),
        loss_mask=torch.ones(1, 1, dtype=torch.bool),
        correct=torch.tensor([True]),
        difficulty=torch.tensor([0]),
        vocab_size=10,
        old_logprobs=torch.tensor([[-15.0]], dtype=torch.float64),
        hint_logprobs=torch.tensor([[-0.01]], dtype=torch.float64),
    )
    assert terms_of(x, CpoConfig(method="mi", mi_estimator=name)).mi.item() == pytest.approx(expected)


def test_kl_is_is_unbiased_over_a_vocabulary() -> None:
    """Σ_v π(v)·exp(d_v)·d_v = KL(π_hint ‖ π), term by term of its definition."""
    policy = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    hinted = torch.tensor([0.6, 0.1, 0.3], dtype=torch.float64).log()
    got = (policy.exp() * MI_ESTIMATORS.get("kl_is").of(hinted - policy, hinted, None)).sum()
    by_hand = 0.6 * math.log(0.6 / 0.5) + 0.1 * math.log(0.1 / 0.3) + 0.3 * math.log(0.3 / 0.2)
    assert got.item() == pytest.approx(by_hand)

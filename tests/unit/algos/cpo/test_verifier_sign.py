"""The verifier gives the sign, the hint the magnitude."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megarl.algos.cpo import CpoInputs, shape_advantages
from megarl.config.algo import CpoConfig

CFG = CpoConfig(method="verifier_sign", weight_clip=0.2)


def f64(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def inputs(advantages: Any, delta: Any, mask: Any = None, **further: Any) -> CpoInputs:
    adv, d = f64(advantages), f64(delta)
    return CpoInputs(
        advantages=adv,
        loss_mask=torch.ones_like(adv).bool() if mask is None else torch.tensor(mask),
        correct=torch.ones(len(adv), dtype=torch.bool),
        difficulty=torch.zeros(len(adv), dtype=torch.long),
        vocab_size=10,
        old_logprobs=f64(torch.full_like(adv, -5.0).tolist()),
        hint_logprobs=-5 + d,
        **further,
    )


def test_by_hand() -> None:
    """A = 2: weights clip(e^0.1, .8, 1.2), 1.2, 0.8 with sum 3.1052, scaled to 3. A < 0: d counts the other way."""
    w = [math.exp(0.1), 1.2, 0.8]
    scale = 3 / sum(w)
    delta = [0.1, 3.0, -3.0]
    got = shape_advantages(inputs([[2.0] * 3, [-2.0] * 3], [delta, [-d for d in delta]]), CFG)
    assert got[0].tolist() == pytest.approx([2 * scale * v for v in w])
    assert got[1].tolist() == pytest.approx([-2 * scale * v for v in w])


def test_share_of_the_weights() -> None:
    x = inputs([[1.0, 1.0]], [[1.0, -1.0]])
    assert shape_advantages(x, CFG)[0].tolist() == pytest.approx([1.2, 0.8])
    assert shape_advantages(x, replace(CFG, mix=0.5))[0].tolist() == pytest.approx([1.1, 0.9])
    assert shape_advantages(x, replace(CFG, mix=0.0))[0].tolist() == [1.0, 1.0]


def test_the_share_decays_to_zero() -> None:
    cfg = replace(CFG, mix=0.8, mix_decay_steps=4)

    def mix(cfg: CpoConfig, step: int) -> float:
        """The whole weight is 1.2, so the share of it is (A' − 1) / 0.2."""
        return (shape_advantages(inputs([[1.0, 1.0]], [[1.0, -1.0]], step=step), cfg)[0, 0].item() - 1) / 0.2

    assert [mix(cfg, step) for step in range(6)] == pytest.approx([0.8, 0.6, 0.4, 0.2, 0.0, 0.0])
    assert mix(replace(CFG, mix=0.8), 1000) == mix(cfg, 0)
    x = inputs([[1.0, 1.0]], [[1.0, -1.0]], step=4)
    assert shape_advantages(x, cfg)[0].tolist() == [1.0, 1.0]


def test_what_any_hint_changes_counts_for_nothing() -> None:
    """With the baseline, a hint that acts like another prompt's is no hint."""
    x = inputs([[1.0, 1.0]], [[1.0, -1.0]])
    x = replace(x, shuffled_hint_logprobs=x.hint_logprobs)
    cfg = replace(CFG, shuffled_baseline=True)
    assert shape_advantages(x, cfg)[0].tolist() == [1.0, 1.0]
    half = replace(x, shuffled_hint_logprobs=x.hint_logprobs - f64([[0.1, -0.1]]))
    w = [math.exp(0.1), math.exp(-0.1)]
    assert shape_advantages(half, cfg)[0].tolist() == pytest.approx([2 * v / sum(w) for v in w])


def test_the_answer_is_left_out() -> None:
    """The last token keeps its advantage; the others share theirs."""
    x = inputs([[1.0] * 3], [[1.0, -1.0, 9.0]], excluded=torch.tensor([[False, False, True]]))
    assert shape_advantages(x, CFG)[0].tolist() == pytest.approx([1.2, 0.8, 1.0])


@given(
    st.floats(-3, 3),
    st.lists(st.tuples(st.floats(-30, 30), st.booleans()), min_size=1, max_size=8),
    st.floats(0.01, 0.9),
    st.floats(0, 1),
)
def test_signs_and_row_sums_stay(advantage: float, tokens: list[tuple[float, bool]], clip: float, mix: float) -> None:
    delta, mask = [d for d, _ in tokens], [m for _, m in tokens]
    x = inputs([[advantage] * len(tokens)], [delta], [mask])
    got = shape_advantages(x, replace(CFG, weight_clip=clip, mix=mix))
    assert got.sum().item() == pytest.approx(advantage * sum(mask), abs=1e-9)
    assert torch.equal(got[x.loss_mask].sign(), x.advantages[x.loss_mask].sign())
    # Weights in [1 − c, 1 + c] over their mean stay within (1 + c)/(1 − c) of 1.
    most = abs(advantage) * (1 + clip) / (1 - clip)
    assert (got.abs() <= most + 1e-9).all()

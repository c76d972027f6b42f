"""What every method keeps to, whatever its formula."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megarl.algos.cpo import CpoInputs, required_quantities, shape_advantages
from megarl.algos.cpo.methods import CPO_METHODS
from megarl.config.algo import CpoConfig
from megarl.errors import NonFiniteError

CONFIGS = [
    CpoConfig(method=name, formula_set=formula_set)
    for name in CPO_METHODS
    if name.endswith("_qwen3") or f"{name}_qwen3" not in CPO_METHODS or name == "naive"
    for formula_set in CPO_METHODS.get(name).formulas
]
configs = st.sampled_from(CONFIGS)
PER_TOKEN = ("advantages", "old_logprobs", "hint_logprobs", "shuffled_hint_logprobs", "hint_kl", "entropy")
PER_ROW = ("correct", "difficulty")


@st.composite
def inputs(draw: st.DrawFn, dtype: torch.dtype = torch.float64) -> CpoInputs:
    """Rows of random lengths, some empty; advantages constant over a row, as group estimators give them."""
    rows, width = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def uniform(low: float, high: float) -> Tensor:
        return (low + (high - low) * torch.rand(rows, width, generator=g, dtype=torch.float64)).to(dtype)

    lengths = torch.randint(0, width + 1, (rows, 1), generator=g)
    difficulty = torch.randint(-1, 2, (rows,), generator=g)
    mixed = torch.rand(rows, generator=g) < 0.5
    return CpoInputs(
        advantages=uniform(-1, 1)[:, :1].expand(rows, width).clone(),
        loss_mask=torch.arange(width) < lengths,
        correct=(difficulty == 1) | ((difficulty == 0) & mixed),
        difficulty=difficulty,
        vocab_size=50,
        old_logprobs=uniform(-4, 0),
        hint_logprobs=uniform(-4, 0),
        shuffled_hint_logprobs=uniform(-4, 0),
        hint_kl=uniform(0, 2),
        entropy=uniform(0, math.log(50)),
        excluded=torch.rand(rows, width, generator=g) < 0.2,
    )


def changed(x: CpoInputs, **change: Any) -> CpoInputs:
    return replace(x, **change)


def select(x: CpoInputs, rows: list[int]) -> CpoInputs:
    picked = {name: getattr(x, name)[rows] for name in (*PER_TOKEN, *PER_ROW, "excluded", "loss_mask")}
    return changed(x, **picked)


@given(inputs(), configs, st.randoms())
def test_rows_do_not_touch_each_other(x: CpoInputs, cfg: CpoConfig, random: Any) -> None:
    """Permutations, and micro-batches of any size, give the same rows."""
    whole = shape_advantages(x, cfg)
    order = list(range(len(x.loss_mask)))
    random.shuffle(order)
    assert torch.equal(shape_advantages(select(x, order), cfg), whole[order])
    for row in order:
        assert torch.equal(shape_advantages(select(x, [row]), cfg), whole[[row]])


@given(inputs(), configs)
def test_what_lies_outside_the_mask_is_unread_and_zero(x: CpoInputs, cfg: CpoConfig) -> None:
    got = shape_advantages(x, cfg)
    assert (got[~x.loss_mask] == 0).all()
    poisoned = {name: torch.where(x.loss_mask, getattr(x, name), math.nan) for name in PER_TOKEN}
    assert torch.equal(shape_advantages(changed(x, **poisoned), cfg), got)
    wider = {name: torch.nn.functional.pad(getattr(x, name), (0, 3), value=math.nan) for name in PER_TOKEN}
    wider |= {name: torch.nn.functional.pad(getattr(x, name), (0, 3)) for name in ("loss_mask", "excluded")}
    padded = shape_advantages(changed(x, **wider), cfg)
    torch.testing.assert_close(padded[:, : got.shape[1]], got, atol=1e-12, rtol=0)


@given(inputs(), configs)
def test_excluded_tokens_keep_their_advantage(x: CpoInputs, cfg: CpoConfig) -> None:
    kept = x.loss_mask & ~x.active
    assert torch.equal(shape_advantages(x, cfg)[kept], x.advantages[kept])


def test_missing_and_broken_quantities_have_a_message(golden: Any, golden_inputs: Any) -> None:
    x = golden_inputs(golden("A.wrap.ref.mi3_qwen3"))
    cfg = CpoConfig(method="mi3")
    assert required_quantities(cfg)
    with pytest.raises(ValueError, match=r"got no entropy, which the method uses; see required_quantities\(\)"):
        shape_advantages(changed(x, entropy=None), cfg)
    broken = x.hint_logprobs.clone()
    broken[3, 1] = math.nan
    with pytest.raises(NonFiniteError, match="hint_logprobs of row 3 is not finite"):
        shape_advantages(changed(x, hint_logprobs=broken), cfg)
    with pytest.raises(ValueError, match=r"hint_logprobs has shape \(6, 3\), expected \(6, 4\)"):
        changed(x, hint_logprobs=x.hint_logprobs[:, :3])

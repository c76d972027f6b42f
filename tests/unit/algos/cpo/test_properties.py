"""What every method keeps to, whatever its formula."""

import copy
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
def test_inputs_are_never_changed(x: CpoInputs, cfg: CpoConfig) -> None:
    before = copy.deepcopy(x)
    first = shape_advantages(x, cfg)
    for name in (*PER_TOKEN, *PER_ROW, "excluded", "loss_mask"):
        assert torch.equal(getattr(x, name), getattr(before, name))
    assert torch.equal(shape_advantages(x, cfg), first)


@given(inputs(), configs)
def test_excluded_tokens_keep_their_advantage(x: CpoInputs, cfg: CpoConfig) -> None:
    kept = x.loss_mask & ~x.active
    assert torch.equal(shape_advantages(x, cfg)[kept], x.advantages[kept])


# Methods that clamp to the verifier's sign, in the formula sets that do.
CLAMPED = {
    "naive_qwen3": ("ref",),
    "mi_qwen3": ("ref",),
    "noaccmask_qwen3": ("ref", "fix"),
    "mi_accmask_qwen3": ("ref", "fix"),
    "mi_unify_qwen3": ("ref", "fix"),
    "mi_clamp_unify_qwen3": ("ref", "fix"),
}
BY_DIFFICULTY = (("naive", "doc"), ("naive_qwen3", "doc"), ("naive_qwen3", "fix"))


@given(inputs(), configs.filter(lambda cfg: (cfg.method, cfg.formula_set) not in BY_DIFFICULTY))
def test_an_empty_hint_is_no_hint(x: CpoInputs, cfg: CpoConfig) -> None:
    """Equal log-probs are d = 0: without the bonus on uncertain tokens of correct rows (pos_alpha) only the clamp is
    left, by every way to measure what the hint changes."""
    empty = changed(
        x, hint_logprobs=x.old_logprobs, shuffled_hint_logprobs=x.old_logprobs, hint_kl=torch.zeros_like(x.advantages)
    )
    without = replace(cfg, pos_alpha=0.0)
    got = shape_advantages(empty, without)
    for further in ({"shuffled_baseline": True}, {"mi_estimator": "full_kl"}):
        assert torch.equal(shape_advantages(empty, replace(without, **further)), got)
    expected = torch.where(x.loss_mask, x.advantages, 0.0)
    if cfg.formula_set in CLAMPED.get(cfg.method, ()):
        clamped = torch.where(x.correct[:, None], expected.clamp(min=0), expected.clamp(max=0))
        expected = torch.where(x.active, clamped, expected)
    torch.testing.assert_close(got, expected, atol=1e-12, rtol=0)


@given(inputs(dtype=torch.float32), configs)
def test_float32_is_kept_and_close_to_float64(x: CpoInputs, cfg: CpoConfig) -> None:
    got = shape_advantages(x, cfg)
    assert got.dtype == torch.float32
    wide = changed(x, **{name: getattr(x, name).double() for name in PER_TOKEN})
    torch.testing.assert_close(got.double(), shape_advantages(wide, cfg), atol=1e-5, rtol=1e-5)


def test_nothing_to_shape() -> None:
    empty = torch.zeros(0, 0)
    for shape in ((0, 0), (2, 0)):
        empty = torch.zeros(shape)
        rows = torch.zeros(shape[0])
        x = CpoInputs(
            advantages=empty,
            loss_mask=empty.bool(),
            correct=rows.bool(),
            difficulty=rows.long(),
            vocab_size=5,
            old_logprobs=empty,
            hint_logprobs=empty,
            entropy=empty,
        )
        for cfg in CONFIGS:
            assert shape_advantages(x, cfg).shape == shape


def test_identity() -> None:
    mask = torch.tensor([[True, True, False]])
    x = CpoInputs(
        advantages=torch.tensor([[1.0, -2.0, math.nan]]),
        loss_mask=mask,
        correct=torch.tensor([False]),
        difficulty=torch.tensor([-1]),
        vocab_size=5,
    )
    assert shape_advantages(x, CpoConfig()).tolist() == [[1.0, -2.0, 0.0]]


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

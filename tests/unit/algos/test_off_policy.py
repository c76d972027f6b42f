"""LUFFY's loss: golden cases, the identity with GRPO, and what lies outside the masks."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megarl.algos.aggregation import AGGREGATIONS, RowCounts, global_denominator
from megarl.algos.masked import masked_sum
from megarl.algos.mixed_groups import kept_tokens
from megarl.algos.off_policy import MixedLossTerms, count_mixed, imitation_masks, luffy_loss
from megarl.algos.policy_losses import PolicyLossInputs, ppo_clip
from megarl.config.algo import OffPolicyConfig, PolicyLossConfig
from megarl.types import Row

LOSS_CASES = [
    *("off_no_reshape", "off_logp", "off_p_logp", "off_square_root", "off_pow"),
    *("off_p_div_p_0.1", "off_p_div_p_0.3", "off_p_div_p_0.5"),
    *("on_logp", "on_p_logp", "on_square_root", "on_pow", "on_p_div_p_0.1", "on_p_div_p_0.5"),
    *("ub_default1.0", "off_max_clip0.5", "off_min_clip0.8", "all_max_clip0.7"),
    *("remove_token_mean", "remove_clip", "luffy_paper"),
]
NO_DUAL = PolicyLossConfig(dual_clip=None)


def inputs_of(case: dict[str, Any]) -> tuple[PolicyLossInputs, Tensor]:
    values = case["inputs"]
    logprobs, old, advantages = (
        torch.tensor(values[n], dtype=torch.float64, requires_grad=n == "logp") for n in ("logp", "old_logp", "adv")
    )
    mask = torch.tensor(values["response_mask"]).bool()
    x = PolicyLossInputs(logprobs=logprobs, old_logprobs=old, advantages=advantages, loss_mask=mask)
    return x, torch.tensor(values["prefix_mask"])


def config_of(params: dict[str, Any]) -> OffPolicyConfig:
    return OffPolicyConfig(
        loss="luffy",
        reshape=params["off_policy_reshape"],
        reshape_weight=params["off_policy_reshape_weight"],
        reshape_exponent=params["off_policy_reshape_pow_exp"],
        on_policy_reshape=params["on_policy_reshape"],
        on_policy_reshape_weight=params["on_policy_reshape_weight"],
        on_policy_reshape_exponent=params["on_policy_reshape_pow_exp"],
        max_clip=params.get("off_policy_max_clip"),
        min_clip=params.get("off_policy_min_clip"),
        drop_above=params.get("all_max_clip"),
        clip_upper_bound=params["clip_upper_bound"],
        remove_clip=params.get("loss_remove_clip", False),
    )


def mean(value: Tensor, mask: Tensor) -> Tensor:
    return masked_sum(value, mask) / mask.sum().clamp(min=1)


@pytest.mark.parametrize("name", LOSS_CASES)
def test_golden(name: str, golden: Any, check_golden: Any) -> None:
    case = golden(f"E.loss.{name}")
    params, expected = case["params"], case["expected"]
    x, demonstration = inputs_of(case)
    cfg = config_of(params)
    clip = PolicyLossConfig(clip_low=params["clip_ratio"], clip_high=params["clip_ratio"], dual_clip=None)
    terms = luffy_loss(x, demonstration, cfg, clip)
    kept = x.loss_mask if cfg.drop_above is None else kept_tokens(x.old_logprobs, x.loss_mask, cfg.drop_above)
    # The public code divides by the width of its micro-batch here, and not by its rows.
    name = "seq-mean-token-sum-norm" if params.get("loss_remove_token_mean") else "token-mean"
    aggregation = AGGREGATIONS.get(name)
    counts = RowCounts(num_rows=len(kept), num_tokens=int(kept.sum()))
    denominator = global_denominator(aggregation, counts, horizon_tokens=kept.shape[1])
    check_golden(aggregation.local_sum(terms.loss, kept) / denominator, expected["pg_loss"], case)
    off_loss = mean(terms.demonstration["actor/off_pg_loss"], x.loss_mask & demonstration)
    check_golden(off_loss, expected["off_pg_loss"], case)
    on_loss = mean(terms.policy["actor/on_pg_loss"], x.loss_mask & ~demonstration)
    check_golden(on_loss, expected["on_pg_loss"], case)


def test_the_layout_invariant_scale_of_remove_token_mean(golden: Any) -> None:
    # Σ / (width · rows) over both rows is the mean of the two single rows' Σ / width.
    case = golden("E.loss.remove_token_mean")
    x, demonstration = inputs_of(case)
    terms = luffy_loss(x, demonstration, config_of(case["params"]), NO_DUAL)
    aggregation = AGGREGATIONS.get("dr_grpo")
    denominator = global_denominator(aggregation, RowCounts(num_rows=2, num_tokens=7), horizon_tokens=4)
    loss = aggregation.local_sum(terms.loss, x.loss_mask) / denominator
    assert loss.item() == pytest.approx(case["expected"]["pg_loss"] / 2, abs=1e-9)


def one_row(
    logprobs: list[float], old: list[float], advantages: list[float], demonstration: list[bool], **cfg: Any
) -> tuple[MixedLossTerms, Tensor]:
    leaf = torch.tensor([logprobs], dtype=torch.float64, requires_grad=True)
    x = PolicyLossInputs(
        logprobs=leaf,
        old_logprobs=torch.tensor([old], dtype=torch.float64),
        advantages=torch.tensor([advantages], dtype=torch.float64),
        loss_mask=torch.ones(1, len(old), dtype=torch.bool),
    )
    probs = cfg.pop("target_probs_of_tokens", None)
    target_probs = None if probs is None else torch.tensor([probs], dtype=torch.float64)
    terms = luffy_loss(x, torch.tensor([demonstration]), OffPolicyConfig(**cfg), NO_DUAL, target_probs)
    return terms, leaf


def test_target_probs_golden(golden: Any, check_golden: Any) -> None:
    case = golden("E.loss.target_probs")
    terms, _ = one_row(
        case["inputs"]["logp"],
        [0.0, 0.0],
        [1.0, 1.0],
        [True, True],
        target_probs_of_tokens=case["inputs"]["target_probs"],
    )
    check_golden(terms.demonstration["actor/off_ratio"][0], case["expected"], case)


def test_unknown_target_probs_fall_back_to_the_reshape() -> None:
    # P = 1/2: divided by 1/4 it is 2 (up to the 1e-6), reshaped by √ it is 0.707.
    terms, _ = one_row(
        [-math.log(2)] * 2, [0.0] * 2, [1.0] * 2, [True] * 2, reshape="square_root", target_probs_of_tokens=[0.25, -1.0]
    )
    assert terms.demonstration["actor/off_ratio"][0].tolist() == pytest.approx([2.0, math.sqrt(0.5)], rel=1e-5)


def test_loss_gradient_and_clips_by_hand() -> None:
    # Demonstration tokens of P = 1/2, 1/8, 1/2 (A = 1, 1, −2), f = P within [1/4, 1]: the second is raised to 1/4 and
    # has no gradient. Then a policy token of ratio 2 (A = −1), with the upper clip at 100.
    ln2 = math.log(2)
    terms, leaf = one_row(
        [-ln2, -3 * ln2, -ln2, ln2 - 1],
        [-5.0, -5.0, -5.0, -1.0],
        [1.0, 1.0, -2.0, -1.0],
        [True, True, True, False],
        reshape="no_reshape",
        min_clip=0.25,
        max_clip=1.0,
    )
    assert terms.loss[0].tolist() == pytest.approx([-0.5, -0.25, 1.0, 2.0])
    terms.loss.sum().backward()
    assert leaf.grad is not None
    assert leaf.grad[0].tolist() == pytest.approx([-0.5, 0.0, 1.0, 2.0])
    assert terms.demonstration["actor/off_clipfrac"][0, :3].tolist() == [0, 1, 0]
    assert terms.policy["actor/pg_clipfrac"][0, 3].item() == 0
    assert terms.policy["actor/ppo_kl"][0, 3].item() == pytest.approx(-ln2)
    assert not any(v.requires_grad for v in (*terms.policy.values(), *terms.demonstration.values()))


def test_remove_clip_also_removes_the_dual_clip() -> None:
    x = PolicyLossInputs(
        logprobs=torch.tensor([[0.0, -3.0]], dtype=torch.float64),
        old_logprobs=torch.tensor([[-3.0, 0.0]], dtype=torch.float64),
        advantages=torch.tensor([[-1.0, -1.0]], dtype=torch.float64),
        loss_mask=torch.ones(1, 2, dtype=torch.bool),
    )
    terms = luffy_loss(x, torch.zeros(1, 2, dtype=torch.bool), OffPolicyConfig(remove_clip=True), PolicyLossConfig())
    assert terms.loss[0].tolist() == pytest.approx([math.exp(3), math.exp(-3)])


def test_correction_weighs_policy_tokens_only() -> None:
    x = PolicyLossInputs(
        logprobs=torch.zeros(1, 2, dtype=torch.float64),
        old_logprobs=torch.zeros(1, 2, dtype=torch.float64),
        advantages=torch.ones(1, 2, dtype=torch.float64),
        loss_mask=torch.ones(1, 2, dtype=torch.bool),
        correction=torch.full((1, 2), 0.5, dtype=torch.float64),
    )
    terms = luffy_loss(x, torch.tensor([[True, False]]), OffPolicyConfig(reshape="no_reshape"), NO_DUAL)
    assert terms.loss[0].tolist() == [-1.0, -0.5]


numbers = st.floats(-3, 0, allow_nan=False, width=32)
shapes = st.tuples(st.integers(1, 3), st.integers(1, 4))


@st.composite
def batches(draw: st.DrawFn) -> tuple[PolicyLossInputs, Tensor]:
    b, t = draw(shapes)

    def array(elements: Any) -> list[list[Any]]:
        return [[draw(elements) for _ in range(t)] for _ in range(b)]

    x = PolicyLossInputs(
        logprobs=torch.tensor(array(numbers), dtype=torch.float64),
        old_logprobs=torch.tensor(array(numbers), dtype=torch.float64),
        advantages=torch.tensor(array(st.floats(-2, 2, width=32)), dtype=torch.float64),
        loss_mask=torch.tensor(array(st.booleans())),
    )
    return x, torch.tensor(array(st.booleans()))


def gradient(x: PolicyLossInputs, demonstration: Tensor, cfg: OffPolicyConfig) -> tuple[Tensor, Tensor]:
    leaf = x.logprobs.clone().requires_grad_()
    loss = masked_sum(luffy_loss(replace(x, logprobs=leaf), demonstration, cfg, PolicyLossConfig()).loss, x.loss_mask)
    loss.backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


@given(batches())
def test_without_demonstrations_it_is_grpo(batch: tuple[PolicyLossInputs, Tensor]) -> None:
    x, _ = batch
    cfg = OffPolicyConfig(loss="luffy", clip_upper_bound=1.0)
    loss, grad = gradient(x, torch.zeros_like(x.loss_mask), cfg)
    leaf = x.logprobs.clone().requires_grad_()
    expected = masked_sum(ppo_clip(replace(x, logprobs=leaf), PolicyLossConfig()).loss, x.loss_mask)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=0)
    torch.testing.assert_close(grad, leaf.grad, rtol=0, atol=0)


@given(batches(), st.sampled_from(["no_reshape", "p_logp", "pow", "p_div_p_0.1"]))
def test_nothing_outside_the_masks_is_read(batch: tuple[PolicyLossInputs, Tensor], name: str) -> None:
    x, demonstration = batch
    cfg = OffPolicyConfig(reshape=name, on_policy_reshape=name)
    loss, grad = gradient(x, demonstration, cfg)
    outside = ~x.loss_mask
    spoiled = replace(
        x,
        logprobs=x.logprobs.masked_fill(outside, math.nan),
        advantages=x.advantages.masked_fill(outside, math.nan),
        # Demonstration tokens have no old policy either.
        old_logprobs=x.old_logprobs.masked_fill(outside | demonstration, math.nan),
    )
    loss_2, grad_2 = gradient(spoiled, demonstration, cfg)
    torch.testing.assert_close(loss_2, loss, rtol=0, atol=0)
    torch.testing.assert_close(grad_2, grad, rtol=0, atol=0)


@given(batches(), st.randoms(use_true_random=False))
def test_rows_may_be_permuted_and_padded(batch: tuple[PolicyLossInputs, Tensor], rng: Any) -> None:
    x, demonstration = batch
    cfg = OffPolicyConfig()
    loss = luffy_loss(x, demonstration, cfg, NO_DUAL).loss
    order = list(range(len(loss)))
    rng.shuffle(order)

    def moved(value: Tensor) -> Tensor:
        return torch.nn.functional.pad(value[order], (0, 2))

    fields = {n: moved(getattr(x, n)) for n in ("logprobs", "old_logprobs", "advantages", "loss_mask")}
    got = luffy_loss(PolicyLossInputs(**fields), moved(demonstration), cfg, NO_DUAL).loss
    mask = x.loss_mask[order]
    torch.testing.assert_close(got[:, :-2][mask], loss[order][mask], rtol=0, atol=0)


def test_nan_inside_the_mask_is_not_hidden() -> None:
    terms, _ = one_row([math.nan, math.nan], [-1.0, -1.0], [1.0, 1.0], [True, False])
    assert terms.loss.isnan().all()


def test_float32_stays_float32() -> None:
    ones = torch.ones(1, 2)
    x = PolicyLossInputs(logprobs=-ones, old_logprobs=-ones, advantages=ones, loss_mask=ones.bool())
    terms = luffy_loss(x, torch.tensor([[True, False]]), OffPolicyConfig(), NO_DUAL)
    assert terms.loss.dtype is torch.float32
    # −P / (P + 1/2) with P = 1/e, and −1.
    assert terms.loss[0].tolist() == pytest.approx([-1 / (1 + 0.5 * math.e), -1.0], rel=1e-6)


def test_imitation_golden(golden: Any, check_golden: Any) -> None:
    case = golden("E.sft")
    logprobs = torch.tensor([case["inputs"]["off_logp"]], dtype=torch.float64)
    ones = torch.ones_like(logprobs, dtype=torch.bool)
    imitated = imitation_masks(ones, ones, "demonstration").imitated
    sft = mean(-logprobs, imitated)
    loss = case["inputs"]["pg_loss"] + case["params"]["sft_loss_coef"] * sft
    check_golden(loss, case["expected"], case)


def test_imitation_splits_rows() -> None:
    loss_mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]]).bool()
    demonstration = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 1]]).bool()
    masks = imitation_masks(loss_mask, demonstration, "demonstration")
    # The mark in the second row lies outside the loss mask.
    assert masks.policy.tolist() == [[False] * 4, [True, True, False, False]]
    assert masks.imitated.tolist() == [[True, True, False, False], [False] * 4]
    assert imitation_masks(loss_mask, demonstration, "row").imitated.tolist()[0] == [True, True, True, False]


def row(loss_mask: list[bool], demonstration: list[float] | None) -> Row:
    quantities = {} if demonstration is None else {"demonstration": np.asarray(demonstration, np.float32)}
    return Row(
        uid="q",
        sample_index=0,
        token_ids=np.zeros(len(loss_mask) + 1, np.int64),
        num_prompt_tokens=1,
        loss_mask=np.asarray(loss_mask),
        quantities=quantities,
    )


@pytest.mark.parametrize(
    ("cfg", "seen", "num_imitated"),
    [
        (OffPolicyConfig(loss="luffy"), RowCounts(num_rows=3, num_tokens=7), 0),
        (OffPolicyConfig(loss="sft"), RowCounts(num_rows=2, num_tokens=4), 2),
        (OffPolicyConfig(loss="sft", sft_tokens="row"), RowCounts(num_rows=2, num_tokens=4), 3),
    ],
)
def test_counts(cfg: OffPolicyConfig, seen: RowCounts, num_imitated: int) -> None:
    # The last token of the second row has no loss, though it is of a demonstration; the third row carries no marks.
    rows = [
        row([True] * 3, [1.0, 1.0, 0.0]),
        row([True, True, False], [0.0, 0.0, 1.0]),
        row([True, True], None),
    ]
    counts = count_mixed(rows, cfg)
    assert counts.policy_loss == seen
    assert (counts.num_policy_tokens, counts.num_demonstration_tokens) == (5, 2)
    assert counts.num_imitated_tokens == num_imitated
    assert count_mixed([], cfg).policy_loss == RowCounts(num_rows=0, num_tokens=0)

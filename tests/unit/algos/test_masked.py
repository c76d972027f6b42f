import math

import pytest
import torch

from megarl.algos.masked import group_stats, masked_sum, row_means, token_summary

MASK = torch.tensor([[True, True, False], [False, False, False]])


def test_sums_and_means_over_the_mask_only() -> None:
    values = torch.tensor([[1.0, 3.0, 100.0], [7.0, 8.0, 9.0]])
    assert masked_sum(values, MASK).item() == 4.0
    assert masked_sum(values, MASK, dim=-1).tolist() == [4.0, 0.0]
    assert row_means(values, MASK).tolist() == [2.0, 0.0]


def test_nan_outside_the_mask_is_unread_and_inside_is_kept() -> None:
    outside = torch.tensor([[1.0, 3.0, math.nan], [math.nan] * 3], requires_grad=True)
    total = masked_sum(outside, MASK)
    total.backward()
    assert total.item() == 4.0
    assert outside.grad is not None
    assert outside.grad.tolist() == [[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]
    assert masked_sum(torch.tensor([[1.0, math.nan, 0.0], [0.0] * 3]), MASK).isnan()


def test_group_stats_follow_uids_not_positions() -> None:
    stats = group_stats(torch.tensor([1.0, 10.0, 3.0, 5.0]), ["a", "b", "a", "a"])
    assert stats.size.tolist() == [3, 1, 3, 3]
    assert stats.mean.tolist() == [3.0, 10.0, 3.0, 3.0]
    # Values 1, 3, 5: variance (4 + 0 + 4) / 2.
    assert stats.std.tolist() == [2.0, 0.0, 2.0, 2.0]


def test_equal_float32_values_have_no_spread() -> None:
    stats = group_stats(torch.full((7,), 0.1, dtype=torch.float32), ["a"] * 7)
    assert stats.std.max().item() == pytest.approx(0.0, abs=1e-15)


def test_tokens_are_summed_up_in_blocks_without_loss() -> None:
    """More rows than a block holds, some without tokens, against torch on all tokens at once."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(300, 1000, generator=generator) + 100
    mask = torch.rand(300, 1000, generator=generator) < 0.3
    mask[:70] = False
    inside = values[mask].double()
    got = token_summary("x", values, mask)
    assert got["x/mean"] == pytest.approx(inside.mean().item(), rel=1e-12)
    assert got["x/std"] == pytest.approx(inside.std(correction=0).item(), rel=1e-9)
    assert (got["x/max"], got["x/min"]) == (inside.max().item(), inside.min().item())
    assert token_summary("x", torch.full((3, 2), 0.1), MASK.new_ones(3, 2))["x/std"] == 0.0
    assert token_summary("x", values, torch.zeros_like(mask)) == {}

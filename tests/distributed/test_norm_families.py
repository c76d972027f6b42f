"""Families with norms after attention and MLP, with two kinds of rope, or with norms over all heads."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megarl.config.schema import LayoutConfig
from megarl.types import Row
from tests.helpers import rank_parts
from tests.helpers.compare import assert_within
from tests.helpers.family_parity import (
    assert_equals_transformers,
    make_rows,
    run_transformers,
)
from tests.helpers.hf_models import make_model
from tests.helpers.rank_pool import RankPool

GetPool = Callable[[int], RankPool]
TP2 = LayoutConfig(tp=2, sequence_parallel=True)


def rows_with_shared_prompts() -> Sequence[Row]:
    """The last row again, with a prompt longer than the windows of models, and before other responses."""
    rows = make_rows()
    last, generator = rows[-1], np.random.default_rng(1)
    others = [
        replace(
            last,
            sample_index=i,
            token_ids=np.concatenate([last.token_ids[: last.num_prompt_tokens], generator.integers(0, 517, length)]),
            loss_mask=np.arange(length) % 3 != 1,
        )
        for i, length in ((1, 3), (2, 19))
    ]
    return [*rows, *others]


@pytest.mark.parametrize(
    "name", ["olmo3", *(pytest.param(name, marks=pytest.mark.long) for name in ("gemma2", "gemma3", "olmo2"))]
)
def test_shared_prompts_and_recompute(rank_pool: GetPool, tmp_path: Path, name: str) -> None:
    rows = rows_with_shared_prompts()
    expected = run_transformers(make_model(tmp_path / "model", name, tied=False), rows=rows)
    assert_equals_transformers(rank_pool(2), expected, TP2, tmp_path, rows=rows, recompute="full")


def test_minimax_m2_equals_transformers(rank_pool: GetPool, tmp_path: Path) -> None:
    expected = run_transformers(make_model(tmp_path / "model", "minimax_m2", tied=False))
    assert_equals_transformers(rank_pool(2), expected, replace(TP2, ep=2), tmp_path)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_norm_over_all_heads(rank_pool: GetPool, num_ranks: int) -> None:
    """Values and gradients of both ranks' heads together are those that torch finds for the formula in float64."""
    generator = torch.Generator().manual_seed(0)
    x, gradient = (torch.randn(5, 1, 4, 3, generator=generator) for _ in range(2))
    weight = torch.rand(12, generator=generator)
    parts = rank_pool(num_ranks).run(rank_parts.wide_norm, weight, x, gradient, eps=0.1)
    inputs = [x.double().requires_grad_(), weight.double().requires_grad_()]
    flat = inputs[0].flatten(-2)
    normed = (flat * (flat.pow(2).mean(-1, keepdim=True) + 0.1).rsqrt() * inputs[1]).view(x.shape)
    expected = [normed.detach(), *torch.autograd.grad(normed, inputs, gradient.double())]
    for name, axis, got, right in zip(
        ("values", "x", "weight"), (2, 2, 0), zip(*parts, strict=True), expected, strict=True
    ):
        assert_within(name, torch.cat(got, axis).double(), right, atol=1e-6)

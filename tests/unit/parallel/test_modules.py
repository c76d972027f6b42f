"""Packed attention against one dense softmax per sequence, and the norm against its formula."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from megarl.types import Row
from megarl.weights.attention import AttentionOptions
from tests.helpers import rank_parts
from tests.helpers.compare import assert_within
from tests.helpers.rank_pool import RankPool

GetPool = Callable[[int], RankPool]
HEADS, HEAD_DIM = 4, 8


def dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sequences: list[list[int]],
    scale: float,
    options: AttentionOptions,
) -> torch.Tensor:
    """softmax(q·kᵀ·scale), scores perhaps capped, over the last tokens up to the query of the same sequence."""
    out = torch.zeros_like(query)
    per_group = query.shape[1] // key.shape[1]
    for sequence in sequences:
        for place, token in enumerate(sequence):
            seen = sequence[: place + 1][-(options.window or 0) :]
            for head in range(query.shape[1]):
                k, v = key[seen, head // per_group], value[seen, head // per_group]
                scores = k @ query[token, head] * scale
                if (cap := options.score_cap) is not None:
                    scores = cap * (scores / cap).tanh()
                out[token, head] = scores.softmax(-1) @ v
    return out.flatten(1)


def rows_of(*rows: tuple[int, int, int]) -> list[Row]:
    """Rows of (prompt's token, prompt's length, response's length)."""
    return [
        Row(
            uid=f"p{token}",
            sample_index=i,
            token_ids=np.array([token] * num_prompt + [9] * num_response),
            num_prompt_tokens=num_prompt,
            loss_mask=np.ones(num_response, dtype=np.bool_),
        )
        for i, (token, num_prompt, num_response) in enumerate(rows)
    ]


# Rows, whether they share prompts, and each row's tokens in the pack, which has the rows by length.
PACKS: dict[str, tuple[list[Row], bool, list[list[int]]]] = {
    "one": (rows_of((1, 2, 3)), False, [[0, 1, 2, 3, 4]]),
    "one token": (rows_of((1, 1, 0)), False, [[0]]),
    "equal neighbours": (
        rows_of((1, 1, 0), (2, 1, 0), (3, 2, 2), (4, 2, 2), (5, 2, 2), (6, 3, 4)),
        False,
        [[0], [1], [2, 3, 4, 5], [6, 7, 8, 9], [10, 11, 12, 13], list(range(14, 21))],
    ),
    "unsorted": (rows_of((1, 2, 3), (2, 1, 1), (1, 2, 2)), False, [[0, 1], [2, 3, 4, 5], [6, 7, 8, 9, 10]]),
    "far apart": (rows_of((1, 2, 18), (2, 1, 1)), False, [[0, 1], list(range(2, 22))]),
    "shared": (
        rows_of((1, 4, 3), (2, 1, 2), (1, 4, 1)),
        True,
        [[0, 1, 2], [3, 4, 5, 6, 7], [3, 4, 5, 6, 7, 8, 9]],
    ),
    "shared, far apart": (
        rows_of((1, 3, 20), (1, 3, 1), (1, 4, 1)),
        True,
        [[0, 1, 2, 3], [0, 1, 2, 4, 5], [0, 1, 2, 3, *range(6, 25)]],
    ),
    # Only the last queries of the second and third row, from token 32 on, are computed, and together.
    "branches": (
        rows_of((1, 34, 3), (1, 40, 2), (1, 34, 10)),
        True,
        [list(range(37)), [*range(34), *range(37, 45)], [*range(37), *range(45, 52)]],
    ),
}


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize(("rows", "shares", "sequences"), PACKS.values(), ids=PACKS)
def test_packed_attention_equals_dense(
    rank_pool: GetPool, rows: list[Row], shares: bool, sequences: list[list[int]], num_kv_heads: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    total = 1 + max(max(sequence) for sequence in sequences)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    query, key, value = (
        randn(total, HEADS, HEAD_DIM),
        randn(total, num_kv_heads, HEAD_DIM),
        randn(total, num_kv_heads, HEAD_DIM),
    )
    grad_output = randn(total, HEADS * HEAD_DIM)
    # 4 is shorter than some rows, and longer than what some of them have of their own behind a shared prompt.
    for scale, options in (
        (None, AttentionOptions()),
        (0.7, AttentionOptions()),
        (None, AttentionOptions(window=4)),
        (None, AttentionOptions(window=1)),
        (0.7, AttentionOptions(score_cap=1.5)),
        (None, AttentionOptions(score_cap=0.5, window=4)),
    ):
        # Capped scores of one to three queries at a time.
        arguments = (query, key, value, rows, shares, scale, options, grad_output, 3 * HEADS * total)
        got = rank_pool(1).run(rank_parts.packed_attention, *arguments)[0]
        q, k, v = inputs = [x.clone().requires_grad_() for x in (query, key, value)]
        out = dense_attention(q, k, v, sequences, scale or HEAD_DIM**-0.5, options)
        expected = [out.detach(), *torch.autograd.grad(out, inputs, grad_output)]
        for name, left, right in zip(("output", "query", "key", "value"), got, expected, strict=True):
            assert_within(name, left, right, atol=1e-12)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_rms_norm(rank_pool: GetPool, sequence_parallel: bool) -> None:
    """x = (3, 4): mean square 12.5."""
    weight, x = torch.tensor([2.0, 0.5]), torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    got, reduced = rank_pool(1).run(rank_parts.rms_norm, weight, x, eps=0.5, sequence_parallel=sequence_parallel)[0]
    assert_within("norm", got, [[6 / math.sqrt(13), 2 / math.sqrt(13)], [0.0, 0.0]], atol=1e-6)
    assert reduced is sequence_parallel


def test_rms_norm_that_adds_one(rank_pool: GetPool) -> None:
    """Of weights 1 less than above, the same."""
    weight, x = torch.tensor([1.0, -0.5]), torch.tensor([[3.0, 4.0]])
    got, _ = rank_pool(1).run(rank_parts.rms_norm, weight, x, eps=0.5, sequence_parallel=False, adds_one=True)[0]
    assert_within("norm", got, [[6 / math.sqrt(13), 2 / math.sqrt(13)]], atol=1e-6)


@pytest.mark.parametrize("adds_one", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_gradients_of_rms_norm(rank_pool: GetPool, adds_one: bool, dtype: torch.dtype, tolerance: float) -> None:
    """Those that torch finds for the formula in float64, of the same rounded numbers."""
    generator = torch.Generator().manual_seed(0)
    x, gradient = (torch.randn(5, 2, 12, generator=generator).to(dtype) for _ in range(2))
    weight = torch.rand(12, generator=generator).to(dtype)
    got = rank_pool(1).run(rank_parts.rms_norm_gradients, weight, x, gradient, eps=0.1, adds_one=adds_one)[0]
    inputs = [x.double().requires_grad_(), weight.double().requires_grad_()]
    normed = inputs[0] * (inputs[0].pow(2).mean(-1, keepdim=True) + 0.1).rsqrt()
    expected = torch.autograd.grad(normed * (inputs[1] + adds_one), inputs, gradient.double())
    for name, left, right in zip(("x", "weight"), got, expected, strict=True):
        assert left.dtype == dtype
        assert_within(name, left.double(), right, atol=tolerance)


def test_rms_norm_keeps_float32_statistics(rank_pool: GetPool) -> None:
    """Squares of 300 over 4096 entries: summed in bfloat16 they would stall at a fraction of their sum."""
    x = torch.full((1, 4096), 300.0, dtype=torch.bfloat16)
    weight = torch.ones(4096, dtype=torch.bfloat16)
    got, _ = rank_pool(1).run(rank_parts.rms_norm, weight, x, eps=1e-6, sequence_parallel=False)[0]
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, torch.ones_like(got))

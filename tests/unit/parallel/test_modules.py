"""Packed attention against one dense softmax per sequence, and the norm against its formula."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megarl.parallel import attention
from megarl.parallel.attention import PackedAttention
from megarl.parallel.norms import RMSNorm
from megarl.parallel.packing import PackAlignment, pack_rows
from megarl.types import Row
from megarl.weights.attention import AttentionOptions
from tests.helpers.compare import assert_within
from tests.helpers.path_kernels import attend_path_by_path

HEADS, HEAD_DIM = 4, 8


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


@pytest.mark.parametrize(("rows", "shares", "sequences"), PACKS.values(), ids=PACKS)
def test_packed_attention_equals_dense(
    rows: list[Row], shares: bool, sequences: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    total = 1 + max(max(sequence) for sequence in sequences)
    # Capped scores of one to three queries at a time.
    monkeypatch.setattr(attention, "_SCORE_BLOCK", 3 * HEADS * total)
    # The own part of a sequence is what none before it has.
    own = np.diff([0, *(max(sequence) + 1 for sequence in sequences)])
    paths = [np.array(sequence) for sequence in sequences], own
    groups = SimpleNamespace(cp=SimpleNamespace(size=lambda: 1))
    pack = pack_rows(
        rows, alignment=PackAlignment(), device=torch.device("cpu"), plans_attention=True, shares_prefixes=shares
    )

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    # 4 is shorter than some rows, and longer than what some of them have of their own behind a shared prompt.
    for num_kv_heads, scale, options in (
        (4, None, AttentionOptions()),
        (1, 0.7, AttentionOptions(window=4)),
        (2, None, AttentionOptions(window=1)),
        (2, 0.7, AttentionOptions(score_cap=1.5)),
        (1, None, AttentionOptions(score_cap=0.5, window=4)),
    ):
        inputs = [randn(total, heads, HEAD_DIM).requires_grad_() for heads in (HEADS, num_kv_heads, num_kv_heads)]
        gradient = randn(total, HEADS * HEAD_DIM)
        layer = PackedAttention(config=None, layer_number=1, softmax_scale=scale, pg_collection=groups, options=options)
        out = layer(*inputs, None, packed_seq_params=pack.packed_seq_params)
        got = [out.detach(), *torch.autograd.grad(out, inputs, gradient)]
        out = attend_path_by_path(*inputs, paths, scale or HEAD_DIM**-0.5, options)
        expected = [out.detach(), *torch.autograd.grad(out, inputs, gradient)]
        for name, left, right in zip(("output", "query", "key", "value"), got, expected, strict=True):
            assert_within(name, left, right, atol=1e-12)


def norm_of(
    weight: torch.Tensor, eps: float, *, adds_one: bool = False, sequence_parallel: bool = False
) -> torch.nn.Module:
    config = SimpleNamespace(
        params_dtype=weight.dtype, sequence_parallel=sequence_parallel, layernorm_zero_centered_gamma=adds_one
    )
    norm = RMSNorm(config, len(weight), eps=eps)
    assert norm.weight.dtype == weight.dtype
    with torch.no_grad():
        norm.weight.copy_(weight)
    return norm


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_rms_norm(sequence_parallel: bool) -> None:
    """x = (3, 4): mean square 12.5. With one added, weights 1 less do the same."""
    weight, x = torch.tensor([2.0, 0.5]), torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    norm = norm_of(weight, 0.5, sequence_parallel=sequence_parallel)
    expected = [[6 / math.sqrt(13), 2 / math.sqrt(13)], [0.0, 0.0]]
    assert_within("norm", norm(x).detach(), expected, atol=1e-6)
    assert getattr(norm.weight, "sequence_parallel", False) is sequence_parallel
    assert_within("norm", norm_of(weight - 1, 0.5, adds_one=True)(x).detach(), expected, atol=1e-6)


@pytest.mark.parametrize("adds_one", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_gradients_of_rms_norm(adds_one: bool, dtype: torch.dtype, tolerance: float) -> None:
    """Those that torch finds for the formula in float64, of the same rounded numbers."""
    generator = torch.Generator().manual_seed(0)
    x, gradient = (torch.randn(5, 2, 12, generator=generator).to(dtype) for _ in range(2))
    weight = torch.rand(12, generator=generator).to(dtype)
    norm = norm_of(weight, 0.1, adds_one=adds_one)
    got = torch.autograd.grad(norm(x.requires_grad_()), [x, norm.weight], gradient)
    inputs = [x.detach().double().requires_grad_(), weight.double().requires_grad_()]
    normed = inputs[0] * (inputs[0].pow(2).mean(-1, keepdim=True) + 0.1).rsqrt()
    expected = torch.autograd.grad(normed * (inputs[1] + adds_one), inputs, gradient.double())
    for name, left, right in zip(("x", "weight"), got, expected, strict=True):
        assert left.dtype == dtype
        assert_within(name, left.double(), right, atol=tolerance)

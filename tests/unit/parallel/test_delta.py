"""The gated delta rule in chunks equals its recurrence, on rows of every length, and its kernels get whole rows."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from megarl.parallel.delta import DeltaRows, choose_kernel, delta_rule, run_calls, run_fused


def make_rows(num_rows: int, num_tokens: int, dtype: torch.dtype, fastest: float = 3.0) -> DeltaRows:
    """Two heads, keys of width 5, values of 7; the decays of a token reach from 0 to `fastest`."""
    generator = torch.Generator().manual_seed(num_tokens)

    def draw(*widths: int) -> torch.Tensor:
        return torch.randn(num_rows, num_tokens, 2, *widths, generator=generator, dtype=torch.float64)

    decay = -fastest * torch.rand(num_rows, num_tokens, 2, generator=generator, dtype=torch.float64) ** 3
    q, k = (F.normalize(draw(5), dim=-1) for _ in range(2))
    return tuple(x.to(dtype) for x in (q, k, draw(7), decay, draw().sigmoid()))  # type: ignore[return-value]


def recur(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """Token by token, as the rule is defined: S' = e^g S, S = S' + β k (v − kᵀS')ᵀ, o = qᵀS / √d."""
    state, outputs = q.new_zeros(len(q), q.shape[2], q.shape[3], v.shape[3]), []
    for t in range(q.shape[1]):
        state = decay[:, t, :, None, None].exp() * state
        error = v[:, t] - torch.einsum("bhd,bhde->bhe", k[:, t], state)
        state = state + torch.einsum("bh,bhd,bhe->bhde", beta[:, t], k[:, t], error)
        outputs.append(torch.einsum("bhd,bhde->bhe", q[:, t], state) / q.shape[3] ** 0.5)
    return torch.stack(outputs, 1)


@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 200])
def test_chunks_equal_the_recurrence(num_tokens: int) -> None:
    """In values and gradients, in float64."""
    rows = [x.requires_grad_() for x in make_rows(2, num_tokens, torch.float64)]
    expected, got = recur(*rows), delta_rule(*rows)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    weights = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64).view_as(expected)
    of_expected = torch.autograd.grad((expected * weights).sum(), rows)
    for of_got, gradient in zip(torch.autograd.grad((got * weights).sum(), rows), of_expected, strict=True):
        torch.testing.assert_close(of_got, gradient, rtol=0, atol=1e-11)


def test_rows_equal_transformers() -> None:
    rows = make_rows(3, 150, torch.float32)
    q, k, v, decay, beta = rows
    expected = torch_recurrent_gated_delta_rule(q, k, v, decay, beta)[0]
    torch.testing.assert_close(delta_rule(*rows), expected, rtol=0, atol=1e-6)


def test_sums_of_many_decays_keep_their_differences() -> None:
    """Each token fades by up to e^-200, so that sums reach -3200, of which float32 keeps four decimals."""
    rows = make_rows(4, 192, torch.float32, 200.0)
    expected = recur(*(x.double() for x in rows))
    torch.testing.assert_close(delta_rule(*rows).double(), expected, rtol=0, atol=3e-7)


def test_fused_kernel_gets_all_rows_end_to_end() -> None:
    """In 16 bits, with the bounds of the rows of every call."""
    calls, given = [make_rows(2, 5, torch.float32), make_rows(1, 30, torch.float32)], dict[str, Any]()

    def rule(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: torch.Tensor) -> tuple[torch.Tensor, None]:
        given.update(options, dtypes={x.dtype for x in (q, k, v)})
        bounds = options["cu_seqlens"].tolist()
        beta, decay = options["beta"], options["g"]
        parts = [
            recur(*(x[:, start:end].float() for x in (q, k, v, decay, beta)))
            for start, end in itertools.pairwise(bounds)
        ]
        return torch.cat(parts, 1), None

    got = run_fused(calls, rule, torch.bfloat16)
    assert given["cu_seqlens"].tolist() == [0, 5, 10, 40]
    assert given["dtypes"] == {torch.bfloat16}
    assert given["g"].dtype is torch.float32
    torch.testing.assert_close(got, run_calls(calls), rtol=0, atol=2e-2)


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.bfloat16), ("cuda", torch.float32)])
def test_kernels_of_fla_are_for_16_bits_on_cuda(device: str, dtype: torch.dtype) -> None:
    assert choose_kernel(torch.device(device), dtype) is run_calls

"""Attention with sinks against a softmax with one more column, and against what transformers computes."""

import pytest
import torch
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from megarl.parallel.attention import attend_with_sinks

HEADS, KV_HEADS, WIDTH = 6, 2, 12


class _Layer(torch.nn.Module):
    """What transformers' attention reads of its layer."""

    num_key_value_groups = HEADS // KV_HEADS

    def __init__(self, sinks: torch.Tensor) -> None:
        super().__init__()
        self.sinks = torch.nn.Parameter(sinks)


def make_inputs(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    """Query, key, value of 3 rows of 9 tokens, and sinks as large as scores."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, HEADS, 9, WIDTH), (3, KV_HEADS, 9, WIDTH), (3, KV_HEADS, 9, WIDTH), (HEADS,))
    return tuple((2 * torch.randn(shape, generator=generator)).to(dtype) for shape in shapes)


def in_window(width: int) -> torch.Tensor:
    distance = torch.arange(9)[:, None] - torch.arange(9)
    return (distance >= 0) & (distance < width)


@pytest.mark.parametrize(("seen", "equal_to"), [(None, in_window(9)), (in_window(3), in_window(3))])
@pytest.mark.parametrize("scale", [None, 0.4])
def test_outputs_and_gradients_are_transformers(
    seen: torch.Tensor | None, equal_to: torch.Tensor, scale: float | None
) -> None:
    query, key, value, sinks = (each.requires_grad_() for each in make_inputs())
    out = attend_with_sinks(query, key, value, sinks, seen, scale)
    layer = _Layer(sinks.detach().clone())
    theirs = [each.detach().clone().requires_grad_() for each in (query, key, value)]
    mask = torch.zeros(9, 9, dtype=torch.float64).masked_fill(~equal_to, -torch.inf)
    expected, _ = eager_attention_forward(layer, *theirs, mask, scaling=WIDTH**-0.5 if scale is None else scale)
    torch.testing.assert_close(out, expected.transpose(1, 2), rtol=0, atol=1e-12)

    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (out * weights).sum().backward()
    (expected.transpose(1, 2) * weights).sum().backward()
    for mine, its in zip((query, key, value, sinks), (*theirs, layer.sinks), strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad, its.grad, rtol=0, atol=1e-12)


def test_some_of_the_queries_have_the_same_outputs() -> None:
    """As on a rank of a context-parallel group, which has an early and a late chunk of each row."""
    query, key, value, sinks = make_inputs()
    mine = [0, 1, 7, 8]
    every = attend_with_sinks(query, key, value, sinks, None, None)
    some = attend_with_sinks(query[:, :, mine], key, value, sinks, in_window(9)[mine], None)
    torch.testing.assert_close(some, every[:, :, mine], rtol=0, atol=1e-12)


def test_a_sink_takes_its_share_by_hand() -> None:
    """One token that sees itself: exp(score) / (exp(score) + exp(sink)) of its value."""
    query, key, value = (torch.full((1, 1, 1, 4), each) for each in (2.0, 1.0, 3.0))
    out = attend_with_sinks(query, key, value, torch.tensor([4.0]), None, 0.5)
    torch.testing.assert_close(out, torch.full((1, 1, 1, 4), 1.5))


def test_sinks_lose_no_digits_in_bfloat16() -> None:
    """Divided by the scale, a sink has more digits than a query in bfloat16: one rounding errs by up to 3 %."""
    query, key = torch.zeros(1, HEADS, 1, WIDTH), torch.zeros(1, KV_HEADS, 1, WIDTH)
    query[..., 0], key[..., 0] = 16, 9.25
    sinks, scale = torch.tensor([20.125, 19.5, 19.875, 20.75, 19.25, 20.375]), 0.1347
    inputs = (each.bfloat16() for each in (query, key, torch.ones_like(key), sinks))
    shares = attend_with_sinks(*inputs, None, scale)[0, :, 0, 0].double()
    expected = 1 / (1 + (sinks.double() - 16 * 9.25 * scale).exp())
    assert float(((shares - expected) / expected).abs().max()) < 2**-7

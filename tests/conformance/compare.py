"""Comparison of values and gradients, each with the one tolerance that the peer's own arithmetic explains."""

from collections.abc import Callable

import torch
from torch import Tensor

# Relative to max(1, |expected|). Both sides in float64, the order of sums aside.
FLOAT64 = 1e-12
# The peer adds 1e-8 to a count of tokens, at least 1, before it divides by it, up to twice in a row.
COUNT_EPS = 2e-8
# The peer computes in float32.
FLOAT32 = 2e-6

Loss = Callable[[Tensor], Tensor]


def assert_close(got: Tensor, expected: Tensor, tolerance: float) -> None:
    """Of all elements, the one that is furthest off."""
    assert got.shape == expected.shape
    got, expected = got.double().flatten(), expected.double().flatten()
    assert expected.numel() > 0
    assert expected.isfinite().all(), f"the peer answers {expected}"
    error = (got - expected).abs() / expected.abs().clamp(min=1)
    i = int(error.argmax())
    assert float(error[i]) <= tolerance, f"element {i}: got {got[i].item()}, the peer has {expected[i].item()}"


def value_and_gradient(loss: Loss, at: Tensor) -> tuple[Tensor, Tensor]:
    """A scalar loss and its gradient; `at` is copied, as some peers edit what they are given."""
    x = at.detach().clone().requires_grad_()
    value = loss(x)
    (gradient,) = torch.autograd.grad(value, x)
    return value.detach(), gradient


def assert_same_loss(ours: Loss, peer: Loss, at: Tensor, tolerance: float) -> None:
    """Equal values and equal gradients, of which some are not 0."""
    value, gradient = value_and_gradient(ours, at)
    peer_value, peer_gradient = value_and_gradient(peer, at)
    assert peer_gradient.abs().max() > 0
    assert_close(value, peer_value, tolerance)
    assert_close(gradient, peer_gradient, tolerance)

"""Comparison by the largest absolute difference, which `pytest -s` shows."""

from typing import Any

import numpy as np


def assert_within(name: str, got: Any, expected: Any, *, atol: float) -> None:
    """max |got − expected| ≤ atol, on equal shapes and finite numbers."""
    got, expected = np.asarray(got, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    assert got.shape == expected.shape, f"{name}: got shape {got.shape}, expected {expected.shape}"
    assert np.isfinite(got).all(), f"{name}: got a number that is not finite"
    error = float(np.abs(got - expected).max(initial=0.0))
    print(f"max |Δ| of {name}: {error:.2e} (≤ {atol:.0e})")
    assert error <= atol, f"{name}: max |Δ| is {error:.3e}, allowed {atol:.0e}"

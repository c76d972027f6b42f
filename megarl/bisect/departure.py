"""Describe a tensor that does not follow from those before it, and its cause."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megarl.bisect.operations import Operation
from megarl.bisect.rules import Rules
from megarl.types.passes import Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """A tensor that does not follow from the tensors before it by the model's config.json and weights."""

    place: Place
    operation: Operation
    told: torch.Tensor
    rules: Rules
    older: Sequence[Rules]
    bound: float

    def explained_by(self, value: torch.Tensor) -> bool:
        return distance(value, self.told) <= self.bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A named cause, in words with figures."""

    name: str
    words: str


def distance(value: torch.Tensor, told: torch.Tensor) -> float:
    """Return the largest difference as a share of the largest element; infinity if a number is not finite."""
    if value.shape != told.shape:
        return float("inf")
    share = float((value - told).abs().max() / value.abs().max().clamp_min(1e-30))
    return share if share == share else float("inf")

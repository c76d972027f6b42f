"""Describe a tensor that does not follow from those before it, and its cause."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megarl.bisect.operations import LayerOperation
from megarl.bisect.rules import LayerRules
from megarl.types.passes import PassPlace


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """A tensor that does not follow from the tensors before it by the model's config.json and weights."""

    place: PassPlace
    operation: LayerOperation
    recorded: torch.Tensor
    rules: LayerRules
    older: Sequence[LayerRules]
    bound: float

    def explained_by(self, value: torch.Tensor) -> bool:
        return distance(value, self.recorded) <= self.bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A named cause, in words with figures."""

    name: str
    words: str


def distance(value: torch.Tensor, recorded: torch.Tensor) -> float:
    """Return the largest difference as a share of the largest element; infinity if a number is not finite."""
    if value.shape != recorded.shape:
        return float("inf")
    share = float((value - recorded).abs().max() / value.abs().max().clamp_min(1e-30))
    return share if share == share else float("inf")

"""Compare two gradients of one batch by groups of tensors, and say whether they differ by rounding or by a fault."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from megarl.errors import ConfigError

# The difference that rounding explains, and the share of the largest tensor's norm that counts as a tensor's norm if
# its own is less: sums that cancel, as of keys' biases, and an expert's few tokens leave little but rounding.
# Rounding adds up over a backward pass: two layouts of a float32 model of two layers differed by 1.2e-5. In bfloat16,
# 16 random models of 10 families differed from their float32 gradient, and from that under tp=2, by up to 0.25 (OLMo 3;
# the rest by up to 0.14). Only a random gpt-oss, some tokens of which then went to other experts, differed by 0.58.
BOUNDS = {"float32": (3e-4, 0.01), "bfloat16": (0.35, 0.1)}
# In backward, a layer's parts are computed in this order; the norms of an unknown name before attention.
_PARTS = {"mlp": 0, "block_sparse_moe": 0, "post_attention_layernorm": 1, "self_attn": 3, "input_layernorm": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDifference:
    """How far two gradients of a group of tensors are apart.

    norms: of the first and the second. size: the largest difference of a tensor, ‖a − b‖, as a share of its norm; of
    `tensor`.
    """

    name: str
    norms: tuple[float, float]
    cosine: float
    size: float
    tensor: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientComparison:
    """Groups in the order in which backward computes them, from the head to the embedding; bound: of rounding."""

    groups: tuple[GroupDifference, ...]
    bound: float

    @property
    def first(self) -> GroupDifference | None:
        """Return the first group that differs by more than rounding."""
        return next((each for each in self.groups if not each.size <= self.bound), None)

    @property
    def verdict(self) -> Literal["equal", "rounding", "fault"]:
        if self.first is not None:
            return "fault"
        return "rounding" if any(each.size for each in self.groups) else "equal"

    def words(self) -> str:
        """Say what the differences are, and where they begin."""
        largest = max(self.groups, key=lambda each: each.size)
        if self.first is None:
            most = (
                f"the largest difference is {largest.size:.1e}, in {largest.tensor}; rounding explains {self.bound:.1e}"
            )
            return "the gradients are equal to the bit" if self.verdict == "equal" else f"rounding: {most}"
        first, wrong = self.first, [each for each in self.groups if not each.size <= self.bound]
        scales = [each.norms[1] / each.norms[0] for each in wrong if each.norms[0]]
        alike = max(scales, default=0.0) - min(scales, default=0.0) <= self.bound * max(scales, default=0.0)
        scaled = alike and all(1 - each.cosine <= self.bound for each in wrong)
        how = f"is {scales[0]:.4g} times as large" if scaled else f"differs by {first.size:.1e}, in {first.tensor}"
        if len(wrong) == len(self.groups):
            cause = "its scale or denominators" if scaled else "look at log-probs with `megarl bisect RUN`"
            return f"fault: all of it {how}: the loss or the forward pass; {cause}"
        more = len(wrong) - 1
        if not more:
            return f"fault: {first.name} {how}, and nothing else: its own gradient, or the sum of it over ranks"
        if all(not each.size <= self.bound for each in self.groups[self.groups.index(first) :]):
            return f"fault: {first.name} {how}, and so does all that backward computes after it: it begins there"
        return f"fault: {first.name} {how}, as do {more} others, and groups after it agree: their own gradients"


def compare_gradients(
    one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor], *, dtype: str
) -> GradientComparison:
    """Compare gradients by the names of their tensors. dtype: the coarsest one that either was computed in."""
    shapes = [{name: tuple(each.shape) for name, each in gradient.items()} for gradient in (one, other)]
    if apart := dict(shapes[0].items() ^ shapes[1].items()):
        raise ConfigError(f"gradients are of other models: {sorted(apart)[0]} differs in shape; compare one model's")
    groups: dict[str, list[str]] = {}
    for name in sorted(one, key=_order):
        groups.setdefault(_group(name), []).append(name)
    norms = {name: (_norm(one[name]), _norm(other[name])) for name in one}
    bound, least = BOUNDS[dtype]
    floor = least * max(max(pair) for pair in norms.values())
    found = []
    for group, names in groups.items():
        sizes = {
            name: _norm(one[name].double() - other[name].double()) / max(*norms[name], floor, 1e-30) for name in names
        }
        sizes = {name: size if size == size else math.inf for name, size in sizes.items()}
        a, b = (math.hypot(*(norms[name][i] for name in names)) for i in (0, 1))
        dot = sum(float(torch.sum(one[name].double() * other[name].double())) for name in names)
        worst = max(sizes, key=lambda name: sizes[name])
        cosine = dot / (a * b) if a and b else float(a == b)
        found.append(GroupDifference(name=group, norms=(a, b), cosine=cosine, size=sizes[worst], tensor=worst))
    return GradientComparison(groups=tuple(found), bound=bound)


def _norm(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def _place(name: str) -> tuple[str, str]:
    """Return a tensor's layer and its part of the layer; empty outside of layers."""
    found = re.search(r"layers\.(\d+)\.(\w+)", name)
    return (found[1], found[2]) if found else ("", "")


def _group(name: str) -> str:
    layer, part = _place(name)
    return f"layer {layer}, {part}" if layer else name.removesuffix(".weight").rpartition(".")[2]


def _order(name: str) -> tuple[int, int, str]:
    layer, part = _place(name)
    if layer:
        return -int(layer), _PARTS.get(part, 2), name
    # The embedding comes last, also where it is the head.
    return (1 if "embed" in name else -(10**9) + ("norm" in name)), 0, name

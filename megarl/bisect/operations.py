"""Compute each tensor of a forward pass in float32 from those before it, as plainly as a textbook."""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F

from megarl.weights.rules import Activation


class LayerOperation(Protocol):
    """Computes a tensor; a cause of a difference is an operation with another convention or weight."""

    def compute(self) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Embed:
    """Rows [T, H] of the embedding, multiplied by `factor`."""

    ids: torch.Tensor
    weight: torch.Tensor
    factor: float

    def compute(self) -> torch.Tensor:
        return self.weight[self.ids].float() * self.factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """RMSNorm over the last axis, or over the last two if `wide`; without weight: the identity."""

    x: torch.Tensor
    weight: torch.Tensor | None
    eps: float
    adds_one: bool
    wide: bool = False

    @property
    def flat(self) -> torch.Tensor:
        return self.x.flatten(1) if self.wide else self.x

    @property
    def scale(self) -> torch.Tensor | float:
        return 1.0 if self.weight is None else self.weight.float() + float(self.adds_one)

    def compute(self) -> torch.Tensor:
        if self.weight is None:
            return self.x
        x = self.flat
        normed = x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.scale
        return normed.view(self.x.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """x·Wᵀ + b [T, F], in heads of `head_dim` if that is given."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    head_dim: int | None = None

    def compute(self) -> torch.Tensor:
        y = F.linear(self.x.flatten(1), self.weight.float(), None if self.bias is None else self.bias.float())
        return y if self.head_dim is None else y.view(len(y), -1, self.head_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """Rotary embedding: pair i of a head's first dimensions turns by position · frequencies[i].

    Pairs are dimensions i and i + n of n frequencies, or neighbours if `neighbours`.
    """

    x: torch.Tensor
    frequencies: torch.Tensor
    neighbours: bool = False
    shift: torch.Tensor | None = None

    def pairs(self, x: torch.Tensor) -> torch.Tensor:
        """Return the pairs [T, heads, n] of a tensor as complex numbers."""
        n = len(self.frequencies)
        if self.neighbours:
            return torch.view_as_complex(x[..., : 2 * n].unflatten(-1, (n, 2)).contiguous())
        return torch.complex(x[..., :n].contiguous(), x[..., n : 2 * n].contiguous())

    def compute(self) -> torch.Tensor:
        n = len(self.frequencies)
        angles = torch.arange(len(self.x))[:, None].double() * self.frequencies.double()
        angles = angles if self.shift is None else angles + self.shift
        turned = self.pairs(self.x) * torch.polar(torch.ones_like(angles), angles)[:, None]
        parts = [torch.view_as_real(turned).flatten(-2)] if self.neighbours else [turned.real, turned.imag]
        return torch.cat([*parts, self.x[..., 2 * n :]], -1).float()


@dataclass(frozen=True, slots=True, kw_only=True)
class Attend:
    """Causal softmax attention [T, heads, d]; options are those of `AttentionOptions`.

    grouped: consecutive query heads share a key head; else those that are apart by the number of key heads.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    window: int | None = None
    cap: float | None = None
    sinks: torch.Tensor | None = None
    causal: bool = True
    grouped: bool = True

    def compute(self) -> torch.Tensor:
        shared = self.query.shape[1] // self.key.shape[1]
        key, value = (
            x.repeat_interleave(shared, 1) if self.grouped else x.repeat(1, shared, 1) for x in (self.key, self.value)
        )
        scores = torch.einsum("qhd,khd->hqk", self.query, key) * self.scale
        if self.cap is not None:
            scores = self.cap * (scores / self.cap).tanh()
        distance = torch.arange(len(key))[:, None] - torch.arange(len(key))
        seen = distance >= 0 if self.causal else torch.ones_like(distance, dtype=torch.bool)
        if self.window is not None:
            seen &= distance < self.window
        scores = scores.masked_fill(~seen, -torch.inf)
        if self.sinks is not None:
            sink = self.sinks.float()[:, None, None].expand(-1, len(key), 1)
            scores = torch.cat([scores, sink], -1)
        weights = scores.softmax(-1)[..., : len(key)]
        return torch.einsum("hqk,khd->qhd", weights, value)


ACTIVATIONS = {
    Activation.SILU: F.silu,
    Activation.GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GateUp:
    """act(x·Gᵀ) · x·Uᵀ [T, F]."""

    x: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    activation: Activation

    def compute(self) -> torch.Tensor:
        gate, up = (F.linear(self.x, weight.float()) for weight in (self.gate, self.up))
        return ACTIVATIONS[self.activation](gate) * up


@dataclass(frozen=True, slots=True, kw_only=True)
class Add:
    """The residual stream with what attention or the MLP adds to it: residual + multiplier · norm(x)."""

    residual: torch.Tensor
    x: torch.Tensor
    multiplier: float
    norm: Norm

    def compute(self) -> torch.Tensor:
        return self.residual + self.multiplier * replace(self.norm, x=self.x).compute()


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsHead:
    """Log-probs [T − 1] of the next tokens; padding: further logits of 0 that enter the softmax."""

    hidden: torch.Tensor
    ids: torch.Tensor
    weight: torch.Tensor
    temperature: float
    cap: float | None
    divisor: float
    padding: float = 0

    @property
    def logits(self) -> torch.Tensor:
        logits = F.linear(self.hidden, self.weight.float()) / self.divisor
        return logits if self.cap is None else self.cap * (logits / self.cap).tanh()

    def compute(self) -> torch.Tensor:
        logits = self.logits / self.temperature
        total = logits.logsumexp(-1)
        if self.padding:
            total = torch.logaddexp(total, torch.tensor(float(self.padding)).log())
        return logits.gather(-1, self.ids[:, None])[:, 0] - total

"""Compute each tensor of a forward pass in float32 from those before it, as plainly as a textbook."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F

from megarl.weights.dims import Experts
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


# Tokens whose last chosen and first other expert are closer than this share of the largest logit may be routed to
# either by rounding.
_NEAR = 2.0**-6
# How many equal parts of a layer's experts ranks may have.
_PARTS = (2, 4, 8)


@dataclass(frozen=True, slots=True)
class Mlp:
    """The weights of one expert: gate and up [F, H], down [H, F]."""

    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor

    def compute(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        hidden = GateUp(x=x, gate=self.gate, up=self.up, activation=activation).compute()
        return F.linear(hidden, self.down.float())

    @property
    def interchanged(self) -> "Mlp":
        return replace(self, gate=self.up, up=self.gate)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedMlps:
    """Σ_e w_e · MLP_e(x) [T, H] over the experts e that the router chose for a token, plus those that all tokens share.

    router: [E, H]. bias: [E], added to scores only to choose. recorded: what one side computed, which is returned for
    tokens that rounding may route to others.
    """

    x: torch.Tensor
    router: torch.Tensor
    bias: torch.Tensor | None
    experts: Experts
    mlps: Sequence[Mlp]
    shared: Mlp | None
    shared_gate: torch.Tensor | None
    activation: Activation
    recorded: torch.Tensor | None

    def route(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return weights and numbers of each token's experts, both [T, k], and whether rounding may change them [T]."""
        logits, routing, k = F.linear(self.x, self.router.float()), self.experts.routing, self.experts.per_token
        scores = logits.sigmoid() if routing is not None and routing.biased else logits.softmax(-1)
        rated = scores if self.bias is None else scores + self.bias.float()
        if routing is not None and routing.num_groups > 1:
            groups = rated.unflatten(1, (routing.num_groups, -1))
            best = groups.topk(routing.group_rating, -1).values.sum(-1).topk(routing.groups_per_token, -1).indices
            eligible = torch.zeros(groups.shape[:2], dtype=torch.bool).scatter_(1, best, value=True)
            rated = groups.masked_fill(~eligible[..., None], -torch.inf).flatten(1)
        ordered, numbers = rated.sort(-1, descending=True)
        chosen = numbers[:, :k]
        weights = scores.gather(1, chosen)
        if self.experts.normalized:
            weights = weights / weights.sum(-1, keepdim=True)
        near = torch.zeros(len(rated), dtype=torch.bool)
        if k < rated.shape[1]:
            # By how far a logit's rounding moves a score.
            moved = _NEAR * logits.abs().amax(-1) * scores.gather(1, numbers[:, k - 1 : k + 1]).amax(-1)
            near = ordered[:, k - 1] - ordered[:, k] < moved
        return weights * (1.0 if routing is None else routing.scale), chosen, near

    def compute(self) -> torch.Tensor:
        weights, chosen, near = self.route()
        total = torch.zeros_like(self.x)
        for expert in chosen.unique().tolist():
            tokens, slots = (chosen == expert).nonzero(as_tuple=True)
            made = self.mlps[expert].compute(self.x[tokens], self.activation)
            total.index_add_(0, tokens, made * weights[tokens, slots, None])
        if self.shared is not None:
            shared = self.shared.compute(self.x, self.activation)
            gate = 1.0 if self.shared_gate is None else F.linear(self.x, self.shared_gate.float()).sigmoid()
            total += gate * shared
        return total if self.recorded is None else torch.where(near[:, None], self.recorded, total)


def expert_causes(
    operation: RoutedMlps, recorded: torch.Tensor, limit: float, others: Sequence[tuple[str, str, RoutedMlps]]
) -> Iterator[tuple[str, str, RoutedMlps]]:
    """Yield what may be wrong with experts: name, words, and the operation with that.

    others: the operation with an earlier version's weights or another layer's. limit: how far rounding reaches.
    """
    swapped = replace(operation, mlps=[each.interchanged for each in operation.mlps])
    yield "gate and up", "gate and up of all routed experts are interchanged", swapped
    yield from _of_routing(operation)
    for name, words, other in others:
        yield name, f"router, {words}", replace(operation, router=other.router, bias=other.bias)
        yield name, f"all routed experts, {words}", replace(operation, mlps=other.mlps)
        yield name, f"shared experts, {words}", replace(operation, shared=other.shared)
        yield name, f"router and experts, {words}", replace(other, x=operation.x, recorded=operation.recorded)
    num = len(operation.mlps)
    for parts in (n for n in _PARTS if num % n == 0):
        turned = [operation.mlps[(i + num // parts) % num] for i in range(num)]
        words = f"each expert has the weights of the one that is {num // parts} further on"
        yield "misplaced weight", words, replace(operation, mlps=turned)
    _, chosen, near = operation.route()
    wrong = ((recorded - operation.compute()).abs().amax(-1) > limit) & ~near
    common = set.intersection(*(set(row) for row in chosen[wrong].tolist())) if wrong.any() else set[int]()
    for expert in sorted(common):
        mlp = operation.mlps[expert]
        zero = replace(mlp, down=torch.zeros_like(mlp.down))
        tried = [("gate and up", "gate and up are interchanged", mlp.interchanged), ("missing weight", "zero", zero)]
        tried += [(name, words, other.mlps[expert]) for name, words, other in others]
        tried += [("misplaced weight", f"as expert {i}", each) for i, each in enumerate(operation.mlps) if i != expert]
        for name, words, given in tried:
            mlps = [given if i == expert else each for i, each in enumerate(operation.mlps)]
            yield name, f"expert {expert}: {words}", replace(operation, mlps=mlps)


def _of_routing(operation: RoutedMlps) -> Iterator[tuple[str, str, RoutedMlps]]:
    experts = operation.experts
    has, other = ("sum to 1", "do not") if experts.normalized else ("do not sum to 1", "do")
    words = f"weights of a token's experts {has} in this model, here they {other}"
    yield "routing weights", words, replace(operation, experts=replace(experts, normalized=not experts.normalized))
    if experts.routing is not None and experts.routing.scale != 1:
        plain = replace(experts, routing=replace(experts.routing, scale=1.0))
        words = f"routed experts are not multiplied by {experts.routing.scale:.6g}"
        yield "multiplier", words, replace(operation, experts=plain)
    if operation.bias is not None:
        yield "bias", "the router's bias is left out where experts are chosen", replace(operation, bias=None)
    if operation.shared is not None:
        yield "shared experts", "the shared experts are left out", replace(operation, shared=None)
    if operation.shared_gate is not None:
        yield "shared experts", "their output is not multiplied by its gate", replace(operation, shared_gate=None)

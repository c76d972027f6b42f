"""Name the convention or weight by which a tensor would have become what one side recorded.

A cause is an operation with another convention: if computing it gives what was recorded, it is named.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from megarl.bisect.departure import Departure, Explanation, distance
from megarl.bisect.operations import (
    ACTIVATIONS,
    Add,
    Attend,
    Embed,
    GateUp,
    LayerOperation,
    Linear,
    LogitsHead,
    Norm,
    Rotation,
    RoutedMlps,
    expert_causes,
)
from megarl.bisect.rules import frequencies
from megarl.bisect.weights import other_weights, weight_causes
from megarl.types.passes import Probe

# An operation in another convention, with its name and words.
Alternatives = Iterator[tuple[str, str, LayerOperation]]


def find_cause(departure: Departure) -> Explanation | None:
    """Return the first cause that explains a departure, the commonest ones first."""
    operation = departure.operation
    for name, words, other in _CAUSES[type(operation)](departure, operation):
        if departure.explained_by(other.compute()):
            return Explanation(name=name, words=words)
    for name, words in weight_causes(departure):
        return Explanation(name=name, words=words)
    recorded, expected = departure.recorded, operation.compute()
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(recorded.to(dtype).float(), recorded) and distance(expected, recorded) < 0.05:
            return Explanation(name="dtype", words=f"it is rounded to {str(dtype).removeprefix('torch.')}")
    return None


def _of_embedding(departure: Departure, operation: Embed) -> Alternatives:
    if operation.factor != 1:
        yield "multiplier", f"embeddings are not multiplied by {operation.factor:.6g}", replace(operation, factor=1.0)


def _of_norm(departure: Departure, operation: Norm) -> Alternatives:
    if operation.weight is None:
        return
    yield "norm absent", "the norm is left out", replace(operation, weight=None)
    has, other = ("1 + w", "w") if operation.adds_one else ("w", "1 + w")
    words = f"the norm scales by {other}, this family by {has}"
    yield "norm offset", words, replace(operation, adds_one=not operation.adds_one)
    if not operation.wide and operation.x.ndim == 3:
        words = "the norm is over all heads together, this family's over each head"
        yield "norm width", words, replace(operation, x=operation.x.flatten(1), weight=_tiled(operation))
    x, recorded = operation.flat.double(), departure.recorded.reshape(operation.flat.shape).double()
    strength = (recorded * x * operation.scale).sum(-1) / (x * operation.scale).square().sum(-1)
    eps = float((strength**-2 - x.square().mean(-1)).median())
    if eps > 0:
        words = f"the norm's epsilon is {eps:.2g}, config.json has {operation.eps:.2g}"
        yield "norm eps", words, replace(operation, eps=float(f"{eps:.2g}"))


def _tiled(operation: Norm) -> torch.Tensor:
    assert operation.weight is not None
    return operation.weight.repeat(operation.x.shape[1])


def _of_turn(departure: Departure, operation: Rotation) -> Alternatives:
    size, expected = operation.x.shape[-1], operation.frequencies
    yield "rope absent", "queries and keys are not turned", replace(operation, frequencies=expected[:0])
    for turned in dict.fromkeys((2 * len(expected), size, size // 2, size // 4, 3 * size // 4)):
        for neighbours in (False, True):
            tried = replace(operation, frequencies=torch.ones(turned // 2), neighbours=neighbours)
            recorded, x = (tried.pairs(each).to(torch.complex128) for each in (departure.recorded, operation.x))
            turns = (recorded * x.conj()).sum(1)
            steps = (turns[1:] * turns[:-1].conj()).sum(0).angle()
            # Over many positions the angle is known more exactly.
            at = torch.arange(len(turns)).double()[:, None]
            rest = (turns * torch.polar(torch.ones_like(at * steps), -at * steps)).angle()
            centred = at - at.mean()
            steps = steps + (centred * rest).sum(0) / centred.square().sum()
            shift = (turns * torch.polar(torch.ones_like(at * steps), -at * steps)).sum(0).angle()
            found = replace(tried, frequencies=steps, shift=shift)
            if departure.explained_by(found.compute()):
                yield *_named_turn(departure, operation, found), found
                return


def _named_turn(departure: Departure, operation: Rotation, found: Rotation) -> tuple[str, str]:
    """Name the rotation that was measured, by its frequencies and angles at position 0."""
    spec, layer, n = departure.rules.spec, departure.place.layer, len(found.frequencies)
    expected, size, near = operation.frequencies.double(), operation.x.shape[-1], 1e-3
    assert layer is not None
    assert found.shift is not None
    if found.neighbours != operation.neighbours:
        return "rope interleaving", "pairs are neighbouring dimensions, here they are those of the two halves"
    if n != len(expected):
        return "rotary fraction", f"{2 * n} of {size} dimensions turn, config.json has {2 * len(expected)}"
    longest = len(operation.x)

    def fits(other: torch.Tensor) -> bool:
        return bool(((other.double() - found.frequencies).abs() * longest).max() < near * max(1.0, longest / 64))

    if fits(expected):
        shift = float(found.shift[0] / expected[0])
        return "positions", f"positions are shifted by {shift:.3g}"
    plain = 1.0 / spec.rope_theta ** (torch.arange(n).double() / n)
    if fits(plain):
        return "rope scaling", f"frequencies are not scaled, config.json has {spec.rope_scaling}"
    for other in range(spec.dims.num_layers):
        if fits(frequencies(spec, other)):
            return "rope of other layers", f"it turns as layer {other} does, whose rope is of another kind"
    theta = float(found.frequencies[1].abs()) ** -n if n > 1 else 0.0
    if fits(1.0 / theta ** (torch.arange(n).double() / n)):
        return "rope theta", f"theta is {theta:.4g}, config.json has {spec.rope_theta:.6g}"
    factors = plain / found.frequencies
    if float(factors[: n // 2].std()) < near * float(factors[0]):
        return "rope scaling", f"positions are divided by {float(factors[0]):.4g}, config.json has {spec.rope_scaling}"
    return "rope scaling", f"frequencies are {found.frequencies.tolist()[:3]} …, expected {expected.tolist()[:3]} …"


def _of_attention(departure: Departure, operation: Attend) -> Alternatives:
    spec, width, longest = departure.rules.spec, operation.query.shape[-1], len(operation.query)
    if operation.window is not None:
        words = f"no window, config.json has {operation.window} for this layer"
        yield "window", words, replace(operation, window=None)
    for window in (*({operation.window} if operation.window else ()), *filter(None, spec.dims.windows)):
        for other in (window, window - 1, window + 1):
            has = "none" if operation.window is None else str(operation.window)
            words = f"a window of {other}, config.json has {has} for this layer"
            yield "window", words, replace(operation, window=other)
    if operation.cap is not None:
        yield "score cap", f"scores are not capped at {operation.cap:.4g}", replace(operation, cap=None)
    if operation.sinks is not None:
        yield "sink", "the softmax has no sinks", replace(operation, sinks=None)
    yield "causal mask", "tokens see those after them", replace(operation, causal=False)
    if operation.query.shape[1] != operation.key.shape[1]:
        yield "heads", "query heads are paired with other key heads", replace(operation, grouped=False)
    factors = {width**-0.5: f"1/√{width}", 1.0: "1", spec.dims.hidden**-0.5: f"1/√{spec.dims.hidden}"}
    for scale in (spec.score_scale, spec.multipliers.attention, spec.softmax_scale):
        factors |= {} if scale is None else {scale: f"{scale:.6g}"}
    for scale, text in factors.items():
        words = f"scores are multiplied by {text}, expected {operation.scale:.6g}"
        yield "score scale", words, replace(operation, scale=scale)
    wrong = ((departure.recorded - operation.compute()).flatten(1).abs().amax(1) > departure.bound).nonzero()[:, 0]
    first, heads = int(wrong[0]) if len(wrong) else 0, operation.query.shape[1] // operation.key.shape[1]
    if 0 < first < longest and heads:
        words = f"from position {first} on, tokens read keys or values that are not those of their row"
        yield "KV cache", words, _Recorded(departure.recorded)


@dataclass(frozen=True, slots=True)
class _Recorded:
    """The recorded tensor itself, for causes that are known by what is wrong rather than by another convention."""

    value: torch.Tensor

    def compute(self) -> torch.Tensor:
        return self.value


def _of_linear(departure: Departure, operation: Linear) -> Alternatives:
    if operation.bias is not None:
        yield "bias", "the bias is left out", replace(operation, bias=None)
    rest = departure.recorded.flatten(1) - operation.compute().flatten(1)
    if distance(rest.mean(0).expand_as(rest), rest) < 1e-3:
        has = "no bias" if operation.bias is None else "another bias"
        words = f"a constant of up to {float(rest.mean(0).abs().max()):.3g} is added; the model has {has}"
        yield "bias", words, replace(operation, bias=rest.mean(0) + (0 if operation.bias is None else operation.bias))


def _of_gate_up(departure: Departure, operation: GateUp) -> Alternatives:
    for activation in ACTIVATIONS:
        if activation is not operation.activation:
            words = f"the activation is {activation}, this family's {operation.activation}"
            yield "activation", words, replace(operation, activation=activation)
    yield "gate and up", "gate and up are interchanged", replace(operation, gate=operation.up, up=operation.gate)


def _of_experts(departure: Departure, operation: RoutedMlps) -> Alternatives:
    others = [(name, words, other) for name, words, other in other_weights(departure) if isinstance(other, RoutedMlps)]
    limit = departure.bound * float(operation.compute().abs().max())
    yield from expert_causes(operation, departure.recorded, limit, others)


def _of_sum(departure: Departure, operation: Add) -> Alternatives:
    if operation.multiplier != 1:
        words = f"what is added is not multiplied by {operation.multiplier:.6g}"
        yield "multiplier", words, replace(operation, multiplier=1.0)
    if operation.norm.weight is not None:
        absent = replace(operation.norm, weight=None)
        yield "norm absent", "what is added has no norm", replace(operation, norm=absent)
        offset = replace(operation.norm, adds_one=not operation.norm.adds_one)
        yield (
            "norm offset",
            "the norm of what is added has w where 1 + w is, or the reverse",
            replace(operation, norm=offset),
        )
        added = (departure.recorded - operation.residual) / operation.multiplier
        inner = replace(departure, operation=replace(operation.norm, x=operation.x), recorded=added)
        for name, words, other in _of_norm(inner, replace(operation.norm, x=operation.x)):
            assert isinstance(other, Norm)
            yield name, words, replace(operation, norm=other)
    yield (
        "residual",
        "the residual stream is not added",
        replace(operation, residual=torch.zeros_like(operation.residual)),
    )


def _of_head(departure: Departure, operation: LogitsHead) -> Alternatives:
    if operation.cap is not None:
        yield "logit cap", f"logits are not capped at {operation.cap:.4g}", replace(operation, cap=None)
    if operation.divisor != 1:
        yield "multiplier", f"logits are not divided by {operation.divisor:.6g}", replace(operation, divisor=1.0)
    embedding = departure.rules.weights.one(Probe.EMBEDDING)
    if embedding is not None and not departure.rules.spec.dims.tied:
        words = "the head is the embedding, config.json has tie_word_embeddings: false"
        yield "tied head", words, replace(operation, weight=embedding)
    untied = departure.rules.weights.tensors.get("lm_head.weight")
    if untied is not None and departure.rules.spec.dims.tied:
        words = "the head is lm_head.weight, config.json has tie_word_embeddings: true"
        yield "tied head", words, replace(operation, weight=untied)
    logits = operation.logits / operation.temperature
    chosen = logits.gather(-1, operation.ids[:, None])[:, 0]
    padding = float(((chosen - departure.recorded).double().exp() - logits.double().exp().sum(-1)).median())
    if padding >= 0.5:
        words = f"{padding:.0f} further entries of the vocabulary, whose logits are 0, enter the softmax"
        yield "vocabulary padding", words, replace(operation, padding=round(padding))
    temperature = _fitted_temperature(operation, departure.recorded)
    words = f"the temperature is {temperature:.4g}, expected {operation.temperature:.4g}"
    yield "temperature", words, replace(operation, temperature=temperature)


def _fitted_temperature(operation: LogitsHead, recorded: torch.Tensor) -> float:
    """Return the temperature whose log-probs come closest, by golden-section search between 1/8 and 8."""
    logits, golden = operation.logits, (5**0.5 - 1) / 2

    def error(log_t: float) -> float:
        scaled = logits / 2.0**log_t
        return float((scaled.log_softmax(-1).gather(-1, operation.ids[:, None])[:, 0] - recorded).square().sum())

    low, high = min(
        ((t - 0.25, t + 0.25) for t in torch.arange(-3, 3.01, 0.25).tolist()), key=lambda e: error(sum(e) / 2)
    )
    for _ in range(40):
        a, b = high - golden * (high - low), low + golden * (high - low)
        low, high = (low, b) if error(a) < error(b) else (a, high)
    return float(f"{2.0 ** ((low + high) / 2):.4g}")


_CAUSES: dict[type, Callable[..., Alternatives]] = {
    Embed: _of_embedding,
    Norm: _of_norm,
    Rotation: _of_turn,
    Attend: _of_attention,
    Linear: _of_linear,
    GateUp: _of_gate_up,
    RoutedMlps: _of_experts,
    Add: _of_sum,
    LogitsHead: _of_head,
}

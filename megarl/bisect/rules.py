"""Say by which operation each tensor of a pass follows from those before it, by a model's config.json and weights."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megarl.bisect.operations import (
    ACTIVATIONS,
    Add,
    Attend,
    Embed,
    GateUp,
    LayerOperation,
    Linear,
    LogitsHead,
    Mlp,
    Norm,
    Rotation,
    RoutedMlps,
)
from megarl.types.passes import PassPlace, Probe, RecordedPass, merged
from megarl.weights.families import ModelSpec, PlacedRule, read_model_spec
from megarl.weights.rope import PlainYarnRope, YarnRope
from megarl.weights.rules import Layers, Partition
from megarl.weights.safetensors_headers import model_files
from megarl.weights.safetensors_map import map_model

_ATTENTION = "decoder.layers.{}.self_attention."
_LAYER, _QKV, _UP = "decoder.layers.{}.", f"{_ATTENTION}linear_qkv.weight", "decoder.layers.{}.mlp.linear_fc1.weight"
# The parameter with which a stage is computed, and which of its tensors.
_PARAMETERS = {
    Probe.EMBEDDING: ("embedding.word_embeddings.weight", 0),
    Probe.ATTENTION_INPUT: (f"{_LAYER}input_layernorm.weight", 0),
    Probe.QUERY: (_QKV, 0),
    Probe.KEY: (_QKV, 1),
    Probe.VALUE: (_QKV, 2),
    Probe.QUERY_NORMED: (f"{_ATTENTION}q_layernorm.weight", 0),
    Probe.KEY_NORMED: (f"{_ATTENTION}k_layernorm.weight", 0),
    Probe.ATTENDED: (f"{_ATTENTION}core_attention.softmax_offset", 0),
    Probe.ATTENTION_OUTPUT: (f"{_ATTENTION}linear_proj.weight", 0),
    Probe.STREAM: (f"{_LAYER}self_attn_bda.weight", 0),
    Probe.MLP_INPUT: (f"{_LAYER}pre_mlp_layernorm.weight", 0),
    Probe.MLP_HIDDEN: (_UP, 0),
    Probe.MLP_OUTPUT: (f"{_LAYER}mlp.linear_fc2.weight", 0),
    Probe.OUTPUT: (f"{_LAYER}mlp_bda.weight", 0),
    Probe.FINAL_NORM: ("decoder.final_layernorm.weight", 0),
    Probe.LOGPROBS: ("output_layer.weight", 0),
    Probe.SAMPLED: ("output_layer.weight", 0),
}
_UNKNOWN = {Partition.GATE_UP_IN_TURNS, Partition.TRANSPOSED_COLUMNS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The tensors of a model by Hugging Face's names. layer: take those of this layer in the place of any other."""

    spec: ModelSpec
    tensors: Mapping[str, torch.Tensor]
    rules: Mapping[str, PlacedRule]
    layer: int | None = None

    @classmethod
    def read(cls, directory: Path) -> "Weights":
        spec = read_model_spec(directory)
        return cls(spec=spec, tensors=map_model(model_files(directory)), rules=spec.parameter_rules())

    def parts(self, parameter: str, layer: int | None = None) -> list[torch.Tensor]:
        """Return the tensors of one of Megatron's parameters; none if the model does not have it."""
        placed = self.rules.get(parameter.format(layer if self.layer is None else self.layer))
        if placed is None or placed.rule.partition in _UNKNOWN:
            return []
        found, rows = list[torch.Tensor](), dict[str, int]()
        for tensor in placed.rule.tensors:
            copied = placed.rule.tied_to if self.spec.is_copy(placed.rule) else None
            size, first = self.spec.dims.dim(tensor.shape[0]), rows.get(tensor.name, 0)
            whole = self.tensors[copied or placed.name(tensor.name)]
            if tensor.of_expert:
                whole = whole[placed.expert].T if tensor.is_transposed else whole[placed.expert]
            found.append(whole[first : first + size])
            rows[tensor.name] = first + size
        return found

    def one(self, stage: Probe, layer: int | None = None) -> torch.Tensor | None:
        """Return the tensor with which a stage is computed; None if it has none."""
        parameter, part = _PARAMETERS[stage]
        parts = self.parts(parameter, layer)
        return parts[part] if parts else None

    def name(self, place: PassPlace) -> str:
        """Return the name of the tensor with which a stage is computed."""
        parameter, part = _PARAMETERS.get(place.stage, ("", 0))
        placed = self.rules.get(parameter.format(place.layer))
        return "" if placed is None else placed.name(placed.rule.tensors[part].name)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRules:
    """The rules by which one side's tensors follow from each other. YaRN's factor is in scores, as in the trainer."""

    weights: Weights
    recorded: RecordedPass

    @property
    def spec(self) -> ModelSpec:
        return self.weights.spec

    def operation(self, place: PassPlace) -> LayerOperation | None:
        """Return what computes a tensor; None if it is not known, or needs tensors that were not recorded."""
        make = _OPERATIONS.get(place.stage)
        return None if make is None else make(self, place.layer)

    def value(self, stage: Probe, layer: int | None = None) -> torch.Tensor | None:
        """Return a tensor as it was recorded, or else as it follows from others; None if it does not."""
        recorded = self.recorded.values.get(PassPlace(stage, layer))
        if recorded is None and (operation := self.operation(PassPlace(stage, layer))) is not None:
            recorded = operation.compute()
        return recorded

    def stream(self, layer: int) -> torch.Tensor | None:
        """Return the residual stream with which a layer begins."""
        return self.value(Probe.OUTPUT, layer - 1) if layer else self.value(Probe.EMBEDDING)

    def norm(self, stage: Probe, x: torch.Tensor, layer: int | None = None, *, wide: bool = False) -> Norm:
        weight, adds_one = self.weights.one(stage, layer), self.spec.family.norms_add_one
        return Norm(x=x, weight=weight, eps=self.spec.norm_eps, adds_one=adds_one, wide=wide)


def frequencies(spec: ModelSpec, layer: int) -> torch.Tensor:
    """Return by how much each pair of a head's dimensions turns from a position to the next, in a layer."""
    assert not isinstance(spec.rope_scaling, YarnRope)
    size = round(spec.dims.head_dim * spec.dims.rotary_fraction)
    exponents = torch.arange(0, size, 2).float() / size
    if spec.local_rope is not None and spec.local_rope.layers[layer]:
        return 1.0 / spec.local_rope.theta**exponents
    return spec.rope_scaling.scale(1.0 / spec.rope_theta**exponents)


def merged_record(
    spec: ModelSpec, parts: Iterable[Mapping[PassPlace, torch.Tensor]], num_tokens: int, *, scales_turned: bool = False
) -> dict[PassPlace, torch.Tensor]:
    """Put together what ranks recorded. scales_turned: turned queries and keys have YaRN's factor, as in engines."""
    values = merged(parts, num_heads=spec.dims.num_heads, num_kv_heads=spec.dims.num_kv_heads, num_tokens=num_tokens)
    if not (scales_turned and isinstance(spec.rope_scaling, PlainYarnRope)):
        return values
    for place, value in values.items():
        is_local = place.layer is not None and spec.attention_of(place.layer).local_rope
        if place.stage in (Probe.QUERY_TURNED, Probe.KEY_TURNED) and not is_local:
            values[place] = value / spec.rope_scaling.score_factor**0.5
    return values


def _embed(rules: LayerRules, _: int | None) -> LayerOperation | None:
    weight = rules.weights.one(Probe.EMBEDDING)
    ids = torch.from_numpy(rules.recorded.token_ids).long()
    return None if weight is None else Embed(ids=ids, weight=weight, factor=rules.spec.multipliers.embedding)


def _attention_input(rules: LayerRules, layer: int) -> LayerOperation | None:
    x = rules.stream(layer)
    return None if x is None else rules.norm(Probe.ATTENTION_INPUT, x, layer)


def _projected(stage: Probe) -> Callable[[LayerRules, int], LayerOperation | None]:
    def make(rules: LayerRules, layer: int) -> LayerOperation | None:
        dims, (name, part) = rules.spec.dims, _PARAMETERS[stage]
        biases = rules.weights.parts(name.replace("weight", "bias"), layer)
        x, weight = rules.value(Probe.ATTENTION_INPUT, layer), rules.weights.one(stage, layer)
        if x is None or weight is None:
            return None
        if dims.gated and stage is Probe.QUERY:
            weight = weight.view(-1, 2, dims.head_dim, dims.hidden)[:, 0].flatten(0, 1)
        return Linear(x=x, weight=weight, bias=biases[part] if biases else None, head_dim=dims.head_dim)

    return make


def _normed(
    stage: Probe, source: Probe, *, wide: bool = False
) -> Callable[[LayerRules, int | None], LayerOperation | None]:
    def make(rules: LayerRules, layer: int | None) -> LayerOperation | None:
        x = rules.value(source, layer)
        return None if x is None else rules.norm(stage, x, layer, wide=wide and rules.spec.family.wide_qk_norm)

    return make


def _turned(source: Probe) -> Callable[[LayerRules, int], LayerOperation | None]:
    def make(rules: LayerRules, layer: int) -> LayerOperation | None:
        x = rules.value(source, layer)
        return None if x is None else Rotation(x=x, frequencies=frequencies(rules.spec, layer))

    return make


def _attend(rules: LayerRules, layer: int) -> LayerOperation | None:
    query, key, value = (rules.value(s, layer) for s in (Probe.QUERY_TURNED, Probe.KEY_TURNED, Probe.VALUE))
    if query is None or key is None or value is None:
        return None
    options, spec = rules.spec.attention_of(layer), rules.spec
    scale = options.softmax_scale if options.local_rope else spec.softmax_scale
    return Attend(
        query=query,
        key=key,
        value=value,
        scale=scale or spec.dims.head_dim**-0.5,
        window=options.window,
        cap=options.score_cap,
        sinks=rules.weights.one(Probe.ATTENDED, layer) if options.sinks else None,
    )


def _attention_output(rules: LayerRules, layer: int) -> LayerOperation | None:
    dims, name = rules.spec.dims, _PARAMETERS[Probe.ATTENTION_OUTPUT][0]
    weight, x = rules.weights.one(Probe.ATTENTION_OUTPUT, layer), rules.value(Probe.ATTENDED, layer)
    if weight is None or x is None:
        return None
    if dims.gated:
        both, before = rules.weights.one(Probe.QUERY, layer), rules.value(Probe.ATTENTION_INPUT, layer)
        assert both is not None
        assert before is not None
        gate = both.view(-1, 2, dims.head_dim, dims.hidden)[:, 1].flatten(0, 1)
        x = x * Linear(x=before, weight=gate, bias=None, head_dim=dims.head_dim).compute().sigmoid()
    bias = next(iter(rules.weights.parts(name.replace("weight", "bias"), layer)), None)
    return Linear(x=x, weight=weight, bias=bias)


def _gate_up(rules: LayerRules, layer: int) -> LayerOperation | None:
    parts, x = rules.weights.parts(_UP, layer), rules.value(Probe.MLP_INPUT, layer)
    activation = rules.spec.family.activation
    if x is None or len(parts) != 2 or activation not in ACTIVATIONS:
        return None
    return GateUp(x=x, gate=parts[0], up=parts[1], activation=activation)


def _mlp_output(rules: LayerRules, layer: int) -> LayerOperation | None:
    if rules.spec.dims.kind_of(layer) is Layers.EXPERTS:
        return _routed(rules, layer)
    weight, x = rules.weights.one(Probe.MLP_OUTPUT, layer), rules.value(Probe.MLP_HIDDEN, layer)
    return None if weight is None or x is None else Linear(x=x, weight=weight, bias=None)


def _mlp(rules: LayerRules, layer: int, block: str) -> Mlp | None:
    both, down = (rules.weights.parts(f"{_LAYER}mlp.{block}linear_fc{i}.weight", layer) for i in (1, 2))
    return Mlp(*both, *down) if len(both) == 2 else None


def _routed(rules: LayerRules, layer: int) -> LayerOperation | None:
    family, experts = rules.spec.family, rules.spec.dims.experts
    x, router = rules.value(Probe.MLP_INPUT, layer), rules.weights.parts(f"{_LAYER}mlp.router.weight", layer)
    if experts is None or x is None or not router or family.activation not in ACTIVATIONS:
        return None
    mlps = [_mlp(rules, layer, f"experts.local_experts.{i}.") for i in range(experts.num)]
    if any(each is None for each in mlps):
        return None
    bias, gate = (
        next(iter(rules.weights.parts(f"{_LAYER}mlp.{name}", layer)), None)
        for name in ("router.expert_bias", "shared_experts.gate_weight")
    )
    return RoutedMlps(
        x=x,
        router=router[0],
        bias=bias,
        experts=experts,
        mlps=[each for each in mlps if each is not None],
        shared=_mlp(rules, layer, "shared_experts."),
        shared_gate=gate,
        activation=family.activation,
        recorded=rules.recorded.values.get(PassPlace(Probe.MLP_OUTPUT, layer)),
    )


def _added(stage: Probe, source: Probe) -> Callable[[LayerRules, int], LayerOperation | None]:
    def make(rules: LayerRules, layer: int) -> LayerOperation | None:
        x = rules.value(source, layer)
        residual = rules.stream(layer) if stage is Probe.STREAM else rules.value(Probe.STREAM, layer)
        if x is None or residual is None:
            return None
        norm = rules.norm(stage, x, layer)
        return Add(residual=residual, x=x, multiplier=rules.spec.multipliers.residual, norm=norm)

    return make


def _final_norm(rules: LayerRules, _: int | None) -> LayerOperation | None:
    x = rules.stream(rules.spec.dims.num_layers)
    return None if x is None else rules.norm(Probe.FINAL_NORM, x)


def _head(rules: LayerRules, _: int | None) -> LayerOperation | None:
    weight, hidden = rules.weights.one(Probe.LOGPROBS), rules.value(Probe.FINAL_NORM)
    if weight is None or hidden is None:
        return None
    return LogitsHead(
        hidden=hidden[:-1],
        ids=torch.from_numpy(rules.recorded.token_ids[1:]).long(),
        weight=weight,
        temperature=rules.recorded.temperature,
        cap=rules.spec.logit_cap,
        divisor=rules.spec.multipliers.logits_divisor,
    )


def _sampled(rules: LayerRules, _: int | None) -> LayerOperation | None:
    head, sampled = _head(rules, None), rules.recorded.values.get(PassPlace(Probe.SAMPLED))
    if sampled is None or not isinstance(head, LogitsHead):
        return None
    n = len(sampled)
    return replace(head, hidden=head.hidden[-n:], ids=head.ids[-n:], temperature=rules.recorded.sampled_at)


_OPERATIONS: dict[Probe, Callable[..., LayerOperation | None]] = {
    Probe.EMBEDDING: _embed,
    Probe.ATTENTION_INPUT: _attention_input,
    Probe.QUERY: _projected(Probe.QUERY),
    Probe.KEY: _projected(Probe.KEY),
    Probe.VALUE: _projected(Probe.VALUE),
    Probe.QUERY_NORMED: _normed(Probe.QUERY_NORMED, Probe.QUERY, wide=True),
    Probe.KEY_NORMED: _normed(Probe.KEY_NORMED, Probe.KEY, wide=True),
    Probe.QUERY_TURNED: _turned(Probe.QUERY_NORMED),
    Probe.KEY_TURNED: _turned(Probe.KEY_NORMED),
    Probe.ATTENDED: _attend,
    Probe.ATTENTION_OUTPUT: _attention_output,
    Probe.STREAM: _added(Probe.STREAM, Probe.ATTENTION_OUTPUT),
    Probe.MLP_INPUT: _normed(Probe.MLP_INPUT, Probe.STREAM),
    Probe.MLP_HIDDEN: _gate_up,
    Probe.MLP_OUTPUT: _mlp_output,
    Probe.OUTPUT: _added(Probe.OUTPUT, Probe.MLP_OUTPUT),
    Probe.FINAL_NORM: _final_norm,
    Probe.LOGPROBS: _head,
    Probe.SAMPLED: _sampled,
}

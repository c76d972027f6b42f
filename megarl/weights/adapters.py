"""Describe a model's adapters (LoRA; Hu et al. 2021, arXiv:2106.09685) as the weight table of a model of their own.

An adapter replaces a matrix W [out, in] by W + s·B·A with A [rank, in], B [out, rank] and s = alpha / rank. Its rules
follow from W's: what splits W's outputs over ranks splits B, and every rank has A; what splits W's inputs splits A, and
every rank has B; of a W that every rank has, every rank has both. Names of tensors are those of PEFT, without the
prefix that it puts before all of them. Sections of one tensor, such as queries, keys and values in one, share its A.
Experts have adapters of their own, with gates and ups apart, also where tensors have all experts of a layer.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from megarl.config.lora import LoraConfig, Target
from megarl.errors import ConfigError
from megarl.weights.dims import Dims
from megarl.weights.families import ModelSpec
from megarl.weights.rules import HFTensor, Layers, Partition, WeightRule
from megarl.weights.tables import VALUE_HEAD

# How A and B are split over ranks, by how W is.
_WHOLE = Partition.REPLICATED
_SPLITS: Mapping[Partition, tuple[Partition, Partition]] = {
    _WHOLE: (_WHOLE, _WHOLE),
    Partition.ROWS: (_WHOLE, Partition.ROWS),
    Partition.GATE_UP: (_WHOLE, Partition.GATE_UP),
    Partition.QKV: (_WHOLE, Partition.QKV),
    Partition.GATED_QKV: (_WHOLE, Partition.GATED_QKV),
    Partition.DELTA_HEADS: (_WHOLE, Partition.DELTA_HEADS),
    Partition.COLUMNS: (Partition.COLUMNS, _WHOLE),
    Partition.GATE_UP_IN_TURNS: (_WHOLE, Partition.GATE_UP),
    Partition.TRANSPOSED_COLUMNS: (Partition.COLUMNS, _WHOLE),
}


@dataclass(frozen=True, kw_only=True)
class AdapterDims(Dims):
    """The sizes of a model and its adapters: the rank of all, and that of the experts'."""

    rank: int
    expert_rank: int

    def dim(self, symbol: str) -> int:
        ranks = {"rank": self.rank, "expert_rank": self.expert_rank}
        return ranks[symbol] if symbol in ranks else super().dim(symbol)


def target_of(rule: WeightRule) -> Target | None:
    """Return which of the targets a linear layer's weight belongs to, or None if it has no adapter.

    Routers of experts, gates of shared experts, convolutions, embeddings and heads have none.
    """
    name = rule.names[0]
    is_matrix = name.endswith(".weight") and all(len(tensor.shape) == 2 for tensor in rule.tensors)
    if rule.partition not in _SPLITS or not is_matrix or "{layer}" not in name or rule.is_router:
        return None
    if "{expert}" in name:
        return "experts"
    return "attention" if ".self_attention." in name else "mlp"


def matrices_of(rule: WeightRule) -> tuple[HFTensor, ...]:
    """Return the matrices [out, in] of a linear layer's weight, under the names of the modules that have them in PEFT.

    Sections of one tensor are matrices of the same name.
    """
    if rule.partition is Partition.GATE_UP_IN_TURNS:
        ((name, (inputs, _)),) = ((each.sent_name, each.shape) for each in rule.tensors)
        return tuple(HFTensor(name.replace("gate_up", kind), ("expert_ffn", inputs)) for kind in ("gate", "up"))
    turned = rule.partition is Partition.TRANSPOSED_COLUMNS
    return tuple(
        HFTensor(each.sent_name.removesuffix(".weight"), each.shape[::-1] if turned else each.shape)
        for each in rule.tensors
    )


def adapter_rules(rules: Collection[WeightRule], targets: Collection[Target]) -> Iterator[WeightRule]:
    """Yield the rules of A and B for each rule of a targeted weight. Megatron's names end with `.lora.a`, `.lora.b`."""
    for rule in rules:
        if target_of(rule) not in targets:
            continue
        rank = "expert_rank" if target_of(rule) == "experts" else "rank"
        matrices, splits = matrices_of(rule), _SPLITS[rule.partition]
        a = dict.fromkeys(HFTensor(f"{each.name}.lora_A.weight", (rank, each.shape[1])) for each in matrices)
        b = (HFTensor(f"{each.name}.lora_B.weight", (each.shape[0], rank)) for each in matrices)
        for letter, partition, tensors in zip("ab", splits, (a, b), strict=True):
            names = tuple(adapter_name(name, letter) for name in rule.names)
            yield replace(rule, names=names, partition=partition, tensors=tuple(tensors))


def adapter_name(weight: str, letter: str) -> str:
    """Return Megatron's name of the matrix A or B (`letter`) that belongs to a linear layer's weight.

    Transformer Engine numbers the weights of experts that are one layer.

    >>> adapter_name("mlp.linear_fc1.weight", "a"), adapter_name("mlp.experts.linear_fc1.weight3", "b")
    ('mlp.linear_fc1.lora.a', 'mlp.experts.linear_fc1.lora.3.b')
    """
    layer, _, expert = weight.rpartition(".weight")
    return ".".join([layer, "lora", *filter(None, [expert]), letter])


def lost_in_peft(spec: ModelSpec, targets: Collection[Target]) -> Target | None:
    """Return the target whose adapters PEFT would leave out of the model, most often without a word, or None."""
    lost = spec.family.lost_in_peft
    kinds = {Layers.ALL, *(kind for layer in range(spec.dims.num_layers) for kind in spec.dims.kinds_of(layer))}
    present = (rule for rule in spec.family.weights if spec.has(rule) and rule.layers in kinds)
    return lost if lost in targets and any(target_of(rule) == lost for rule in present) else None


def peft_config(spec: ModelSpec, config: LoraConfig, *, scalar_head: bool = False) -> dict[str, Any]:
    """Return the adapter_config.json that PEFT needs for a model's adapters, and a scalar head if it has one.

    All adapters have the same scale. If experts have another rank, theirs is PEFT's default, since it finds no pattern
    for experts that transformers keeps in one tensor.
    """
    adapters = adapter_spec(spec, config)
    low = [t for rule in adapters.family.weights for t in rule.tensors if t.name.endswith(".lora_A.weight")]
    ranks = {tensor.name.rsplit(".", 2)[0]: adapters.dims.dim(tensor.shape[0]) for tensor in low}
    default = next((rank for name, rank in ranks.items() if "{expert}" in name), config.rank)
    # By the names of modules within their layers' parts, such as self_attn.q_proj.
    patterns = {re.escape(".".join(name.split(".")[-2:])): rank for name, rank in ranks.items() if rank != default}
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if scalar_head else "CAUSAL_LM",
        "base_model_name_or_path": str(spec.path),
        "r": default,
        "lora_alpha": config.alpha * default / config.rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": _target_modules(spec, low),
        "modules_to_save": [VALUE_HEAD.removesuffix(".weight")] if scalar_head else None,
        "rank_pattern": patterns,
        "alpha_pattern": {pattern: config.alpha * rank / config.rank for pattern, rank in patterns.items()},
    }


def _target_modules(spec: ModelSpec, low: Collection[HFTensor]) -> list[str] | str:
    """Return PEFT's names of the layers with adapters: how they end or, where others end so too, a pattern of names."""
    places = {tensor.name.removesuffix(".lora_A.weight").partition("{layer}.")[2] for tensor in low}
    ends = {place.rpartition(".")[2] for place in places}
    linear = (rule for rule in spec.family.weights if spec.has(rule) and target_of(rule) is not None)
    others = {each.name.partition("{layer}.")[2] for rule in linear for each in matrices_of(rule)} - places
    if ends.isdisjoint(other.rpartition(".")[2] for other in others):
        return sorted(ends)
    # PEFT looks for experts without their numbers too, as transformers keeps all experts of a layer in one tensor.
    patterns = (re.escape(place).replace(r"\.\{expert\}", r"(\.\d+)?") for place in sorted(places))
    return rf".*\.layers\.\d+\.({'|'.join(patterns)})"


def adapter_spec(spec: ModelSpec, config: LoraConfig) -> ModelSpec:
    """Describe the adapters of a model as a model: its tensors are theirs alone, and a scalar head if it has one.

    Raises:
        ConfigError: none of the model's layers is targeted.
    """
    experts = spec.dims.experts
    # A table has rules of dense layers also for models whose layers all have experts.
    kinds = {Layers.ALL, *(kind for layer in range(spec.dims.num_layers) for kind in spec.dims.kinds_of(layer))}
    present = [rule for rule in spec.family.weights if spec.has(rule) and rule.layers in kinds]
    if not {*config.targets} & (found := {target_of(rule) for rule in present}):
        known = sorted(target for target in found if target is not None)
        raise ConfigError(
            f"lora.targets: got {list(config.targets)}, but {spec.path} has no such layers; expected some of {known}"
        )
    dims = AdapterDims(
        **{field.name: getattr(spec.dims, field.name) for field in fields(Dims)},
        rank=config.rank,
        expert_rank=config.expert_rank or max(1, config.rank // (experts.per_token if experts else 1)),
    )
    rules = (*adapter_rules(present, config.targets), *(r for r in present if r.tensors[0].name == VALUE_HEAD))
    return replace(spec, dims=dims, family=replace(spec.family, weights=rules, ignored=()), tower=None)

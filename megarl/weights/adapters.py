"""Describe a model's adapters (LoRA; Hu et al. 2021, arXiv:2106.09685) as the weight table of a model of their own.

An adapter replaces a matrix W [out, in] by W + s·B·A with A [rank, in], B [out, rank] and s = alpha / rank. Its rules
follow from W's: what splits W's outputs over ranks splits B, and every rank has A; what splits W's inputs splits A, and
every rank has B. Names of tensors are those of PEFT, without the prefix that it puts before all of them.
"""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from megarl.config.lora import LoraConfig, Target
from megarl.weights.dims import Dims
from megarl.weights.families import ModelSpec
from megarl.weights.rules import HFTensor, Partition, WeightRule

_LINEAR = (Partition.ROWS, Partition.COLUMNS, Partition.GATE_UP, Partition.QKV)


@dataclass(frozen=True, kw_only=True)
class AdapterDims(Dims):
    """The sizes of a model and its adapters: the rank of all, and that of the experts'."""

    rank: int
    expert_rank: int

    def dim(self, symbol: str) -> int:
        ranks = {"rank": self.rank, "expert_rank": self.expert_rank}
        return ranks[symbol] if symbol in ranks else super().dim(symbol)


def target_of(rule: WeightRule) -> Target | None:
    """Return which of the targets a linear layer's weight belongs to, or None if it can have no adapter."""
    name = rule.names[0]
    is_matrix = name.endswith(".weight") and all(len(tensor.shape) == 2 for tensor in rule.tensors)
    if rule.partition not in _LINEAR or not is_matrix or "{layer}" not in name:
        return None
    if "{expert}" in name:
        return "experts"
    return "attention" if ".self_attention." in name else "mlp"


def adapter_rules(rules: Collection[WeightRule], targets: Collection[Target]) -> Iterator[WeightRule]:
    """Yield the rules of A and B for each rule of a targeted weight. Megatron's names end with `.lora.a`, `.lora.b`."""
    for rule in rules:
        if target_of(rule) not in targets:
            continue
        rank = "expert_rank" if target_of(rule) == "experts" else "rank"
        splits_inputs = rule.partition is Partition.COLUMNS
        for letter, is_split in (("a", splits_inputs), ("b", not splits_inputs)):
            tensors = [
                HFTensor(
                    f"{tensor.name.removesuffix('.weight')}.lora_{letter.upper()}.weight",
                    (rank, tensor.shape[1]) if letter == "a" else (tensor.shape[0], rank),
                )
                for tensor in rule.tensors
            ]
            if letter == "a":
                # Sections of one tensor share its A.
                tensors = list(dict.fromkeys(tensors))
            yield replace(
                rule,
                # Of Transformer Engine's names, those of grouped experts do not end so: their adapters are not grouped.
                names=(f"{rule.names[0].removesuffix('.weight')}.lora.{letter}",),
                partition=rule.partition if is_split else Partition.REPLICATED,
                tensors=tuple(tensors),
            )


def peft_config(spec: ModelSpec, config: LoraConfig) -> dict[str, Any]:
    """Return the adapter_config.json that PEFT needs for a model's adapters.

    Experts' adapters of another rank keep the scale of all, so they have another alpha.
    """
    adapters = adapter_spec(spec, config)
    rank, expert_rank = (adapters.dims.dim(name) for name in ("rank", "expert_rank"))
    modules = {tensor.name.rsplit(".", 3)[1]: None for rule in adapters.family.weights for tensor in rule.tensors}
    of_experts = [rule for rule in adapters.family.weights if "{expert}" in rule.names[0]]
    own = {re.escape(t.name.split("{expert}")[0].rsplit(".", 2)[1]) for rule in of_experts for t in rule.tensors}
    patterns = {rf"{block}\.\d+\.\w+": expert_rank for block in own} if expert_rank != rank else {}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(spec.path),
        "r": rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(modules),
        "rank_pattern": patterns,
        "alpha_pattern": {pattern: config.alpha * own_rank / rank for pattern, own_rank in patterns.items()},
    }


def adapter_spec(spec: ModelSpec, config: LoraConfig) -> ModelSpec:
    """Describe the adapters of a model as a model: its tensors are theirs alone."""
    experts = spec.dims.experts
    dims = AdapterDims(
        **{field.name: getattr(spec.dims, field.name) for field in fields(Dims)},
        rank=config.rank,
        expert_rank=config.expert_rank or max(1, config.rank // (experts.per_token if experts else 1)),
    )
    rules = tuple(adapter_rules([rule for rule in spec.family.weights if spec.has(rule)], config.targets))
    return replace(spec, dims=dims, family=replace(spec.family, weights=rules, ignored=()))

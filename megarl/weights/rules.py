"""Define what weight tables consist of: a rule for each Megatron parameter of a family of models.

Nothing here imports torch or megatron.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Partition(StrEnum):
    """How Megatron splits a parameter over tensor-parallel ranks."""

    REPLICATED = "replicated"
    VOCAB = "vocab"  # rows of the vocabulary, padded at the end
    ROWS = "rows"  # output features of a column-parallel layer
    COLUMNS = "columns"  # input features of a row-parallel layer
    GATE_UP = "gate_up"  # two row-split matrices, stacked on each rank
    QKV = "qkv"  # per key/value group: its query heads, its key head, its value head


class Layers(StrEnum):
    """Which layers have a parameter."""

    ALL = "all"
    DENSE = "dense"  # those with one MLP
    EXPERTS = "experts"  # those with experts in its place


class Activation(StrEnum):
    """The activation that an MLP applies to its gate, named as in config.json."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"


@dataclass(frozen=True, slots=True)
class HFTensor:
    """A tensor of a Hugging Face checkpoint by its name and its symbolic shape.

    In the name, `{layer}` stands for the layer's number and `{expert}` for the expert's number in that layer.
    """

    name: str
    shape: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightRule:
    """A rule says which Hugging Face tensors a Megatron parameter consists of, and how it is split.

    `names`: the parameter's name in Megatron's local layer spec, then in the Transformer Engine spec if it differs. A
    rule with `{expert}` in its names holds for every expert. A model has no such parameter if one of its sizes is 0.
    """

    names: tuple[str, ...]
    partition: Partition
    tensors: tuple[HFTensor, ...]
    layers: Layers = Layers.ALL
    # Whether the parameter is float32 whatever the model's dtype.
    is_float32: bool = False
    # The tensor that this parameter copies if embeddings are tied; such copies are loaded but never written.
    tied_to: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family describes models with one weight table: the architectures that it covers, and their Megatron options.

    `defaults`: transformers' defaults for keys missing in config.json, where they differ from the common rule.
    `required`: the values that certain keys may have; with other values the model would differ from this table. The
    first one is transformers' default for a missing key.
    `ignored`: tensors that a checkpoint may contain although nothing reads them.
    `expert_ffn_key`: the key of config.json that holds the width of an expert, for families with experts.
    `normalizes_experts`: whether the routing weights of a token's experts add up to 1; None: `norm_topk_prob` says.
    `group_rating`: how many of its best experts a group of experts is scored by, for families with groups.
    `biased_routers`: routing scores are sigmoids, with a bias that is used only to choose experts; else softmax.
    `norms_add_one`: norms scale by 1 + w. `scales_embedding`: embeddings are multiplied by √hidden.
    """

    name: str
    architectures: tuple[str, ...]
    weights: tuple[WeightRule, ...]
    qk_layernorm: bool = False
    qkv_bias: bool = False
    activation: Activation = Activation.SILU
    norms_add_one: bool = False
    scales_embedding: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    required: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    expert_ffn_key: str | None = None
    normalizes_experts: bool | None = None
    group_rating: int | None = None
    biased_routers: bool = False

    @property
    def value_architectures(self) -> tuple[str, ...]:
        """Return transformers' names for the same models with a scalar head."""
        return tuple(name.replace("ForCausalLM", "ForSequenceClassification") for name in self.architectures)

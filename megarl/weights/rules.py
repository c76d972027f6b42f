"""What a weight table is made of: rules, each for one Megatron parameter, and families of models.

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
    """What an MLP applies to its gate, under the names that a config.json has for it."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"


@dataclass(frozen=True, slots=True)
class HFTensor:
    """A tensor of the checkpoint: its name and its symbolic shape.

    In the name `{layer}` is the number of the layer, `{expert}` that of the expert in it.
    """

    name: str
    shape: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightRule:
    """One Megatron parameter and the Hugging Face tensors it is made of.

    `names`: the parameter's names, by the local spec and by Transformer Engine's where they differ. A rule with
    `{expert}` in its names holds for every expert of a layer. A model one of whose sizes is 0 lacks the parameter.
    """

    names: tuple[str, ...]
    partition: Partition
    tensors: tuple[HFTensor, ...]
    layers: Layers = Layers.ALL
    # Whether it is in float32 whatever the model's type.
    is_float32: bool = False
    # The tensor this parameter is a copy of when embeddings are tied; such copies are loaded, never written.
    tied_to: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model family: the architectures it covers, Megatron options, and its weight table.

    `defaults`: what transformers takes for keys that a config.json leaves out, where that is not the common rule.
    `required`: the values of keys whose other values change the model in ways that this table does not describe; the
    first is what transformers takes for a key that is left out.
    `ignored`: tensors that a checkpoint may carry though nothing reads them.
    `expert_ffn_key`: the key of a config.json that holds the width of an expert, for families with experts.
    `normalizes_experts`: whether the weights of a token's experts add up to 1; None: `norm_topk_prob` says.
    `group_rating`: by how many of its best experts a group of experts is rated, for families that have groups.
    `biased_routers`: routers score by sigmoid, with a bias that counts only for the choice; else by softmax.
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
        """What transformers calls the same models with a scalar head."""
        return tuple(name.replace("ForCausalLM", "ForSequenceClassification") for name in self.architectures)

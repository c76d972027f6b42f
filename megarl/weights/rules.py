"""Define weight rules (which tensors make up a Megatron parameter), families, and the constants by which a model
multiplies what its layers pass on, without torch or megatron.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from megarl.config.lora import Target

# How the names of a vision tower's parameters begin in a model of megarl, then follow those of transformers' model.
TOWER = "tower.model."


class Partition(StrEnum):
    """The way in which Megatron splits a parameter over tensor-parallel ranks."""

    REPLICATED = "replicated"
    VOCAB = "vocab"  # rows of the vocabulary, padded at the end
    ROWS = "rows"  # output features of a column-parallel layer
    KEY_ROWS = "key_rows"  # the same of key heads alone, of which engine workers may repeat some
    COLUMNS = "columns"  # input features of a row-parallel layer
    GATE_UP = "gate_up"  # two row-split matrices, stacked on each rank
    QKV = "qkv"  # per key/value group: its query heads, its key head, its value head
    GATED_QKV = "gated_qkv"  # per group: its query heads, their gates, its key head, its value head
    DELTA_HEADS = "delta_heads"  # per key head of a gated delta net: its rows of every tensor
    # Parameters whose tensors are transposed: the last axis of a row-split one, whose gate's and up's features take
    # turns there, and the first axis of a column-split one.
    GATE_UP_IN_TURNS = "gate_up_in_turns"
    TRANSPOSED_COLUMNS = "transposed_columns"


class Layers(StrEnum):
    """The layers that have a parameter: all, or those of one kind of MLP or attention."""

    ALL = "all"
    DENSE = "dense"  # those with one MLP
    EXPERTS = "experts"  # those with experts in its place
    ATTENTION = "attention"  # those with softmax attention
    LINEAR = "linear"  # those with a gated delta net in its place


class Activation(StrEnum):
    """The activation function that an MLP applies to its gate, named as in config.json."""

    SILU = "silu"
    CLAMPED_SWIGLU = "clamped_swiglu"  # gpt-oss's: min(g, 7)·σ(1.702·min(g, 7)) times 1 + an up within [−7, 7]
    GELU_TANH = "gelu_pytorch_tanh"


@dataclass(frozen=True, slots=True)
class HFTensor:
    """A tensor of a Hugging Face checkpoint: its name, and its shape in symbols such as "hidden" (see `Dims`).

    Numbers in the shape are sizes themselves. In the name, `{layer}` stands for the layer's number and `{expert}` for
    the expert's number in that layer.
    `of_expert`: set if the tensor has all experts of its layer, along one more axis, the first, than `shape` says: the
    name under which engines take the part of one expert.
    is_transposed: whether the checkpoint has the axes of `shape` in reverse; engines take them as they are.
    """

    name: str
    shape: tuple[str, ...]
    of_expert: str | None = None
    is_transposed: bool = False

    @property
    def sent_name(self) -> str:
        """Return the name under which engines take the tensor, or one expert's part of it."""
        return self.of_expert or self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightRule:
    """The Hugging Face tensors that make up a Megatron parameter, and how the parameter is split over ranks.

    `names`: the parameter's name in Megatron's local layers, then in Transformer Engine's if it differs. A rule with
    `{expert}` in its names applies to every expert. If a size in its shape is 0, the model has no such parameter.
    `tensors`: those of the same name are sections of one tensor, in the order of its rows.
    """

    names: tuple[str, ...]
    partition: Partition
    tensors: tuple[HFTensor, ...]
    layers: Layers = Layers.ALL
    # Whether the parameter is float32 whatever the model's dtype.
    is_float32: bool = False
    # The tensor that this parameter copies if embeddings are tied; such copies are loaded but never written.
    tied_to: str | None = None

    @property
    def is_embedding(self) -> bool:
        """Return whether this is the embedding of the vocabulary, with which the first pipeline stage begins."""
        return self.names[0].startswith("embedding.")

    @property
    def is_of_tower(self) -> bool:
        """Return whether this is a parameter of a vision tower, which the first pipeline stage has."""
        return self.names[0].startswith(TOWER)

    @property
    def is_router(self) -> bool:
        """Return whether this is a parameter of a router of experts."""
        return ".router." in self.names[0]


def weight_rule(
    partition: Partition,
    names: str,
    *tensors: tuple[str, str],
    layers: Layers = Layers.ALL,
    is_float32: bool = False,
    tied_to: str | None = None,
) -> WeightRule:
    """Return a rule, given its names separated by bars, and each tensor's name and shape in words."""
    return WeightRule(
        names=tuple(names.split(" | ")),
        partition=partition,
        tensors=tuple(HFTensor(name, tuple(shape.split())) for name, shape in tensors),
        layers=layers,
        is_float32=is_float32,
        tied_to=tied_to,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A group of architectures that share a weight table and Megatron options.

    `defaults`: values for keys missing in config.json, where transformers' default differs from the common one. Only
    families with a default for `sliding_window` have windows, and for `partial_rotary_factor` heads that rope turns in
    part.
    `required`: key of config.json → supported values (the table fits no others). The first one is transformers' default
    for a missing key.
    `ignored`: tensors that a checkpoint may contain although nothing reads them.
    `qk_layernorm`, `qkv_bias`: whether queries and keys have norms and biases; or the key of config.json that says so.
    `untrained`: how names of further tensors begin, which exports have as they were read, such as a vision tower's.
    `section`: the key of config.json that holds the settings of the language model, if it is part of a larger model.
    `language`: the `model_type` there, for architectures that have one of several language models.
    `expert_ffn_key`: the key of config.json that holds the width of an expert, for families with experts.
    `lost_in_peft`: the layers whose adapters PEFT leaves out: it takes experts for one tensor, or others for experts.
    `normalizes_experts`: whether a token's routing weights are normalised to sum 1; None: `norm_topk_prob` says.
    `group_rating`: how many best experts' scores make up the score of a group of experts, for families with groups.
    `biased_routers`: routing scores are sigmoids, with a bias that is used only to choose experts; else softmax.
    `gates_shared_expert`: a sigmoid scales the output of the shared expert.
    `ends_on_every_stage`: vLLM builds the vocabulary, the last norm and the head on every pipeline stage.
    `linear_biases`: projections of attention outputs, experts and routers have biases. `sinks`: attention has sinks.
    `norms_add_one`: norms scale by 1 + w. `scales_embedding`: embeddings are multiplied by √hidden.
    `vision`: how names of tensors of the tower that trained models read images with begin in files → in transformers'
    model. `interleaves_mrope`: axes of positions take turns among frequencies. `sees_whole_images`: tokens of an image
    attend to each other, also to later ones.
    `ignored_rope`: keys of config.json's rope parameters that change nothing for texts.
    `gated_attention`: the output of softmax attention is multiplied by sigmoids that q_proj computes as well.
    `norms_before`, `norms_after`: attention and MLP begin with a norm; what they add to the residual stream has one.
    `wide_qk_norm`: queries have a norm over all heads together, and so have keys; `qk_layernorm`: each head has one.
    Families with the former have `qk_norm_type` per_layer among their defaults, as published MiniMax-M2 files have it.
    `local_rope`: rope of layers with a window is never scaled, and may have another θ (`rope_local_base_freq`).
    """

    name: str
    architectures: tuple[str, ...]
    weights: tuple[WeightRule, ...]
    qk_layernorm: bool | str = False
    qkv_bias: bool | str = False
    activation: Activation = Activation.SILU
    linear_biases: bool = False
    sinks: bool = False
    norms_add_one: bool = False
    norms_before: bool = True
    norms_after: bool = False
    wide_qk_norm: bool = False
    local_rope: bool = False
    scales_embedding: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    required: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    untrained: tuple[str, ...] = ()
    section: str | None = None
    language: str | None = None
    expert_ffn_key: str | None = None
    lost_in_peft: Target | None = None
    normalizes_experts: bool | None = None
    group_rating: int | None = None
    biased_routers: bool = False
    gates_shared_expert: bool = False
    ends_on_every_stage: bool = False
    ignored_rope: tuple[str, ...] = ()
    vision: Mapping[str, str] = field(default_factory=dict)
    interleaves_mrope: bool = False
    sees_whole_images: bool = False
    gated_attention: bool = False

    @property
    def value_architectures(self) -> tuple[str, ...]:
        """Return the names of these architectures with a scalar head (…ForSequenceClassification), if they have one."""
        names = (name for name in self.architectures if name.endswith("ForCausalLM"))
        return tuple(name.replace("ForCausalLM", "ForSequenceClassification") for name in names)


# A family whose models have these keys has defaults for them.
MULTIPLIER_KEYS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
# transformers takes these for Granite's where config.json has none.
NO_MULTIPLIERS = dict.fromkeys(MULTIPLIER_KEYS, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Multipliers:
    """The factors of embeddings, of attention scores (None: 1/√head_dim), and of what attention and MLP add to the
    residual stream; logits are divided by `logits_divisor`.
    """

    embedding: float = 1.0
    attention: float | None = None
    residual: float = 1.0
    logits_divisor: float = 1.0


def read_multipliers(family: Family, config: Mapping[str, Any]) -> Multipliers:
    """Read the multipliers of a model of this family from its config.json."""
    embedding, attention, residual, logits_divisor = map(config.get, MULTIPLIER_KEYS)
    return Multipliers(
        embedding=config["hidden_size"] ** 0.5 if family.scales_embedding else float(embedding or 1.0),
        attention=None if attention is None else float(attention),
        residual=1.0 if residual is None else float(residual),
        logits_divisor=float(logits_divisor or 1.0),
    )

"""Model families as data: which Hugging Face tensor lies where in which Megatron parameter.

Adding a family is adding a `Family` below: no code elsewhere knows a model's name. Loading, export, sync, validation
and the plan's sizes all derive from the same rows. Nothing here imports torch or megatron.
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
    `{expert}` in its names holds for every expert of a layer.
    """

    names: tuple[str, ...]
    partition: Partition
    tensors: tuple[HFTensor, ...]
    layers: Layers = Layers.ALL
    # The tensor this parameter is a copy of when embeddings are tied; such copies are loaded, never written.
    tied_to: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model family: the architectures it covers, Megatron options, and its weight table.

    `defaults`: what transformers takes for keys that a config.json leaves out, where that is not the common rule.
    `required`: values of keys whose other values change the model in ways that this table does not describe.
    `ignored`: tensors that a checkpoint may carry though nothing reads them.
    `expert_ffn_key`: the key of a config.json that holds the width of an expert, for families with experts.
    `normalizes_experts`: whether the weights of a token's experts add up to 1; None: `norm_topk_prob` says.
    """

    name: str
    architectures: tuple[str, ...]
    weights: tuple[WeightRule, ...]
    qk_layernorm: bool = False
    qkv_bias: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    required: Mapping[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    expert_ffn_key: str | None = None
    normalizes_experts: bool | None = None

    @property
    def value_architectures(self) -> tuple[str, ...]:
        """What transformers calls the same models with a scalar head."""
        return tuple(name.replace("ForCausalLM", "ForSequenceClassification") for name in self.architectures)


def _rule(
    partition: Partition,
    names: str,
    *tensors: tuple[str, str],
    layers: Layers = Layers.ALL,
    tied_to: str | None = None,
) -> WeightRule:
    return WeightRule(
        names=tuple(names.split(" | ")),
        partition=partition,
        tensors=tuple(HFTensor(name, tuple(shape.split())) for name, shape in tensors),
        layers=layers,
        tied_to=tied_to,
    )


_L, _HF = "decoder.layers.{layer}.", "model.layers.{layer}."

# The scalar head of a critic or reward model; a language model's checkpoint has none.
VALUE_HEAD = "score.weight"
# What a scalar head takes the place of.
OUTPUT_HEAD = "lm_head.weight"

_DECODER = (
    _rule(Partition.VOCAB, "embedding.word_embeddings.weight", ("model.embed_tokens.weight", "vocab hidden")),
    _rule(Partition.REPLICATED, "decoder.final_layernorm.weight", ("model.norm.weight", "hidden")),
    _rule(Partition.VOCAB, "output_layer.weight", (OUTPUT_HEAD, "vocab hidden"), tied_to="model.embed_tokens.weight"),
    _rule(Partition.REPLICATED, "value_head.weight", (VALUE_HEAD, "one hidden")),
    _rule(
        Partition.REPLICATED,
        f"{_L}input_layernorm.weight | {_L}self_attention.linear_qkv.layer_norm_weight",
        (f"{_HF}input_layernorm.weight", "hidden"),
    ),
    _rule(
        Partition.QKV,
        f"{_L}self_attention.linear_qkv.weight",
        (f"{_HF}self_attn.q_proj.weight", "q hidden"),
        (f"{_HF}self_attn.k_proj.weight", "kv hidden"),
        (f"{_HF}self_attn.v_proj.weight", "kv hidden"),
    ),
    _rule(
        Partition.COLUMNS,
        f"{_L}self_attention.linear_proj.weight",
        (f"{_HF}self_attn.o_proj.weight", "hidden q"),
    ),
    _rule(
        Partition.REPLICATED,
        f"{_L}pre_mlp_layernorm.weight | {_L}mlp.linear_fc1.layer_norm_weight",
        (f"{_HF}post_attention_layernorm.weight", "hidden"),
    ),
)

_DENSE_MLP = (
    _rule(
        Partition.GATE_UP,
        f"{_L}mlp.linear_fc1.weight",
        (f"{_HF}mlp.gate_proj.weight", "ffn hidden"),
        (f"{_HF}mlp.up_proj.weight", "ffn hidden"),
        layers=Layers.DENSE,
    ),
    _rule(
        Partition.COLUMNS,
        f"{_L}mlp.linear_fc2.weight",
        (f"{_HF}mlp.down_proj.weight", "hidden ffn"),
        layers=Layers.DENSE,
    ),
)


def _expert_mlps(block: str, gate: str, up: str, down: str) -> tuple[WeightRule, ...]:
    """Router and experts; `block`, `gate`, `up` and `down` are what a checkpoint calls them."""
    local, grouped = f"{_L}mlp.experts.local_experts.{{expert}}.", f"{_L}mlp.experts."
    return (
        _rule(
            Partition.REPLICATED,
            f"{_L}mlp.router.weight",
            (f"{_HF}{block}.gate.weight", "experts hidden"),
            layers=Layers.EXPERTS,
        ),
        _rule(
            Partition.GATE_UP,
            f"{local}linear_fc1.weight | {grouped}linear_fc1.weight{{expert}}",
            (f"{_HF}{block}.experts.{{expert}}.{gate}.weight", "expert_ffn hidden"),
            (f"{_HF}{block}.experts.{{expert}}.{up}.weight", "expert_ffn hidden"),
            layers=Layers.EXPERTS,
        ),
        _rule(
            Partition.COLUMNS,
            f"{local}linear_fc2.weight | {grouped}linear_fc2.weight{{expert}}",
            (f"{_HF}{block}.experts.{{expert}}.{down}.weight", "hidden expert_ffn"),
            layers=Layers.EXPERTS,
        ),
    )


_QK_NORM = (
    _rule(
        Partition.REPLICATED,
        f"{_L}self_attention.q_layernorm.weight",
        (f"{_HF}self_attn.q_norm.weight", "head_dim"),
    ),
    _rule(
        Partition.REPLICATED,
        f"{_L}self_attention.k_layernorm.weight",
        (f"{_HF}self_attn.k_norm.weight", "head_dim"),
    ),
)

_QKV_BIAS = (
    _rule(
        Partition.QKV,
        f"{_L}self_attention.linear_qkv.bias",
        (f"{_HF}self_attn.q_proj.bias", "q"),
        (f"{_HF}self_attn.k_proj.bias", "kv"),
        (f"{_HF}self_attn.v_proj.bias", "kv"),
    ),
)

FAMILIES = (
    Family(
        name="llama",
        architectures=("LlamaForCausalLM",),
        weights=_DECODER + _DENSE_MLP,
        required={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
        ignored=(f"{_HF}self_attn.rotary_emb.inv_freq",),
    ),
    Family(
        name="mistral",
        architectures=("MistralForCausalLM",),
        weights=_DECODER + _DENSE_MLP,
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
        required={"hidden_act": "silu"},
    ),
    Family(
        name="qwen2",
        architectures=("Qwen2ForCausalLM",),
        weights=_DECODER + _DENSE_MLP + _QKV_BIAS,
        qkv_bias=True,
        defaults={"num_key_value_heads": 32, "sliding_window": 4096, "use_sliding_window": False},
        required={"hidden_act": "silu"},
    ),
    Family(
        name="qwen3",
        architectures=("Qwen3ForCausalLM",),
        weights=_DECODER + _DENSE_MLP + _QK_NORM,
        qk_layernorm=True,
        defaults={
            "num_key_value_heads": 32,
            "head_dim": 128,
            "sliding_window": 4096,
            "use_sliding_window": False,
        },
        required={"hidden_act": "silu", "attention_bias": False},
    ),
    Family(
        name="qwen3_moe",
        architectures=("Qwen3MoeForCausalLM",),
        weights=_DECODER + _DENSE_MLP + _expert_mlps("mlp", "gate_proj", "up_proj", "down_proj") + _QK_NORM,
        qk_layernorm=True,
        defaults={
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "use_sliding_window": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": None,
            "norm_topk_prob": False,
        },
        required={"hidden_act": "silu", "attention_bias": False},
        expert_ffn_key="moe_intermediate_size",
    ),
    Family(
        name="mixtral",
        architectures=("MixtralForCausalLM",),
        weights=_DECODER + _expert_mlps("block_sparse_moe", "w1", "w3", "w2"),
        defaults={"num_key_value_heads": 8, "rope_theta": 1000000.0},
        required={"hidden_act": "silu", "router_jitter_noise": 0.0},
        expert_ffn_key="intermediate_size",
        normalizes_experts=True,
    ),
)

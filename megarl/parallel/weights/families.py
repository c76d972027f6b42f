"""Model families as data: how a Hugging Face config becomes Megatron's, and which tensor lies where.

Adding a family is adding a `Family` below: no code elsewhere knows a model's name. Loading, export, sync and
validation all derive from the same rows. Nothing here imports torch or megatron.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from megarl.errors import ConfigError
from megarl.parallel.rope import RopeScaling, read_rope_scaling


class Partition(StrEnum):
    """How Megatron splits a parameter over tensor-parallel ranks."""

    REPLICATED = "replicated"
    VOCAB = "vocab"  # rows of the vocabulary, padded at the end
    ROWS = "rows"  # output features of a column-parallel layer
    COLUMNS = "columns"  # input features of a row-parallel layer
    GATE_UP = "gate_up"  # two row-split matrices, stacked on each rank
    QKV = "qkv"  # per key/value group: its query heads, its key head, its value head


@dataclass(frozen=True, slots=True, kw_only=True)
class Dims:
    """Sizes of a model, from its Hugging Face config. `dim(name)` resolves the symbols of the weight tables."""

    num_layers: int
    hidden: int
    ffn: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    tied: bool

    def dim(self, symbol: str) -> int:
        return {
            "one": 1,
            "hidden": self.hidden,
            "ffn": self.ffn,
            "vocab": self.vocab,
            "head_dim": self.head_dim,
            "q": self.num_heads * self.head_dim,
            "kv": self.num_kv_heads * self.head_dim,
        }[symbol]


@dataclass(frozen=True, slots=True)
class HFTensor:
    """A tensor of the checkpoint: its name (`{layer}` is the global layer) and its symbolic shape."""

    name: str
    shape: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightRule:
    """One Megatron parameter and the Hugging Face tensors it is made of.

    `names`: the parameter's names, by the local spec and by Transformer Engine's where they differ.
    """

    names: tuple[str, ...]
    partition: Partition
    tensors: tuple[HFTensor, ...]
    # The tensor this parameter is a copy of when embeddings are tied; such copies are loaded, never written.
    tied_to: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model family: the architectures it covers, Megatron options, and its weight table.

    `defaults`: what transformers takes for keys that a config.json leaves out, where that is not the common rule.
    `required`: values of keys whose other values change the model in ways that this table does not describe.
    `ignored`: tensors that a checkpoint may carry though nothing reads them.
    """

    name: str
    architectures: tuple[str, ...]
    weights: tuple[WeightRule, ...]
    qk_layernorm: bool = False
    qkv_bias: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    required: Mapping[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()


def _rule(partition: Partition, names: str, *tensors: tuple[str, str], tied_to: str | None = None) -> WeightRule:
    return WeightRule(
        names=tuple(names.split(" | ")),
        partition=partition,
        tensors=tuple(HFTensor(name, tuple(shape.split())) for name, shape in tensors),
        tied_to=tied_to,
    )


_L, _HF = "decoder.layers.{layer}.", "model.layers.{layer}."

# The scalar head of a critic or reward model; a language model's checkpoint has none.
VALUE_HEAD = "score.weight"

_DENSE_DECODER = (
    _rule(Partition.VOCAB, "embedding.word_embeddings.weight", ("model.embed_tokens.weight", "vocab hidden")),
    _rule(Partition.REPLICATED, "decoder.final_layernorm.weight", ("model.norm.weight", "hidden")),
    _rule(
        Partition.VOCAB, "output_layer.weight", ("lm_head.weight", "vocab hidden"), tied_to="model.embed_tokens.weight"
    ),
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
    _rule(
        Partition.GATE_UP,
        f"{_L}mlp.linear_fc1.weight",
        (f"{_HF}mlp.gate_proj.weight", "ffn hidden"),
        (f"{_HF}mlp.up_proj.weight", "ffn hidden"),
    ),
    _rule(Partition.COLUMNS, f"{_L}mlp.linear_fc2.weight", (f"{_HF}mlp.down_proj.weight", "hidden ffn")),
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
        weights=_DENSE_DECODER,
        required={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
        ignored=(f"{_HF}self_attn.rotary_emb.inv_freq",),
    ),
    Family(
        name="mistral",
        architectures=("MistralForCausalLM",),
        weights=_DENSE_DECODER,
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
        required={"hidden_act": "silu"},
    ),
    Family(
        name="qwen2",
        architectures=("Qwen2ForCausalLM",),
        weights=_DENSE_DECODER + _QKV_BIAS,
        qkv_bias=True,
        defaults={"num_key_value_heads": 32, "sliding_window": 4096, "use_sliding_window": False},
        required={"hidden_act": "silu"},
    ),
    Family(
        name="qwen3",
        architectures=("Qwen3ForCausalLM",),
        weights=_DENSE_DECODER + _QK_NORM,
        qk_layernorm=True,
        defaults={
            "num_key_value_heads": 32,
            "head_dim": 128,
            "sliding_window": 4096,
            "use_sliding_window": False,
        },
        required={"hidden_act": "silu", "attention_bias": False},
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model directory, read: its family, sizes and the settings Megatron needs besides."""

    path: Path
    family: Family
    dims: Dims
    rope_theta: float
    rope_scaling: RopeScaling
    norm_eps: float
    max_positions: int
    hf_config: Mapping[str, Any]

    def expected_tensors(self, *, scalar_head: bool = False) -> dict[str, tuple[int, ...]]:
        """Every Hugging Face tensor of this model with its full shape, in the table's order by layer.

        With a scalar head the model has that instead of an output embedding.
        """
        absent = "lm_head.weight" if scalar_head else VALUE_HEAD
        return {
            tensor.name.format(layer=layer): tuple(self.dims.dim(s) for s in tensor.shape)
            for layer, rule in self.rules()
            if not self.is_copy(rule)
            for tensor in rule.tensors
            if tensor.name != absent
        }

    def ignored_tensors(self) -> tuple[str, ...]:
        """Tensors that a checkpoint of this model may carry though nothing reads them."""
        copies = [tensor.name for _, rule in self.rules() if self.is_copy(rule) for tensor in rule.tensors]
        names = [name.format(layer=layer) for name in self.family.ignored for layer in range(self.dims.num_layers)]
        return (*copies, *names)

    def is_copy(self, rule: WeightRule) -> bool:
        """Whether a rule's parameter is a copy of another tensor in this model."""
        return self.dims.tied and rule.tied_to is not None

    def rules(self) -> Iterator[tuple[int | None, WeightRule]]:
        """(global layer or None, rule) for every parameter of the model."""
        table = self.family.weights
        yield from ((None, rule) for rule in table if "{layer}" not in rule.names[0])
        for layer in range(self.dims.num_layers):
            yield from ((layer, rule) for rule in table if "{layer}" in rule.names[0])

    def parameter_rules(self) -> dict[str, tuple[int | None, WeightRule]]:
        """Megatron parameter name (global layer numbers) → its layer and rule."""
        return {name.format(layer=layer): (layer, rule) for layer, rule in self.rules() for name in rule.names}


def find_family(architectures: object) -> Family:
    """The family of a config's `architectures`; an unknown one is refused by name."""
    names = tuple(architectures) if isinstance(architectures, list | tuple) else ()
    for family in FAMILIES:
        if any(name in family.architectures for name in names):
            return family
    known = sorted(a for family in FAMILIES for a in family.architectures)
    raise ConfigError(
        f"model architecture {list(names)} is not supported; known: {known} "
        f"(a family is a table in megarl/parallel/weights/families.py)"
    )


def read_model_spec(path: str | Path) -> ModelSpec:
    """Read `config.json` of a model directory, with the file or key at fault in every message."""
    directory = Path(path)
    file = directory / "config.json"
    if not file.is_file():
        raise ConfigError(f"model.path: {file} does not exist; give a Hugging Face model directory")
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise ConfigError(f"{file}: not JSON ({error}); copy the model again") from error
    family = find_family(config.get("architectures"))
    config = {**family.defaults, **config}
    try:
        _require_described(file, family, config)
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        return ModelSpec(
            path=directory,
            family=family,
            dims=_read_dims(config),
            rope_theta=float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
            rope_scaling=read_rope_scaling(rope, str(file)),
            norm_eps=float(config["rms_norm_eps"]),
            max_positions=config["max_position_embeddings"],
            hf_config=config,
        )
    except KeyError as error:
        raise ConfigError(f"{file}: key {error} is missing; it is needed for a {family.name} model") from error
    except (TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{file}: a number is of the wrong type ({error}); copy the model again") from error


def _require_described(file: Path, family: Family, config: Mapping[str, Any]) -> None:
    """Refuse variants of a family that its table does not describe."""
    for key, value in family.required.items():
        if config.get(key, value) != value:
            raise ConfigError(
                f"{file}: {key}: got {config[key]!r}, expected {value!r}; other variants of {family.name} "
                f"are not supported"
            )
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    positions = config["max_position_embeddings"]
    if window is not None and window < positions:
        raise ConfigError(
            f"{file}: sliding_window: got {window}, expected null or >= max_position_embeddings={positions}, since "
            f"attention here is full; set max_position_embeddings to {window} to train within the window"
        )


def _read_dims(config: Mapping[str, Any]) -> Dims:
    heads = config["num_attention_heads"]
    return Dims(
        num_layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        ffn=config["intermediate_size"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocab=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", False)),
    )

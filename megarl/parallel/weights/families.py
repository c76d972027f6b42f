"""Model families as data: how a Hugging Face config becomes Megatron's, and which tensor lies where.

Adding a family is adding a `Family` below: no code elsewhere knows a model's name. Loading, export, sync and
validation all derive from the same rows. Nothing here imports torch or megatron.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from megarl.errors import ConfigError


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
    only_untied: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model family: the architectures it covers, Megatron options, and its weight table."""

    name: str
    architectures: tuple[str, ...]
    qk_layernorm: bool
    qkv_bias: bool
    weights: tuple[WeightRule, ...]


def _rule(partition: Partition, names: str, *tensors: tuple[str, str], only_untied: bool = False) -> WeightRule:
    return WeightRule(
        names=tuple(names.split(" | ")),
        partition=partition,
        tensors=tuple(HFTensor(name, tuple(shape.split())) for name, shape in tensors),
        only_untied=only_untied,
    )


_L, _HF = "decoder.layers.{layer}.", "model.layers.{layer}."

_DENSE_DECODER = (
    _rule(Partition.VOCAB, "embedding.word_embeddings.weight", ("model.embed_tokens.weight", "vocab hidden")),
    _rule(Partition.REPLICATED, "decoder.final_layernorm.weight", ("model.norm.weight", "hidden")),
    _rule(Partition.VOCAB, "output_layer.weight", ("lm_head.weight", "vocab hidden"), only_untied=True),
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

FAMILIES = (
    Family(
        name="qwen3",
        architectures=("Qwen3ForCausalLM",),
        qk_layernorm=True,
        qkv_bias=False,
        weights=_DENSE_DECODER + _QK_NORM,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model directory, read: its family, sizes and the settings Megatron needs besides."""

    path: Path
    family: Family
    dims: Dims
    rope_theta: float
    norm_eps: float
    max_positions: int
    hf_config: Mapping[str, Any]

    def expected_tensors(self) -> dict[str, tuple[int, ...]]:
        """Every Hugging Face tensor of this model with its full shape, in the table's order by layer."""
        return {
            tensor.name.format(layer=layer): tuple(self.dims.dim(s) for s in tensor.shape)
            for layer, rule in self.rules()
            for tensor in rule.tensors
        }

    def rules(self) -> Iterator[tuple[int | None, WeightRule]]:
        """(global layer or None, rule) for every parameter of the model."""
        table = [r for r in self.family.weights if not (r.only_untied and self.dims.tied)]
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
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type != "default":
        raise ConfigError(f"{file}: rope type {rope_type!r} is not supported for {family.name}; expected 'default'")
    _refuse_unsupported(file, config)
    try:
        heads = config["num_attention_heads"]
        dims = Dims(
            num_layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            ffn=config["intermediate_size"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads", heads),
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocab=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", False)),
        )
        return ModelSpec(
            path=directory,
            family=family,
            dims=dims,
            rope_theta=float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
            norm_eps=float(config["rms_norm_eps"]),
            max_positions=config["max_position_embeddings"],
            hf_config=config,
        )
    except KeyError as error:
        raise ConfigError(f"{file}: key {error} is missing; it is needed for a {family.name} model") from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{file}: a number is of the wrong type ({error}); copy the model again") from error


def _refuse_unsupported(file: Path, config: Mapping[str, Any]) -> None:
    """Settings that the trainer would silently ignore."""
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ConfigError(f"{file}: hidden_act is {activation!r}, expected 'silu'; other activations are not supported")
    if config.get("use_sliding_window"):
        raise ConfigError(f"{file}: use_sliding_window is true; sliding-window attention is not supported")

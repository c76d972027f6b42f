"""Read the sizes of a model from its Hugging Face config, and look them up by the symbols that weight tables use."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megarl.errors import ConfigError
from megarl.weights.attention import FULL, LINEAR, read_rotary_fraction, read_windows
from megarl.weights.tables import Family, Layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A model's experts: their number, how many each token is routed to, their width, and the layers that have them.

    shared_ffn: width of all shared experts together. routing: how groups of experts limit it; None: there are none.
    normalized: whether a token's routing weights are normalised to sum 1; else they are the router's probabilities.
    gates_shared: whether the output of the shared experts is multiplied by a sigmoid of a projection.
    """

    num: int
    per_token: int
    ffn: int
    normalized: bool
    layers: tuple[int, ...]
    shared_ffn: int = 0
    gates_shared: bool = False
    routing: "Routing | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Group-limited routing, in which a token may only use experts from its best `groups_per_token` groups of experts.

    A group's score is the sum of the scores of its `group_rating` best experts. Routing weights are multiplied by
    `scale`. biased: scores are sigmoids, and a bias affects only the choice (DeepSeek-V3); else softmax (DeepSeek-V2).
    """

    num_groups: int
    groups_per_token: int
    group_rating: int
    scale: float
    biased: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """The sizes of multi-head latent attention: both latents and, per head, keys without and with RoPE, and values.

    q_latent is 0 if queries are computed without a latent.
    """

    q_latent: int
    kv_latent: int
    nope: int
    rope: int
    values: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNet:
    """The sizes of the gated delta nets that some layers have in place of softmax attention, and those layers.

    Equally many value heads belong to each key head. key_dim, value_dim: widths of a head. conv_width: the tokens that
    the convolutions before queries, keys and values see.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    layers: frozenset[int]

    @property
    def sizes(self) -> Mapping[str, int]:
        """Return the sizes for the symbols of the weight tables."""
        keys, values = self.num_key_heads * self.key_dim, self.num_value_heads * self.value_dim
        return {
            "delta_key_heads": self.num_key_heads,
            "delta_value_heads": self.num_value_heads,
            "delta_value_head": self.value_dim,
            "delta_keys": keys,
            "delta_values": values,
            "delta_qkvz": 2 * keys + 2 * values,
            "delta_ba": 2 * self.num_value_heads,
            "conv": self.conv_width,
        }


@dataclass(frozen=True, kw_only=True)
class Dims:
    """The sizes of a model. `dim(symbol)` returns the size for a symbol of the weight tables, such as "hidden".

    windows: of each layer, how many positions a token attends to, its own included, or None for all; () if all do.
    rotary_fraction: the share of each head's dimensions that rope turns. qkv_bias, qk_norm: whether queries and keys
    have biases, as values do then, and norms. num_norms: a layer's norms of the hidden size. gated: whether q_proj
    computes gates too.
    """

    num_layers: int
    hidden: int
    ffn: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    experts: Experts | None = None
    latent: LatentAttention | None = None
    gated: bool = False
    windows: tuple[int | None, ...] = ()
    rotary_fraction: float = 1.0
    delta: DeltaNet | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    num_norms: int = 2

    def dim(self, symbol: str) -> int:
        # Tensors of a vision tower have numbers in the place of symbols.
        return int(symbol) if symbol.isdecimal() else self._sizes[symbol]

    # Cached because plans of large models look sizes up a million times.
    @functools.cached_property
    def _sizes(self) -> Mapping[str, int]:
        experts, latent = self.experts, self.latent
        sizes = {
            "one": 1,
            "hidden": self.hidden,
            "ffn": self.ffn,
            "vocab": self.vocab,
            "head_dim": self.head_dim,
            "kv_heads": self.num_kv_heads,
            "heads": self.num_heads,
            "q": self.num_heads * self.head_dim,
            "two_q": 2 * self.num_heads * self.head_dim,
            "kv": self.num_kv_heads * self.head_dim,
            "q_bias": self.num_heads * self.head_dim if self.qkv_bias else 0,
            "kv_bias": self.num_kv_heads * self.head_dim if self.qkv_bias else 0,
            "qk_norm": self.head_dim if self.qk_norm else 0,
            "experts": experts.num if experts else 0,
            "expert_ffn": experts.ffn if experts else 0,
            "expert_gate_up": 2 * experts.ffn if experts else 0,
            "shared_ffn": experts.shared_ffn if experts else 0,
        }
        if self.delta is not None:
            sizes |= self.delta.sizes
        if latent is None:
            return sizes
        return sizes | {
            "q_latent": latent.q_latent,
            "q_without_latent": 0 if latent.q_latent else self.num_heads * self.head_dim,
            "kv_latent": latent.kv_latent,
            "kv_latent_and_rope": latent.kv_latent + latent.rope,
            "keys_and_values": self.num_heads * (latent.nope + latent.values),
            "values": self.num_heads * latent.values,
        }

    def window_of(self, layer: int, num_tokens: int) -> int:
        """Return how many positions of a row of so many tokens its last token attends to in a layer, if it attends."""
        if self.kinds_of(layer)[1] is Layers.LINEAR:
            return 0
        window = self.windows[layer] if self.windows else None
        return num_tokens if window is None else min(window, num_tokens)

    @property
    def has_equal_layers(self) -> bool:
        """Return whether all layers have parameters of the same kinds; Megatron then stacks them in checkpoints."""
        return len({self.kinds_of(layer) for layer in range(self.num_layers)}) == 1

    def kind_of(self, layer: int) -> Layers:
        """Return whether a layer has one dense MLP or experts."""
        return Layers.EXPERTS if self.experts and layer in self.experts.layers else Layers.DENSE

    def kinds_of(self, layer: int) -> tuple[Layers, Layers]:
        """Return the kinds of a layer's MLP and of its attention."""
        is_linear = self.delta is not None and layer in self.delta.layers
        return self.kind_of(layer), Layers.LINEAR if is_linear else Layers.ATTENTION


def read_dims(family: Family, config: Mapping[str, Any]) -> Dims:
    """Read the sizes of a model of this family from its config.json."""
    heads, latent = config["num_attention_heads"], None
    if "kv_lora_rank" in config:
        latent = LatentAttention(
            q_latent=int(config["q_lora_rank"] or 0),
            kv_latent=config["kv_lora_rank"],
            nope=config["qk_nope_head_dim"],
            rope=config["qk_rope_head_dim"],
            values=config["v_head_dim"],
        )
    head_dim = latent.nope + latent.rope if latent else config.get("head_dim") or config["hidden_size"] // heads
    return Dims(
        num_layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        ffn=config["intermediate_size"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        vocab=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", False)),
        experts=_read_experts(family, config),
        latent=latent,
        delta=_read_delta(config),
        gated=family.gated_attention,
        windows=read_windows(config),
        rotary_fraction=read_rotary_fraction(config),
        qkv_bias=bool(config[family.qkv_bias] if isinstance(family.qkv_bias, str) else family.qkv_bias),
        qk_norm=bool(config[family.qk_layernorm] if isinstance(family.qk_layernorm, str) else family.qk_layernorm),
        num_norms=2 * (family.norms_before + family.norms_after),
    )


def _read_delta(config: Mapping[str, Any]) -> DeltaNet | None:
    if "linear_num_key_heads" not in config:
        return None
    num_layers, every = config["num_hidden_layers"], config.get("full_attention_interval", 4)
    # Published files give the interval, transformers lists the layers.
    pattern = [LINEAR if (layer + 1) % every else FULL for layer in range(num_layers)]
    return DeltaNet(
        num_key_heads=config["linear_num_key_heads"],
        num_value_heads=config["linear_num_value_heads"],
        key_dim=config["linear_key_head_dim"],
        value_dim=config["linear_value_head_dim"],
        conv_width=config["linear_conv_kernel_dim"],
        layers=frozenset(i for i, kind in enumerate(config.get("layer_types") or pattern) if kind == LINEAR),
    )


def _read_experts(family: Family, config: Mapping[str, Any]) -> Experts | None:
    if family.expert_ffn_key is None:
        return None
    # Transformers 5 writes the second name in place of the first; DeepSeek uses the third.
    key = next((key for key in ("num_experts", "num_local_experts") if key in config), "n_routed_experts")
    normalized = config["norm_topk_prob"] if family.normalizes_experts is None else family.normalizes_experts
    return Experts(
        num=config[key],
        per_token=config["num_experts_per_tok"],
        ffn=config[family.expert_ffn_key],
        normalized=normalized,
        layers=read_expert_layers(config),
        shared_ffn=config.get("shared_expert_intermediate_size")
        or (config.get("n_shared_experts") or 0) * config[family.expert_ffn_key],
        gates_shared=family.gates_shared_expert,
        routing=None
        if family.group_rating is None
        else _read_routing(family, family.group_rating, config, config[key]),
    )


def read_expert_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Read which layers have experts: in Qwen3-MoE every n-th, with exceptions; in DeepSeek all but the first, which
    others list.
    """
    without, every = config.get("mlp_only_layers") or (), config.get("decoder_sparse_step", 1)
    kinds = enumerate(config.get("mlp_layer_types") or ["sparse"] * config["num_hidden_layers"])
    layers = [layer for layer, kind in kinds if kind == "sparse" and layer >= config.get("first_k_dense_replace", 0)]
    return tuple(each for each in layers if each not in without and (each + 1) % every == 0)


def _read_routing(family: Family, group_rating: int, config: Mapping[str, Any], num_experts: int) -> Routing:
    grouped = config.get("topk_method") != "greedy"
    num_groups, groups_per_token = (config[key] if grouped else 1 for key in ("n_group", "topk_group"))
    seen = groups_per_token * num_experts // num_groups
    if config["num_experts_per_tok"] > seen:
        raise ConfigError(
            f"num_experts_per_tok: got {config['num_experts_per_tok']}, expected at most {seen}, the experts in "
            f"topk_group={groups_per_token} of n_group={num_groups} groups; copy the model's config.json again"
        )
    return Routing(
        num_groups=num_groups,
        groups_per_token=groups_per_token,
        group_rating=group_rating,
        scale=float(config["routed_scaling_factor"]),
        biased=family.biased_routers,
    )

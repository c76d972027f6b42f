"""Compare the keys of a config.json that say the same thing, of which trainer and engines may read different ones."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megarl.errors import ConfigError
from megarl.weights.attention import FULL, LINEAR, SLIDING
from megarl.weights.dims import read_expert_layers
from megarl.weights.rules import Family

# Names of one number. Transformers maps most to each other (`attribute_map`), published files have the others.
_SYNONYMS = (
    ("dtype", "torch_dtype"),
    ("num_nextn_predict_layers", "num_mtp_layers"),
    # vLLM sizes its cache by the first that a file has, whatever the architecture.
    ("num_key_value_heads", "n_head_kv", "num_kv_heads", "multi_query_group_num", "num_attention_groups"),
)
_EXPERT_SYNONYMS = (
    ("num_experts", "moe_num_experts", "num_local_experts", "n_routed_experts"),
    ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "top_k_experts", "moe_topk", "moe_top_k"),
)
# Further names of rope types, as vLLM takes them.
_OLD_ROPE_TYPES = {"su": "longrope", "mrope": "default"}
# Engines read these in the language model's section of a larger model's file, and never above it.
_OF_SECTION = (
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim vocab_size "
    "max_position_embeddings rms_norm_eps rope_theta rope_scaling rope_parameters layer_types sliding_window "
    "tie_word_embeddings"
)


def check_twins(file: Path, family: Family, raw: Mapping[str, Any]) -> None:
    """Raise ConfigError if two keys of a config.json, which say the same thing, differ; null says nothing."""
    section = raw.get(family.section or "", {})
    config = {**section, **raw}
    shared = [key for key in _OF_SECTION.split() if key in section and key in raw]
    pairs = [
        *((f"{family.section}.{key}", section[key], key, raw[key]) for key in shared),
        *(
            (given[0], config[given[0]], name, config[name])
            for names in _SYNONYMS + (_EXPERT_SYNONYMS if family.expert_ffn_key else ())
            for given in [[name for name in names if config.get(name) is not None]]
            for name in given[1:]
        ),
        *_pairs_of_rope(family, config),
        *_pairs_of_layers(family, config),
    ]
    for name, value, other, twin in pairs:
        if value is not None and twin is not None and value != twin:
            raise ConfigError(
                f"{file}: {name}: got {value!r}, but {other} says {twin!r}, and trainer and engines would read "
                f"different ones; remove or correct the one that is wrong"
            )


_Pairs = Iterator[tuple[str, object, str, object]]


def _pairs_of_rope(family: Family, config: Mapping[str, Any]) -> _Pairs:
    """Yield the settings of rope that are given twice: transformers 5 writes `rope_parameters`, by layer type where
    these differ, and takes `rope_scaling` before it, which people add by hand.
    """
    parameters, scaling = (config.get(key) or {} for key in ("rope_parameters", "rope_scaling"))
    local = parameters.get(SLIDING) or {}
    parameters = parameters.get(FULL, parameters)
    for key, rope in (("rope_parameters", parameters), ("rope_scaling", scaling), ("rope_parameters", local)):
        old = str(rope["type"]) if rope.get("type") else None
        yield f"{key}.type", old and _OLD_ROPE_TYPES.get(old, old), f"{key}.rope_type", rope.get("rope_type")
        if rope is not local:
            # Not partial_rotary_factor: beside another one in rope_parameters, transformers writes its default.
            for name in ("rope_theta", "original_max_position_embeddings"):
                yield f"{key}.{name}", rope.get(name), name, config.get(name)
    theta = config.get("rope_local_base_freq")
    yield "rope_parameters.sliding_attention.rope_theta", local.get("rope_theta"), "rope_local_base_freq", theta
    if (width := config.get("rotary_dim")) is not None and config.get("head_dim"):
        for where, rope in (("rope_parameters.", parameters), ("rope_scaling.", scaling)):
            fraction = rope.get("partial_rotary_factor")
            turned = None if fraction is None else round(fraction * config["head_dim"])
            yield f"{where}partial_rotary_factor × head_dim", turned, "rotary_dim", width
    if parameters and scaling:
        theta = config.get("rope_theta") or family.defaults.get("rope_theta", 10000.0)
        whole = [
            {
                **{key: value for key, value in rope.items() if value is not None and key != "type"},
                "rope_theta": rope.get("rope_theta") or theta,
                "rope_type": rope.get("rope_type") or rope.get("type") or "default",
            }
            for rope in (scaling, parameters)
        ]
        yield "rope_scaling", whole[0], "rope_parameters", whole[1]


def _pairs_of_layers(family: Family, config: Mapping[str, Any]) -> _Pairs:
    """Yield the kinds of layers from lists of them and from numbers that describe them too."""
    windowed = "sliding_window" in family.defaults and config.get("sliding_window")
    described = (
        # Not max_window_layers: beside other layer_types, transformers writes its default.
        ("layer_types", "full_attention_interval", lambda n, every: LINEAR if n % every else FULL),
        # Not `_sliding_window_pattern`: transformers writes its default beside any list.
        *(
            [("layer_types", "sliding_window_pattern", lambda n, every: SLIDING if n % every else FULL)]
            if windowed and config.get("use_sliding_window", True)
            else []
        ),
    )
    for key, name, kind_of in described:
        if (number := config.get(name)) is not None:
            for layer, kind in enumerate(config.get(key) or ()):
                yield f"{key}[{layer}]", kind, f"{name}={number}", kind_of(layer + 1, number)
    if not family.expert_ffn_key:
        return
    whole = {**family.defaults, **config}
    layers, first = range(whole["num_hidden_layers"]), whole.get("first_k_dense_replace", 0)
    stated = {"mlp_layer_types": [kind == "sparse" for kind in config.get("mlp_layer_types") or ()]}
    # Engines of DeepSeek's kind read it, besides first_k_dense_replace; trainers do not.
    if (freq := config.get("moe_layer_freq")) is not None:
        every = [freq > 0 and n >= first and n % freq == 0 for n in layers] if isinstance(freq, int) else freq
        stated[f"moe_layer_freq={freq}"] = every
    others = [*read_expert_layers({**whole, "mlp_layer_types": None})]
    for name, has_experts in stated.items():
        found = [layer for layer, has in enumerate(has_experts) if has] if has_experts else None
        yield f"layers with experts by {name}", found, "the file's other keys", others

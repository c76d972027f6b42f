"""Faults for `megarl bisect` to name: a seeded list over families, layouts, sides and layers.

A fault is a changed copy of a model's directory, or a change of transformers' model, which stands for the engine's.
"""

import json
import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from megarl.bisect.search import ENGINE, TRAINER

Tensors = dict[str, torch.Tensor]
# One of each: plain, scaled rope, biases, norms of heads, fused tensors, multipliers, 1 + w with windows and caps, two
# kinds of rope, norms after blocks, experts with sinks.
FAMILIES = (*("llama", "llama-3", "qwen2", "qwen3", "phi3", "granite", "gemma2", "gemma3", "olmo3", "qwen3_moe"),)
NUM_LAYERS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a fault is put: a layer, and a part of a tensor by a seed."""

    layer: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A kind of fault. names: what it may be called. families: those that have what it spoils.

    keys: of config.json, by value. tensors: changes a copy's tensors. model: changes transformers' model, and
    `recorded`: an option of `record_transformers`; then it is the engine's alone.
    """

    names: tuple[str, ...]
    families: tuple[str, ...] = FAMILIES
    keys: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None
    tensors: Callable[[Tensors, Tensors, Place], None] | None = None
    model: Callable[[Any, Place], None] | None = None
    recorded: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A fault of the list."""

    kind: str
    family: str
    side: str
    tp: int
    place: Place


def draw(seed: int, count: int) -> list[Drawn]:
    """Each kind as often as every other, each time in a family, a layout and a place of the draw."""
    rng, drawn = random.Random(seed), list[Drawn]()
    while len(drawn) < count:
        kinds = sorted(FAULTS)
        rng.shuffle(kinds)
        for kind in kinds:
            fault = FAULTS[kind]
            sides = (ENGINE,) if fault.model or fault.recorded else (ENGINE, TRAINER)
            place = Place(layer=rng.randrange(NUM_LAYERS), seed=rng.randrange(1000))
            drawn.append(
                Drawn(
                    kind=kind,
                    family=rng.choice(fault.families),
                    side=rng.choice(sides),
                    tp=rng.choice((1, 2)),
                    place=place,
                )
            )
    return drawn[:count]


def faulty_copy(model: Path, older: Path, fault: Fault, place: Place, target: Path) -> Path:
    """Write the model with a fault. older: the same model with other weights."""
    shutil.copytree(model, target)
    if fault.keys is not None:
        file = target / "config.json"
        config = json.loads(file.read_text())
        file.write_text(json.dumps({**config, **fault.keys(config)}))
    if fault.tensors is not None:
        file = target / "model.safetensors"
        tensors = load_file(file)
        fault.tensors(tensors, load_file(older / "model.safetensors"), place)
        save_file(tensors, file, {"format": "pt"})
    return target


def _named(tensors: Tensors, place: Place, *ends: str) -> str:
    names = [name for name in tensors if f".layers.{place.layer}." in name and name.endswith(ends)]
    return random.Random(place.seed).choice(sorted(names))


_ROWS, _COLUMNS = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "qkv_proj.weight"), ("o_proj.weight",)


def _stale(tensors: Tensors, older: Tensors, place: Place) -> None:
    name = _named(tensors, place, *_ROWS, *_COLUMNS)
    tensors[name] = older[name]


def _stale_half(tensors: Tensors, older: Tensors, place: Place) -> None:
    name = _named(tensors, place, *_ROWS)
    half = len(tensors[name]) // 2
    tensors[name][half:] = older[name][half:]


def _stale_norm(tensors: Tensors, older: Tensors, place: Place) -> None:
    name = _named(tensors, place, "layernorm.weight")
    tensors[name] = older[name]


def _swapped_rows(tensors: Tensors, _: Tensors, place: Place) -> None:
    name = _named(tensors, place, *_ROWS)
    tensors[name] = torch.cat(list(reversed(tensors[name].chunk(2)))).contiguous()


def _swapped_columns(tensors: Tensors, _: Tensors, place: Place) -> None:
    name = _named(tensors, place, "o_proj.weight")
    tensors[name] = torch.cat(list(reversed(tensors[name].chunk(2, 1))), 1).contiguous()


def _other_layer(tensors: Tensors, _: Tensors, place: Place) -> None:
    name = _named(tensors, place, *_ROWS, *_COLUMNS)
    tensors[name] = tensors[name.replace(f".{place.layer}.", f".{(place.layer + 1) % NUM_LAYERS}.")].clone()


def _dropped(tensors: Tensors, _: Tensors, place: Place) -> None:
    name = _named(tensors, place, *_ROWS, *_COLUMNS)
    tensors[name][: len(tensors[name]) // 2] = 0


def _flipped(tensors: Tensors, _: Tensors, place: Place) -> None:
    """One bit: the lowest of the exponent."""
    name = _named(tensors, place, "o_proj.weight", "q_proj.weight", "qkv_proj.weight")
    flat = tensors[name].view(-1).view(torch.int32)
    at = place.seed * 7919 % len(flat)
    flat[at] ^= 1 << 23


def _scaled(tensors: Tensors, _: Tensors, place: Place) -> None:
    tensors[_named(tensors, place, *_ROWS, *_COLUMNS)] *= 1.125


def _embedding(tensors: Tensors, _: Tensors, place: Place) -> None:
    rows = tensors["model.embed_tokens.weight"]
    rows[: len(rows) // 2] = rows.roll(1, 0)[: len(rows) // 2]


def _stale_head(tensors: Tensors, older: Tensors, _: Place) -> None:
    tensors["lm_head.weight"] = older["lm_head.weight"]


def _without_head(tensors: Tensors, _: Tensors, __: Place) -> None:
    del tensors["lm_head.weight"]


def _no_bias(tensors: Tensors, _: Tensors, place: Place) -> None:
    tensors[_named(tensors, place, "_proj.bias")].zero_()


def _offset_by(change: float) -> Callable[[Tensors, Tensors, Place], None]:
    def spoil(tensors: Tensors, _: Tensors, place: Place) -> None:
        tensors[_named(tensors, place, "input_layernorm.weight", "q_norm.weight", "k_norm.weight")] += change

    return spoil


def _layer(hf: Any, place: Place) -> Any:
    return getattr(hf.model, "language_model", hf.model).layers[place.layer]


def _no_qk_norm(hf: Any, place: Place) -> None:
    setattr(_layer(hf, place).self_attn, random.Random(place.seed).choice(("q_norm", "k_norm")), torch.nn.Identity())


def _padded_head(hf: Any, place: Place) -> None:
    hf.lm_head.register_forward_hook(lambda m, a, y: torch.nn.functional.pad(y, (0, 3 + place.seed)))


def _rounded(hf: Any, place: Place) -> None:
    layer = _layer(hf, place).self_attn
    layer.o_proj.register_forward_hook(lambda m, a, y: y.bfloat16().float())


def _rope(key: str, value: Any) -> Callable[[dict[str, Any]], Mapping[str, Any]]:
    def change(config: dict[str, Any]) -> Mapping[str, Any]:
        if "rope_parameters" in config:
            return {"rope_parameters": {**config["rope_parameters"], key: value}}
        return {key: value}

    return change


_PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
FAULTS = {
    "rope theta": Fault(
        names=("rope theta",),
        families=("llama", "qwen2", "qwen3", "granite", "qwen3_moe"),
        keys=_rope("rope_theta", 1e6),
    ),
    "rope scaling left out": Fault(
        names=("rope scaling",), families=("llama-3",), keys=lambda _: {"rope_parameters": _PLAIN}
    ),
    "linear rope": Fault(
        names=("rope scaling",),
        families=("llama-3",),
        keys=lambda _: {"rope_parameters": {**_PLAIN, "rope_type": "linear", "factor": 2.0}},
    ),
    "rotary fraction": Fault(names=("rotary fraction",), families=("phi3",), keys=_rope("partial_rotary_factor", 1.0)),
    "norm offset": Fault(names=("norm offset",), families=("gemma2", "gemma3"), tensors=_offset_by(-1.0)),
    "norm offset, the other way": Fault(
        names=("norm offset",), families=("llama", "qwen2", "qwen3", "granite"), tensors=_offset_by(1.0)
    ),
    "norm eps": Fault(names=("norm eps",), keys=lambda c: {"rms_norm_eps": 4 * c["rms_norm_eps"]}),
    "QK norm": Fault(names=("norm absent",), families=("qwen3", "qwen3_moe", "gemma3"), model=_no_qk_norm),
    "bias": Fault(names=("bias",), families=("qwen2",), tensors=_no_bias),
    "temperature": Fault(names=("temperature",), recorded={"temperature": 0.7}),
    "vocabulary padding": Fault(
        names=("vocabulary padding",), families=("llama", "qwen2", "qwen3", "olmo3"), model=_padded_head
    ),
    "tied head": Fault(
        names=("tied head",),
        families=("llama", "qwen2", "qwen3", "phi3", "olmo3"),
        keys=lambda _: {"tie_word_embeddings": True},
        tensors=_without_head,
    ),
    "logit cap": Fault(names=("logit cap",), families=("gemma2",), keys=lambda _: {"final_logit_softcapping": None}),
    "score cap": Fault(names=("score cap",), families=("gemma2",), keys=lambda _: {"attn_logit_softcapping": None}),
    "score scale": Fault(
        names=("score scale",), families=("gemma2", "gemma3"), keys=lambda _: {"query_pre_attn_scalar": 48}
    ),
    "multiplier": Fault(names=("multiplier",), families=("granite",), keys=lambda _: {"residual_multiplier": 1.0}),
    "window": Fault(names=("window",), families=("gemma2", "gemma3", "olmo3"), keys=lambda _: {"sliding_window": 128}),
    "window by one": Fault(
        names=("window",), families=("gemma2", "gemma3", "olmo3"), keys=lambda _: {"sliding_window": 8}
    ),
    "dtype": Fault(names=("dtype",), model=_rounded),
    "KV cache": Fault(names=("KV cache",), recorded={"stale_keys": 16}),
    "stale weight": Fault(names=("stale weight",), tensors=_stale),
    "stale slice": Fault(names=("stale weight",), tensors=_stale_half),
    "stale norm": Fault(names=("stale weight",), tensors=_stale_norm),
    "interchanged rows": Fault(names=("misplaced weight",), tensors=_swapped_rows),
    "interchanged columns": Fault(names=("misplaced weight",), tensors=_swapped_columns),
    "another layer's": Fault(names=("misplaced weight",), tensors=_other_layer),
    "dropped slice": Fault(names=("missing weight",), tensors=_dropped),
    "one bit": Fault(names=("one element",), tensors=_flipped),
    "scale": Fault(names=("scale",), tensors=_scaled),
    "rows of the embedding": Fault(names=("misplaced weight",), tensors=_embedding),
    "stale head": Fault(names=("stale weight",), tensors=_stale_head),
}

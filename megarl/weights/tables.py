"""Register model families, which describe as data which Hugging Face tensors make up each Megatron parameter.

To support another one, register a `Family` in `dense_families` or `expert_families`, or in a plugin
(`algo.plugins`); no other code knows the name of a model. Loading, export, weight sync, validation and estimates of
sizes all derive from these tables. Nothing here imports torch or megatron.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from megarl.registry import RegistrationError, Registry
from megarl.weights.blocks import OUTPUT_HEAD, VALUE_HEAD
from megarl.weights.rules import Family, HFTensor, Layers, Partition, WeightRule

__all__ = [
    "FAMILIES",
    "OUTPUT_HEAD",
    "REFUSED",
    "VALUE_HEAD",
    "Family",
    "HFTensor",
    "Layers",
    "Partition",
    "WeightRule",
    "register_family",
    "register_multimodal",
]

# By architecture, why a known one is refused.
REFUSED: Mapping[str, str] = {
    "Ministral3ForCausalLM": "vLLM does not scale its queries by their positions, since it reads llama_4_scaling where "
    "config.json has llama_4_scaling_beta; use a model of another architecture",
}

FAMILIES: Registry[Family] = Registry("model family", key="config.json: architectures")


def register_family(family: Family) -> Family:
    """Register a family, to which models belong whose config.json names one of its architectures."""
    for other in FAMILIES.entries().values():
        if (both := set(family.architectures) & set(other.architectures)) and family.language == other.language:
            raise RegistrationError(
                f"model family {family.name!r}: has the architecture {min(both)}, which {other.name} has already; "
                "remove it from one of them"
            )
    return FAMILIES.register(family.name)(family)


def register_multimodal(
    text: Family,
    *,
    name: str,
    architecture: str,
    prefix: str = "model.language_model.",
    head: str = OUTPUT_HEAD,
    vision: Mapping[str, str] = MappingProxyType({"model.visual.": "visual."}),
    defaults: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> Family:
    """Register the family of a published model that has one of the family `text` as its language model.

    The tensors of its decoder begin with `prefix` instead of "model.", those of its tower as `vision` says (see
    `Family`). head: the name of its output embedding. defaults: values of keys that published files leave out. options:
    other fields that differ from those of `text`.
    """
    return register_family(
        replace(
            text,
            name=name,
            architectures=(architecture,),
            weights=_with_prefix(text.weights, prefix, head=head),
            section="text_config",
            untrained=(*vision, *text.untrained),
            vision=dict(vision),
            defaults={**text.defaults, **defaults},
            **options,
        )
    )


def _with_prefix(weights: tuple[WeightRule, ...], prefix: str, *, head: str) -> tuple[WeightRule, ...]:
    """Return rules whose tensors begin with `prefix` instead of "model.", and whose output embedding is `head`."""

    def renamed(name: str) -> str:
        name = head if name == OUTPUT_HEAD else name
        return prefix + name.removeprefix("model.") if name.startswith("model.") else name

    return tuple(
        replace(
            rule,
            tensors=tuple(
                replace(tensor, name=renamed(tensor.name), of_expert=tensor.of_expert and renamed(tensor.of_expert))
                for tensor in rule.tensors
            ),
            tied_to=rule.tied_to and renamed(rule.tied_to),
        )
        for rule in weights
    )

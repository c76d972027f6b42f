"""Read the constants by which a model multiplies what its layers pass on, as Granite and Gemma do."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megarl.weights.rules import Family

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

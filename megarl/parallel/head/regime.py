"""Which regime a micro-batch's head works in, and how many rows at a time. Imports no torch: a dry run asks too."""

from enum import StrEnum

# Of logits in work at a time: enough rows for a GEMM at full speed, and little beside a model's other memory.
CHUNK_BYTES = 128 << 20
# Automatic chunks are multiples of it, as GEMMs like.
CHUNK_MULTIPLE = 64
AUTO = "auto"


class Regime(StrEnum):
    """What the head keeps between forward and backward: nothing, the logits, or the inputs' gradients already."""

    RECOMPUTE = "recompute"
    KEEP = "keep"
    IN_CHUNK = "in_chunk"


def choose_regime(setting: str, *, logits_bytes: int, memory_bytes: int, token_local: bool) -> Regime:
    """The regime named, or under `auto` the fastest: keep if the logits fit into the budget, else in_chunk if the
    loss allows it, else recompute. All ranks that share a pack must be told the same."""
    if setting != AUTO:
        return Regime(setting)
    if logits_bytes <= memory_bytes:
        return Regime.KEEP
    return Regime.IN_CHUNK if token_local else Regime.RECOMPUTE


def automatic_chunk(num_rows: int, num_logits: int, itemsize: int) -> int:
    """Rows whose `num_logits` logits each fill `CHUNK_BYTES`, no more than there are; `CHUNK_MULTIPLE` at least."""
    fitting = CHUNK_BYTES // max(1, num_logits * itemsize) // CHUNK_MULTIPLE * CHUNK_MULTIPLE
    return max(1, min(num_rows, max(fitting, CHUNK_MULTIPLE)))

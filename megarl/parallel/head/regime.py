"""Choose the head's memory regime for a micro-batch, and how many rows it works on at a time. Imports no torch."""

from enum import StrEnum

# Automatic chunks have a multiple of this many rows, which is efficient for GEMMs.
CHUNK_MULTIPLE = 64
# The logits of an automatic chunk take at most this much memory, unless `CHUNK_MULTIPLE` rows already take more.
MAX_CHUNK_BYTES = 512 << 20
AUTO = "auto"


class Regime(StrEnum):
    """What the head keeps between forward and backward: nothing, the logits, or the finished gradients of its
    inputs.
    """

    RECOMPUTE = "recompute"
    KEEP = "keep"
    IN_CHUNK = "in_chunk"


def choose_regime(setting: str, *, logits_bytes: int, memory_bytes: int, token_local: bool) -> Regime:
    """Return the regime that the setting names, or the fastest one if it is `auto`.

    The fastest is keep if the logits fit into the budget, else in_chunk if the loss allows it, else recompute. All
    ranks that share a pack must choose the same.
    """
    if setting != AUTO:
        return Regime(setting)
    if logits_bytes <= memory_bytes:
        return Regime.KEEP
    return Regime.IN_CHUNK if token_local else Regime.RECOMPUTE


def automatic_chunk(num_rows: int, *, hidden: int, num_logits: int, itemsize: int) -> int:
    """Choose how many rows, of `num_logits` logits each, to work on at a time.

    The logits take half as much memory as the weight shard [num_logits, hidden]. So their memory is proportional to
    that of the weights, and a chunk's GEMMs are large compared with reading the weight and writing its gradient. There
    are never more rows than `num_rows`, nor more than `MAX_CHUNK_BYTES` of logits.
    """
    fitting = min(hidden // 2, MAX_CHUNK_BYTES // max(1, num_logits * itemsize))
    return max(1, min(num_rows, max(fitting // CHUNK_MULTIPLE, 1) * CHUNK_MULTIPLE))

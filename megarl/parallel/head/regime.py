"""Choose the regime of a micro-batch's head and its chunk of rows. Imports no torch: a dry run asks too."""

from enum import StrEnum

# Automatic chunks have a multiple of this many rows, which is efficient for GEMMs.
CHUNK_MULTIPLE = 64
# The logits of an automatic chunk take at most this much memory, unless `CHUNK_MULTIPLE` rows already take more.
MAX_CHUNK_BYTES = 512 << 20
AUTO = "auto"


class Regime(StrEnum):
    """Says what the head keeps between forward and backward: nothing, the logits, or the inputs' gradients already."""

    RECOMPUTE = "recompute"
    KEEP = "keep"
    IN_CHUNK = "in_chunk"


def choose_regime(setting: str, *, logits_bytes: int, memory_bytes: int, token_local: bool) -> Regime:
    """Choose the regime named, or under `auto` the fastest.

    That is keep if the logits fit into the budget, else in_chunk if the loss allows it, else recompute. All ranks that
    share a pack must be told the same.
    """
    if setting != AUTO:
        return Regime(setting)
    if logits_bytes <= memory_bytes:
        return Regime.KEEP
    return Regime.IN_CHUNK if token_local else Regime.RECOMPUTE


def automatic_chunk(num_rows: int, *, hidden: int, num_logits: int, itemsize: int) -> int:
    """Choose how many rows, of `num_logits` logits each, to work on at a time.

    Their logits take half of what the weight shard [num_logits, hidden] takes. So the memory is in proportion to the
    weights', and a chunk's GEMMs are large enough beside the reading of the weight and the writing of its gradient. No
    more rows than there are; `MAX_CHUNK_BYTES` of logits at most.
    """
    fitting = min(hidden // 2, MAX_CHUNK_BYTES // max(1, num_logits * itemsize))
    return max(1, min(num_rows, max(fitting // CHUNK_MULTIPLE, 1) * CHUNK_MULTIPLE))

"""Choose how much memory the log-prob head trades for speed: its memory mode, and how many tokens it processes at a
time.

This module does not import torch, so that `--dry-run` can use it quickly.
"""

from enum import StrEnum

# Automatic chunks have a multiple of this many rows, which is efficient for GEMMs.
CHUNK_MULTIPLE = 64
# The logits of an automatic chunk take at most this much memory, unless `CHUNK_MULTIPLE` rows already take more.
MAX_CHUNK_BYTES = 512 << 20
AUTO = "auto"


class HeadMemoryMode(StrEnum):
    """The tensors that the log-prob head keeps from forward to backward: none (recompute), the logits (keep), or the
    finished gradients of its inputs (in_chunk).
    """

    RECOMPUTE = "recompute"
    KEEP = "keep"
    IN_CHUNK = "in_chunk"


def choose_memory_mode(setting: str, *, logits_bytes: int, memory_bytes: int, token_local: bool) -> HeadMemoryMode:
    """Return the memory mode that the setting names, or the fastest possible one if the setting is `auto`.

    The fastest is keep if the logits fit into `memory_bytes`, else in_chunk if `token_local`, else recompute. All ranks
    that share a pack must choose the same mode.
    """
    if setting != AUTO:
        return HeadMemoryMode(setting)
    if logits_bytes <= memory_bytes:
        return HeadMemoryMode.KEEP
    return HeadMemoryMode.IN_CHUNK if token_local else HeadMemoryMode.RECOMPUTE


def automatic_chunk(num_rows: int, *, hidden: int, num_logits: int, itemsize: int) -> int:
    """Choose how many tokens, with `num_logits` logits each, the log-prob head processes at a time.

    A chunk's logits take half the memory of the weight shard [num_logits, hidden], up to `MAX_CHUNK_BYTES`. So they are
    proportional to the weights, and a chunk's GEMMs take long compared with reading the weight and writing its
    gradient. The result is a multiple of 64 (at least 64), but never more than `num_rows`.
    """
    fitting = min(hidden // 2, MAX_CHUNK_BYTES // max(1, num_logits * itemsize))
    return max(1, min(num_rows, max(fitting // CHUNK_MULTIPLE, 1) * CHUNK_MULTIPLE))

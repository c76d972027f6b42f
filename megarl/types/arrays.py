"""Name the types of arrays with a value per token, join them, and check that they fit their tokens."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

IntArray: TypeAlias = npt.NDArray[np.int64]
# Token ids, which are int64 only on devices.
IdArray: TypeAlias = npt.NDArray[np.int32]
FloatArray: TypeAlias = npt.NDArray[np.float32]
BoolArray: TypeAlias = npt.NDArray[np.bool_]
ExpertArray: TypeAlias = npt.NDArray[np.int16]
NucleusArray: TypeAlias = npt.NDArray[np.int32]


def joined(parts: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return arrays end to end; a single one is returned itself, and none are an empty array of this dtype.

    >>> joined([np.array([1, 2]), np.array([3])], np.int32).tolist()
    [1, 2, 3]
    """
    return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, dtype), *parts])


def ordering_key(numbers: npt.NDArray[np.integer]) -> bytes:
    """Return bytes that are ordered as sequences of integers from 0 to 2³² − 1 are, by the first that differs.

    >>> ordering_key(np.array([1, 255])) < ordering_key(np.array([1, 256])) < ordering_key(np.array([1, 256, 0]))
    True
    """
    # The highest byte comes first.
    return numbers.astype(">u4").tobytes()


def with_unrouted(experts: ExpertArray | None, num_more: int) -> ExpertArray | None:
    """Append tokens whose experts nobody recorded (-1) to experts by token; None, for no records at all, stays None.

    >>> with_unrouted(np.array([[[3]]], np.int16), 2).ravel().tolist()
    [3, -1, -1]
    """
    if experts is None:
        return None
    return np.concatenate([experts, np.full((num_more, *experts.shape[1:]), -1, experts.dtype)])


def require_experts_of_tokens(experts: ExpertArray | None, num_tokens: int, whose: str) -> None:
    """Raise ValueError unless `experts`, if it was recorded, has one entry for each of `num_tokens` tokens.

    >>> require_experts_of_tokens(np.zeros((2, 1, 1), np.int16), 3, "sample a/0")
    Traceback (most recent call last):
        ...
    ValueError: sample a/0: routed_experts has shape (2, 1, 1), expected (3, layers, ...
    """
    if experts is not None and (experts.ndim != 3 or len(experts) != num_tokens):
        raise ValueError(
            f"{whose}: routed_experts has shape {experts.shape}, expected ({num_tokens}, layers, experts per token)"
        )


def require_labels_in_nucleus(nucleus: NucleusArray | None, token_ids: IdArray, whose: str) -> None:
    """Raise ValueError unless each token is among those it was sampled from, `nucleus` [n, K]; rows of -1 mean all.

    >>> require_labels_in_nucleus(np.array([[7, 5], [-1, -1]]), np.array([6, 6]), "row a/0")
    Traceback (most recent call last):
        ...
    ValueError: row a/0: nucleus [7, 5] of response token 0 lacks the token itself, 6
    """
    if nucleus is None:
        return
    if nucleus.ndim != 2 or len(nucleus) != len(token_ids):
        raise ValueError(f"{whose}: nucleus has shape {nucleus.shape}, expected ({len(token_ids)}, tokens to sample)")
    lacking = np.flatnonzero((nucleus >= 0).any(1) & ~(nucleus == token_ids[:, None]).any(1))
    for i in lacking[:1]:
        ids = [v for v in nucleus[i].tolist() if v >= 0]
        raise ValueError(f"{whose}: nucleus {ids} of response token {i} lacks the token itself, {token_ids[i]}")

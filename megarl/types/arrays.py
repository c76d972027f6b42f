"""Name the types of arrays with a value per token, join them, and check that they fit their tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

Scalar = TypeVar("Scalar", bound=np.generic)
IntArray: TypeAlias = npt.NDArray[np.int64]
# Token ids, which are int64 only on devices.
IdArray: TypeAlias = npt.NDArray[np.int32]
FloatArray: TypeAlias = npt.NDArray[np.float32]
BoolArray: TypeAlias = npt.NDArray[np.bool_]
ExpertArray: TypeAlias = npt.NDArray[np.int16]
NucleusArray: TypeAlias = npt.NDArray[np.int32]


class VersionSpan(NamedTuple):
    """Neighbouring tokens that one version of the policy's weights sampled; -1: no policy sampled them."""

    version: int
    num_tokens: int


def version_spans(versions: Sequence[int] | IntArray) -> tuple[VersionSpan, ...]:
    """Return the spans of equal versions in a list with one version per token.

    >>> version_spans([3, 3, 4])
    (VersionSpan(version=3, num_tokens=2), VersionSpan(version=4, num_tokens=1))
    """
    return tuple(VersionSpan(version, len(list(own))) for version, own in groupby(np.asarray(versions).tolist()))


def token_versions(spans: Sequence[VersionSpan]) -> IntArray:
    """Return the version of each token.

    >>> token_versions(version_spans([3, 3, 4])).tolist()
    [3, 3, 4]
    """
    return np.repeat(*np.array(spans, dtype=np.int64).reshape(-1, 2).T)


@dataclass(frozen=True, slots=True, kw_only=True)
class LikelyTokens:
    """The likeliest tokens in place of each of n tokens, by a teacher or by the engine that sampled it.

    ids: [n, K], -1 where there are fewer. logprobs: [n, K] float32 in nats, −∞ where there are fewer; they are
    normalised over all tokens that could have stood there. The last id of an engine that does not truncate is that of
    the token it sampled where this is not among the likeliest K − 1, else -1.
    """

    ids: NucleusArray
    logprobs: FloatArray

    def __post_init__(self) -> None:
        if self.ids.ndim != 2 or self.ids.shape != self.logprobs.shape:
            raise ValueError(
                f"likely tokens: got ids {self.ids.shape} and log-probs {self.logprobs.shape}, expected "
                "the same [tokens, K] of both"
            )

    @classmethod
    def joined(cls, parts: "Sequence[LikelyTokens | None]", lengths: Sequence[int]) -> "LikelyTokens | None":
        """Return those of neighbouring tokens end to end, as `stacked` does; None if all are missing."""
        ids = stacked([None if part is None else part.ids for part in parts], lengths, -1)
        logprobs = stacked([None if part is None else part.logprobs for part in parts], lengths, -np.inf)
        return None if ids is None or logprobs is None else cls(ids=ids, logprobs=logprobs)

    def at(self, places: npt.NDArray[np.generic] | slice | tuple[slice, slice]) -> "LikelyTokens":
        """Return those at some of the n tokens; a pair of slices also selects some of the K."""
        return LikelyTokens(ids=self.ids[places], logprobs=self.logprobs[places])


def stacked(
    tables: Sequence[npt.NDArray[Scalar] | None], lengths: Sequence[int], fill: float
) -> npt.NDArray[Scalar] | None:
    """Return tables [n, K] of neighbouring tokens end to end, `fill` where one is missing or narrower; None if all are.

    >>> stacked([np.array([[7, 5]]), None], [1, 1], -1).tolist()
    [[7, 5], [-1, -1]]
    """
    given = [table for table in tables if table is not None]
    if not (width := max((table.shape[1] for table in given), default=0)):
        return None
    whole, start = np.full((sum(lengths), width), fill, dtype=given[0].dtype), 0
    for table, length in zip(tables, lengths, strict=True):
        if table is not None:
            whole[start : start + length, : table.shape[1]] = table
        start += length
    return whole


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

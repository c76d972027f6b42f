"""Plan which tokens of a pack attend to which: calls of megarl's own attention, and keys for Transformer Engine's."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

# Attention of sequences whose lengths lie within a step of this many tokens is computed together, padded.
_LENGTH_STEP = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """Rows of a pack whose causal attention is computed together: S rows of nearly equal length.

    keys: [S, m] each row's tokens among those of the ranks of the context-parallel group, end to end. queries: [S, n]
    those of the tokens whose outputs are computed, among this rank's T: the last n, or those of this rank. Shorter rows
    repeat their last token at the end, which no token before it sees. seen: [n, m] which keys each query sees; None:
    query i sees keys 0 to i. within: [S, n, m] those of its image, which it sees besides; None: there are none.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    seen: torch.Tensor | None
    within: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """All attention calls of a pack; places: [T] each token's place among the outputs of all calls, end to end."""

    calls: tuple[AttentionCall, ...]
    places: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredKeys:
    """The keys of rows that share prefixes, for kernels in which the queries of a row are the last of its keys.

    keys: [Σ m] all tokens of each row, as indices into the pack, end to end. query_bounds, key_bounds: [S + 1] int32
    where the own part of each row that has one begins in the pack, and its tokens in `keys`. max_queries, max_keys: the
    most of a row.
    """

    keys: torch.Tensor
    query_bounds: torch.Tensor
    key_bounds: torch.Tensor
    max_queries: int
    max_keys: int


def zigzag_indices(lengths: Sequence[int], cp: int, cp_rank: int) -> npt.NDArray[np.int64]:
    """Return a context-parallel rank's positions in a pack: chunks r and 2·cp − 1 − r of every sequence."""
    parts, offset = [], 0
    for length in lengths:
        chunk = length // (2 * cp)
        for k in (cp_rank, 2 * cp - 1 - cp_rank):
            parts.append(np.arange(offset + k * chunk, offset + (k + 1) * chunk))
        offset += length
    return np.concatenate(parts)


def plan_attention(
    sequences: Sequence[npt.NDArray[np.int64]],
    lengths: npt.NDArray[np.int64],
    device: torch.device,
    *,
    cp: int = 1,
    cp_rank: int = 0,
    images: npt.NDArray[np.int64] | None = None,
) -> AttentionPlan:
    """Plan the attention of the sequences of a pack, given as indices into it, whose own parts have these lengths.

    Where a row's own part is the longer one, the outputs of all its tokens are computed, by the scores of a triangle;
    else those of its own part. Sequences whose lengths, and whose first queries, differ by less than `_LENGTH_STEP`
    share a call. Under context parallelism they share no tokens, and each call has sequences of one length. images: of
    each token of the pack, the number of the image that it shows and sees whole; 0: none.
    """
    parts = [zigzag_indices(lengths.tolist(), cp, rank) if cp > 1 else np.arange(lengths.sum()) for rank in range(cp)]
    mine, place_of_key = parts[cp_rank], np.argsort(np.concatenate(parts))
    place_of_query, places = np.full(lengths.sum(), -1, dtype=np.int64), np.empty(len(mine), dtype=np.int64)
    place_of_query[mine] = np.arange(len(mine))
    step = 1 if cp > 1 else _LENGTH_STEP

    def first_query(sequence: npt.NDArray[np.int64], own: int) -> int:
        start = len(sequence) - own
        return start // step * step if own <= start else 0

    # Each sequence with its first query, and the number of its queries in steps.
    starts = [first_query(*each) for each in zip(sequences, lengths, strict=True)]
    queried = [
        (start, -(-(len(sequence) - start) // step), sequence)
        for start, sequence, own in zip(starts, sequences, lengths, strict=True)
        if own
    ]
    # Those that are computed whole keep the order of their lengths.
    queried.sort(key=lambda each: each[:2] if each[0] else (0, 0))

    def tensor(values: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(values).to(device)

    calls, num_outputs = [], 0
    for (start, _), members in itertools.groupby(queried, key=lambda each: each[:2]):
        rows = [sequence for *_, sequence in members]
        width = max(map(len, rows))
        columns = np.minimum(np.arange(width), np.array([[len(row) - 1] for row in rows]))
        tokens = np.stack([row[own] for row, own in zip(rows, columns, strict=True)])
        own = zigzag_indices([width], cp, cp_rank) if cp > 1 else np.arange(start, width)
        queries = place_of_query[tokens[:, own]]
        seen = tensor(own[:, None] >= np.arange(width)) if cp > 1 or start else None
        within = None if images is None else _within(images[tokens] * (columns == np.arange(width)), own, device)
        keys = tensor(place_of_key[tokens])
        calls.append(AttentionCall(queries=tensor(queries), keys=keys, seen=seen, within=within))
        for row, found in zip(rows, queries, strict=True):
            count = (len(row) - start) // cp
            places[found[:count]] = num_outputs + np.arange(count)
            num_outputs += len(own)
    return AttentionPlan(calls=tuple(calls), places=tensor(places))


def _within(shown: npt.NDArray[np.int64], own: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor | None:
    """Return which keys [S, n, m] queries, the tokens `own` of rows, see as those of their image; None: there are none.

    shown: [S, m] the number of each token's image; 0: none.
    """
    queries = shown[:, own, None]
    return torch.from_numpy((queries == shown[:, None]) & (queries > 0)).to(device) if shown.any() else None


def gather_keys(
    sequences: Sequence[npt.NDArray[np.int64]], lengths: npt.NDArray[np.int64], device: torch.device
) -> GatheredKeys:
    """Gather the keys of the sequences of a pack, given as indices into it, whose own parts have these lengths."""
    with_own = [sequence for sequence, own in zip(sequences, lengths, strict=True) if own]
    own, whole = lengths[lengths > 0], np.array([len(sequence) for sequence in with_own])

    def bounds(parts: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(np.append(0, parts.cumsum()).astype(np.int32)).to(device)

    return GatheredKeys(
        keys=torch.from_numpy(np.concatenate(with_own)).to(device),
        query_bounds=bounds(own),
        key_bounds=bounds(whole),
        max_queries=int(own.max()),
        max_keys=int(whole.max()),
    )

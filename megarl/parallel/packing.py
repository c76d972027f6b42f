"""Pack rows (one prompt with one response each) into one sequence for the model, and unpack per-token results.

A row that forks is packed as its paths, each of which is treated as a row here; results go to the row's own places.

A pack concatenates rows in order of their lengths. Rows may share prefixes, as the branches of a conversation do and
the responses to a prompt: the first row that has a token holds it, and the own part of each further row begins where it
differs from all rows before it. A filler sequence at the end makes the total length a multiple of what tensor
parallelism needs. Labels are shifted only here: position i of a row predicts token i + 1, so response token t is
predicted by the hidden state of the row's token prompt + t − 1, from which those of several rows may be predicted.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megarl.data.prefixes import held_prefixes
from megarl.types import Row
from megarl.types.rows import paths_of

# Attention of sequences whose lengths lie within a step of so many tokens is computed together, padded.
_LENGTH_STEP = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PackAlignment:
    """The numbers of which row lengths, and the total length of a pack, must be multiples under a parallel layout.

    tp: the tensor-parallel size under sequence parallelism, else 1. cp, cp_rank: the context-parallel size and rank.
    block: what must divide the tokens of every rank, because float8 has a scale per block.
    """

    tp: int = 1
    cp: int = 1
    cp_rank: int = 0
    block: int = 1

    @property
    def sequence_multiple(self) -> int:
        """Return the number that must divide the length of every sequence in a pack.

        Context parallelism splits a sequence into 2·cp chunks; each rank gets an early and a late one, for equal work.
        """
        return 2 * self.cp if self.cp > 1 else 1

    @property
    def total_multiple(self) -> int:
        return self.sequence_multiple * self.tp * self.block


@dataclass
class PackSeqParams(PackedSeqParams):
    """Megatron's PackedSeqParams, which it passes to every layer, extended by the `Pack` itself."""

    pack: "Pack | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """Rows of a pack whose causal attention is computed together: S rows of nearly equal length.

    keys: [S, m] each row's tokens among those of the ranks of the context-parallel group, end to end. queries: [S, n]
    those of the tokens whose outputs are computed, among this rank's T: the last n, or those of this rank. Shorter rows
    repeat their last token at the end, which no token before it sees. seen: [n, m] which keys each query sees; None:
    query i sees keys 0 to i.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    seen: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """All attention calls of a pack; places: [T] each token's place among the outputs of all calls, end to end."""

    calls: tuple[AttentionCall, ...]
    places: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """A micro-batch as one sequence for the model. T: this rank's tokens; N: those of them under the loss mask.

    cu_seqlens: bounds of the sequences in the whole pack, over all context-parallel ranks; a row that shares a prefix
    has only the rest of its tokens there, maybe none. attention: None if Transformer Engine computes it, by
    `cu_seqlens`. labels: [N] token ids. positions: [N] the index, among this rank's T, of the hidden state that
    predicts each label; it ascends.
    row_index, column_index: [N] each label's place in the [B, R] batch of responses, in the order of `rows`.
    kept_per_rank: how many of `positions` lie in each sequence-parallel rank's part; (N,) without sequence parallelism.
    token_rows: [T] the row of each token (of those that share it, one), -1 for padding. routed_experts: [T, layers, k]
    the experts to which tokens must be routed, -1 where the router chooses; None: it chooses all. nucleus: [N, K] the
    tokens from which each label was sampled, as in `Row`; None: from the whole vocabulary.
    likely_ids, likely_logprobs: [N, K] the tokens that a teacher would write, as in `Row`; None: no teacher was asked.
    """

    input_ids: torch.Tensor  # [1, T]
    position_ids: torch.Tensor  # [1, T]
    cu_seqlens: torch.Tensor  # [S + 1] int32
    max_length: int
    positions: torch.Tensor
    labels: torch.Tensor
    row_index: torch.Tensor
    column_index: torch.Tensor
    kept_per_rank: tuple[int, ...]
    batch_shape: tuple[int, int]
    token_rows: torch.Tensor
    shares_prefixes: bool = False
    attention: AttentionPlan | None = None
    routed_experts: torch.Tensor | None = None
    nucleus: torch.Tensor | None = None
    likely_ids: torch.Tensor | None = None
    likely_logprobs: torch.Tensor | None = None

    @property
    def packed_seq_params(self) -> PackSeqParams:
        # Where rows share prefixes, Megatron gets each token's own rotation, and need not know of rows.
        bounds = self.cu_seqlens[:: len(self.cu_seqlens) - 1] if self.shares_prefixes else self.cu_seqlens
        return PackSeqParams(
            pack=self,
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            cu_seqlens_q_padded=bounds,
            cu_seqlens_kv_padded=bounds,
            max_seqlen_q=self.max_length,
            max_seqlen_kv=self.max_length,
        )

    def scatter(self, values: torch.Tensor) -> torch.Tensor:
        """Put values [N, ...] of the kept labels into rows [B, R, ...], with 0 elsewhere; differentiable."""
        out = torch.zeros(*self.batch_shape, *values.shape[1:], dtype=values.dtype, device=values.device)
        return out.index_put((self.row_index, self.column_index), values)


def zigzag_indices(lengths: Sequence[int], cp: int, cp_rank: int) -> npt.NDArray[np.int64]:
    """Return a context-parallel rank's positions in a pack: chunks r and 2·cp − 1 − r of every sequence."""
    parts, offset = [], 0
    for length in lengths:
        chunk = length // (2 * cp)
        for k in (cp_rank, 2 * cp - 1 - cp_rank):
            parts.append(np.arange(offset + k * chunk, offset + (k + 1) * chunk))
        offset += length
    return np.concatenate(parts)


def pack_rows(
    rows: Sequence[Row],
    *,
    alignment: PackAlignment,
    device: torch.device,
    plans_attention: bool = False,
    shares_prefixes: bool = False,
    replay_routing: bool = False,
) -> Pack:
    """Pack rows into one sequence for the model.

    Under context parallelism each row is padded to a multiple of 2·cp tokens. A filler sequence at the end makes the
    total length a multiple of what tensor parallelism needs. Without rows, the pack consists of the filler: a rank
    without work must still join every collective. plans_attention: for layers whose attention is `PackedAttention`.
    shares_prefixes: rows share the tokens with which they begin alike; needs such layers, without context parallelism.
    replay_routing: route tokens to the experts that their rows recorded, if any.
    """
    paths = paths_of(rows)
    alone = [path.row for path in paths]
    placed = _arrange(alone, alignment, shares_prefixes)
    offsets, lengths = placed.offsets, np.diff(placed.offsets).tolist()
    tokens, token_rows = np.zeros(offsets[-1], dtype=np.int32), np.full(offsets[-1], -1, dtype=np.int32)
    position_ids = np.concatenate([np.arange(length) for length in lengths])
    # For each label: the token that predicts it, its id, its row and its column.
    found = [np.empty((4, 0), dtype=np.int64)]
    for i, sequence in zip(placed.order, placed.sequences, strict=False):
        row, owner, columns = paths[i]
        own = sequence[: row.num_tokens]
        tokens[own], position_ids[sequence], token_rows[own] = row.token_ids, np.arange(len(sequence)), owner
        kept = np.flatnonzero(row.loss_mask)
        places = row.num_prompt_tokens + kept
        found.append(np.stack([own[places - 1], row.label_ids[kept], np.full(len(kept), owner), columns[kept]]))
    predictors, labels, row_index, column_index = np.concatenate(found, axis=1)

    local = zigzag_indices(lengths, alignment.cp, alignment.cp_rank) if alignment.cp > 1 else np.arange(len(tokens))
    # Where each position of the pack lies on this rank; -1 if another rank has it.
    place = np.full(len(tokens), -1, dtype=np.int64)
    place[local] = np.arange(len(local))
    predicted_at = place[predictors]
    mine = np.argsort(predicted_at, kind="stable")[np.count_nonzero(predicted_at < 0) :]
    shares = predicted_at[mine] // (len(local) // alignment.tp)

    def tensor(values: npt.NDArray[np.integer]) -> torch.Tensor:
        return torch.from_numpy(values).to(device).long()  # half the bytes cross

    experts = _routed_experts(alone, placed) if replay_routing else None
    packed = [alone[i] for i in placed.order]
    return Pack(
        input_ids=tensor(tokens[local])[None],
        position_ids=tensor(position_ids[local])[None],
        cu_seqlens=torch.tensor(offsets, dtype=torch.int32, device=device),
        max_length=max(map(len, placed.sequences)),
        positions=tensor(predicted_at[mine]),
        labels=tensor(labels[mine]),
        row_index=tensor(row_index[mine]),
        column_index=tensor(column_index[mine]),
        kept_per_rank=tuple(np.bincount(shares, minlength=alignment.tp).tolist()),
        batch_shape=(len(rows), max((row.num_response_tokens for row in rows), default=0)),
        token_rows=tensor(token_rows[local]),
        shares_prefixes=shares_prefixes,
        attention=_plan_attention(placed, alignment, device) if plans_attention else None,
        routed_experts=None if experts is None else tensor(experts[local]),
        nucleus=_of_labels(packed, [row.nucleus for row in packed], mine, device, fill=-1),
        likely_ids=_of_labels(packed, [r.likely.ids if r.likely else None for r in packed], mine, device, fill=-1),
        likely_logprobs=_of_labels(
            packed, [r.likely.logprobs if r.likely else None for r in packed], mine, device, fill=-np.inf
        ),
    )


def num_passed_on(rows: Sequence[Row], alignment: PackAlignment, shares_prefixes: bool) -> int:
    """Count the tokens whose hidden states a rank passes to the next stage, of the pack that `pack_rows` makes."""
    alone = [path.row for path in paths_of(rows)]
    return _arrange(alone, alignment, shares_prefixes).offsets[-1] // (alignment.cp * alignment.tp)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arrangement:
    """Where rows lie in a pack. order: their numbers, by length. offsets: bounds of the rows' own parts, and of the
    filler, in that order. sequences: all tokens of each row, shared ones too, and of the filler, as indices into the
    pack.
    """

    order: Sequence[int]
    offsets: Sequence[int]
    sequences: Sequence[npt.NDArray[np.int64]]


def _arrange(rows: Sequence[Row], alignment: PackAlignment, shares_prefixes: bool) -> _Arrangement:
    order = sorted(range(len(rows)), key=lambda i: rows[i].num_tokens)
    multiple, total_multiple = alignment.sequence_multiple, alignment.total_multiple
    held = held_prefixes([rows[i] for i in order]) if shares_prefixes else [(0, 0)] * len(rows)
    lengths = [
        -(-(rows[i].num_tokens - count) // multiple) * multiple for i, (_, count) in zip(order, held, strict=True)
    ]
    filler = -sum(lengths) % total_multiple if rows else total_multiple
    offsets = [0, *itertools.accumulate([*lengths, filler] if filler else lengths)]
    sequences = [np.arange(start, end) for start, end in itertools.pairwise(offsets)]
    for k, (holder, count) in enumerate(held):
        sequences[k] = np.concatenate([sequences[holder][:count], sequences[k]])
    return _Arrangement(order=order, offsets=offsets, sequences=sequences)


def _plan_attention(placed: _Arrangement, alignment: PackAlignment, device: torch.device) -> AttentionPlan:
    """Plan the attention of the sequences of a pack.

    Where a row's own part is the longer one, the outputs of all its tokens are computed, by the scores of a triangle;
    else those of its own part. Sequences whose lengths, and whose first queries, differ by less than `_LENGTH_STEP`
    share a call. Under context parallelism they share no tokens, and each call has sequences of one length.
    """
    cp, lengths = alignment.cp, np.diff(placed.offsets)
    parts = [zigzag_indices(lengths.tolist(), cp, rank) if cp > 1 else np.arange(lengths.sum()) for rank in range(cp)]
    mine, place_of_key = parts[alignment.cp_rank], np.argsort(np.concatenate(parts))
    place_of_query, places = np.full(lengths.sum(), -1, dtype=np.int64), np.empty(len(mine), dtype=np.int64)
    place_of_query[mine] = np.arange(len(mine))
    step = 1 if cp > 1 else _LENGTH_STEP

    def first_query(sequence: npt.NDArray[np.int64], own: int) -> int:
        start = len(sequence) - own
        return start // step * step if own <= start else 0

    # Each sequence with its first query, and the number of its queries in steps.
    starts = [first_query(*each) for each in zip(placed.sequences, lengths, strict=True)]
    queried = [
        (start, -(-(len(sequence) - start) // step), sequence)
        for start, sequence, own in zip(starts, placed.sequences, lengths, strict=True)
        if own
    ]
    # Those that are computed whole keep the order of their lengths.
    queried.sort(key=lambda each: each[:2] if each[0] else (0, 0))

    def tensor(values: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(values).to(device)

    calls, num_outputs = [], 0
    for (start, _), members in itertools.groupby(queried, key=lambda each: each[:2]):
        rows = [sequence for *_, sequence in members]
        width = max(map(len, rows))
        columns = np.minimum(np.arange(width), np.array([[len(row) - 1] for row in rows]))
        tokens = np.stack([row[own] for row, own in zip(rows, columns, strict=True)])
        own = zigzag_indices([width], cp, alignment.cp_rank) if cp > 1 else np.arange(start, width)
        queries = place_of_query[tokens[:, own]]
        seen = own[:, None] >= np.arange(width) if cp > 1 or start else None
        calls.append(
            AttentionCall(
                queries=tensor(queries),
                keys=tensor(place_of_key[tokens]),
                seen=None if seen is None else tensor(seen),
            )
        )
        for row, found in zip(rows, queries, strict=True):
            count = (len(row) - start) // cp
            places[found[:count]] = num_outputs + np.arange(count)
            num_outputs += len(own)
    return AttentionPlan(calls=tuple(calls), places=tensor(places))


def _of_labels(
    rows: Sequence[Row],
    tables: Sequence[npt.NDArray[Any] | None],
    mine: npt.NDArray[np.integer],
    device: torch.device,
    *,
    fill: float,
) -> torch.Tensor | None:
    """Return, for those of the rows' kept labels that are `mine`, their lines [N, K] in the rows' tables [R, K], `fill`
    where a table is narrower or missing, or None if no row has any.
    """
    given = [table for table in tables if table is not None]
    if not (width := max((table.shape[1] for table in given), default=0)):
        return None
    lines = np.full((sum(row.num_loss_tokens for row in rows), width), fill, dtype=given[0].dtype)
    start = 0
    for row, table in zip(rows, tables, strict=True):
        if table is not None:
            lines[start : start + row.num_loss_tokens, : table.shape[1]] = table[row.loss_mask]
        start += row.num_loss_tokens
    return torch.from_numpy(lines[mine]).to(device)


def _routed_experts(rows: Sequence[Row], placed: _Arrangement) -> npt.NDArray[np.integer] | None:
    """Return a pack's recorded experts [tokens, layers, k], −1 where none are recorded, or None if no row has any."""
    recorded = next((row.routed_experts for row in rows if row.routed_experts is not None), None)
    if recorded is None:
        return None
    experts = np.full((placed.offsets[-1], *recorded.shape[1:]), -1, dtype=recorded.dtype)
    for i, sequence in zip(placed.order, placed.sequences, strict=False):
        own = rows[i].routed_experts
        if own is not None:
            experts[sequence[: len(own)]] = own
    return experts

"""Pack rows (one prompt with one response each) into one sequence for the model, and unpack per-token results.

A pack concatenates rows in order of their lengths, so that rows of equal length are adjacent. A filler sequence at the
end makes the total length a multiple of what tensor parallelism needs. Labels are shifted only here: position i of a
row predicts token i + 1, so response token t is predicted by the hidden state at offset + prompt + t − 1.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megarl.types import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class PackAlignment:
    """What the length of each row, and the total length of a pack, must be multiples of under a parallel layout.

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
class Pack:
    """A micro-batch as one sequence for the model. T: this rank's tokens; N: those of them under the loss mask.

    cu_seqlens: bounds of the sequences in the whole pack, over all context-parallel ranks. labels: [N] token ids.
    positions: [N] the index, among this rank's T, of the hidden state that predicts each label. row_index,
    column_index: [N] each label's place in the [B, R] batch of responses, in the order of `rows`. kept_per_rank: how
    many of `positions` lie in each sequence-parallel rank's part; (N,) without sequence parallelism. token_rows: [T]
    the row of each token, -1 for padding. routed_experts: [T, layers, k] the experts to which tokens must be routed, -1
    where the router chooses; None: it chooses all. nucleus: [N, K] the tokens from which each label was sampled, as in
    `Row`; None: from the whole vocabulary.
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
    routed_experts: torch.Tensor | None = None
    nucleus: torch.Tensor | None = None

    @property
    def packed_seq_params(self) -> PackSeqParams:
        return PackSeqParams(
            pack=self,
            qkv_format="thd",
            cu_seqlens_q=self.cu_seqlens,
            cu_seqlens_kv=self.cu_seqlens,
            cu_seqlens_q_padded=self.cu_seqlens,
            cu_seqlens_kv_padded=self.cu_seqlens,
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
    rows: Sequence[Row], *, alignment: PackAlignment, device: torch.device, replay_routing: bool = False
) -> Pack:
    """Pack rows into one sequence for the model.

    Under context parallelism each row is padded to a multiple of 2·cp tokens. A filler sequence at the end makes the
    total length a multiple of what tensor parallelism needs.

    Without rows, the pack consists of the filler: a rank without work must still join every collective. replay_routing:
    route tokens to the experts that their rows recorded, if any.
    """
    order = sorted(range(len(rows)), key=lambda i: rows[i].num_tokens)
    multiple = alignment.sequence_multiple
    lengths = [-(-rows[i].num_tokens // multiple) * multiple for i in order]
    filler = -sum(lengths) % alignment.total_multiple if rows else alignment.total_multiple
    if filler:
        lengths.append(filler)
    offsets = [0, *itertools.accumulate(lengths)]

    tokens, token_rows = np.zeros(offsets[-1], dtype=np.int64), np.full(offsets[-1], -1, dtype=np.int64)
    positions, labels, row_index, column_index = ([np.empty(0, dtype=np.int64)] for _ in range(4))
    for i, offset in zip(order, offsets, strict=False):
        row = rows[i]
        tokens[offset : offset + row.num_tokens] = row.token_ids
        token_rows[offset : offset + row.num_tokens] = i
        kept = np.flatnonzero(row.loss_mask)
        positions.append(offset + row.num_prompt_tokens + kept - 1)
        labels.append(row.token_ids[row.num_prompt_tokens + kept])
        row_index.append(np.full(len(kept), i))
        column_index.append(kept)

    local = zigzag_indices(lengths, alignment.cp, alignment.cp_rank) if alignment.cp > 1 else np.arange(len(tokens))
    # Where each position of the pack lies on this rank; -1 if another rank has it.
    place = np.full(len(tokens), -1, dtype=np.int64)
    place[local] = np.arange(len(local))
    predicted_at = place[np.concatenate(positions)]
    mine = predicted_at >= 0
    position_ids = np.concatenate([np.arange(n) for n in lengths])[local]
    shares = predicted_at[mine] // (len(local) // alignment.tp)

    def tensor(values: npt.NDArray[np.integer]) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(device)

    experts = _routed_experts(rows, order, offsets) if replay_routing else None

    return Pack(
        input_ids=tensor(tokens[local])[None],
        position_ids=tensor(position_ids)[None],
        cu_seqlens=torch.tensor(offsets, dtype=torch.int32, device=device),
        max_length=max(lengths),
        positions=tensor(predicted_at[mine]),
        labels=tensor(np.concatenate(labels)[mine]),
        row_index=tensor(np.concatenate(row_index)[mine]),
        column_index=tensor(np.concatenate(column_index)[mine]),
        kept_per_rank=tuple(np.bincount(shares, minlength=alignment.tp).tolist()),
        batch_shape=(len(rows), max((row.num_response_tokens for row in rows), default=0)),
        token_rows=tensor(token_rows[local]),
        routed_experts=None if experts is None else tensor(experts[local]),
        nucleus=_nuclei([rows[i] for i in order], mine, device),
    )


def _nuclei(rows: Sequence[Row], mine: npt.NDArray[np.bool_], device: torch.device) -> torch.Tensor | None:
    """Return the nuclei [N, K] of those of the rows' kept labels that are `mine`, or None if no row has any."""
    width = max((row.nucleus.shape[1] for row in rows if row.nucleus is not None), default=0)
    if not width:
        return None
    ids = np.full((len(mine), width), -1, dtype=np.int32)
    start = 0
    for row in rows:
        if row.nucleus is not None:
            ids[start : start + row.num_loss_tokens, : row.nucleus.shape[1]] = row.nucleus[row.loss_mask]
        start += row.num_loss_tokens
    return torch.from_numpy(ids[mine]).to(device)


def _routed_experts(
    rows: Sequence[Row], order: Sequence[int], offsets: Sequence[int]
) -> npt.NDArray[np.integer] | None:
    """Return a pack's recorded experts [tokens, layers, k], −1 where none are recorded, or None if no row has any."""
    recorded = next((row.routed_experts for row in rows if row.routed_experts is not None), None)
    if recorded is None:
        return None
    experts = np.full((offsets[-1], *recorded.shape[1:]), -1, dtype=recorded.dtype)
    for i, offset in zip(order, offsets, strict=False):
        own = rows[i].routed_experts
        if own is not None:
            experts[offset : offset + len(own)] = own
    return experts

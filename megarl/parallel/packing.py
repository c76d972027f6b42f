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
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megarl.parallel.attention_plan import AttentionPlan, GatheredKeys, gather_keys, plan_attention, zigzag_indices
from megarl.parallel.pack_images import PackImage, image_numbers, images_of_pack
from megarl.parallel.path_blocks import PathBlocks, plan_blocks
from megarl.types import IdArray, Row
from megarl.types.images import rope_positions
from megarl.types.prefixes import held_prefixes
from megarl.types.rows import RowPath, paths_of


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
class Pack:
    """A micro-batch as one sequence for the model. T: this rank's tokens; N: the labels that they predict.

    cu_seqlens: bounds of the sequences in the whole pack, over all context-parallel ranks; a row that shares a prefix
    has only the rest of its tokens there, maybe none. attention: None if Transformer Engine computes it, by
    `cu_seqlens`. labels: [N] token ids. positions: [N] the index, among this rank's T, of the hidden state that
    predicts each label; it ascends.
    row_index, column_index: [N] each label's place in the [B, R] batch of responses, in the order of `rows`.
    kept_per_rank: how many of `positions` lie in each sequence-parallel rank's part; (N,) without sequence parallelism.
    counted: [2, C] pairs of a row and one of its tokens, among this rank's T, that counts for the row's balance of
    experts. gathered: the keys of rows that share prefixes, where Transformer Engine computes attention. blocks: the
    blocks of scores of such rows, where torch's FlexAttention does.
    routed_experts: [T, layers, k] the experts to which tokens must be routed, -1 where the router chooses; None: it
    chooses all. nucleus: [N, K] the tokens from which each label was sampled, as in `Row`; None: from the whole
    vocabulary. likely_ids, likely_logprobs: [N, K] the tokens that a teacher would write, as in `Row`; None: no teacher
    was asked. rope: [3, tokens of the whole pack] the positions by which M-RoPE turns heads; None: the model has one
    axis. images: those that a token of this rank shows. added: what each of the first layers adds to its output, which
    the model fills in.
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
    counted: torch.Tensor
    shares_prefixes: bool = False
    attention: AttentionPlan | None = None
    gathered: GatheredKeys | None = None
    blocks: PathBlocks | None = None
    routed_experts: torch.Tensor | None = None
    nucleus: torch.Tensor | None = None
    likely_ids: torch.Tensor | None = None
    likely_logprobs: torch.Tensor | None = None
    rope: torch.Tensor | None = None
    images: tuple[PackImage, ...] = ()
    added: list[torch.Tensor] = field(default_factory=list)

    @property
    def packed_seq_params(self) -> PackSeqParams:
        # Where rows share prefixes, Megatron gets each token's own rotation, and need not know of rows.
        bounds = self.cu_seqlens
        if self.shares_prefixes:
            # Kernels read the two numbers as they lie in memory.
            bounds = bounds[:: len(bounds) - 1].contiguous()
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


def pack_rows(
    rows: Sequence[Row],
    *,
    alignment: PackAlignment,
    device: torch.device,
    plans_attention: bool = False,
    shares_prefixes: bool = False,
    gathers_keys: bool = False,
    plans_blocks: bool = False,
    replay_routing: bool = False,
    has_mrope: bool = False,
    sees_whole_images: bool = False,
) -> Pack:
    """Pack rows into one sequence for the model.

    Without rows, the pack consists of the filler: a rank without work must still join every collective.
    plans_attention: for layers whose attention is `PackedAttention`. shares_prefixes: rows share the tokens with which
    they begin alike; not under context parallelism. gathers_keys: for those with Transformer Engine's, if rows share
    prefixes. plans_blocks: for those with `PathAttention`. replay_routing: tokens go to the experts that their rows
    recorded. has_mrope: positions have three axes. sees_whole_images: tokens of an image attend to all of it.
    """
    paths = paths_of(rows)
    placed = _arrange(alone := [path.row for path in paths], alignment, shares_prefixes)
    offsets, lengths = placed.offsets, np.diff(placed.offsets).tolist()
    tokens, position_ids, (predictors, labels, row_index, column_index), counting = _fill(paths, placed)
    local, place = _local_places(lengths, alignment)
    predicted_at = place[predictors]
    mine = np.argsort(predicted_at, kind="stable")[np.count_nonzero(predicted_at < 0) :]
    counted = np.stack([counting[0], place[counting[1]]])[:, place[counting[1]] >= 0]

    def tensor(values: npt.NDArray[np.integer]) -> torch.Tensor:
        return torch.from_numpy(values).to(device).long()  # half the bytes cross

    packed, own_parts = [alone[i] for i in placed.order], (placed.sequences, np.diff(offsets), device)
    tp, cp, rank = alignment.tp, alignment.cp, alignment.cp_rank
    shown = image_numbers(packed, placed.sequences, offsets[-1]) if sees_whole_images else None
    experts, likely = _routed_experts(alone, placed) if replay_routing else None, [row.likely for row in packed]
    return Pack(
        input_ids=tensor(tokens[local])[None],
        position_ids=tensor(position_ids[local])[None],
        cu_seqlens=torch.tensor(offsets, dtype=torch.int32, device=device),
        max_length=max(map(len, placed.sequences)),
        positions=tensor(predicted_at[mine]),
        labels=tensor(labels[mine]),
        row_index=tensor(row_index[mine]),
        column_index=tensor(column_index[mine]),
        kept_per_rank=tuple(np.bincount(predicted_at[mine] // (len(local) // tp), minlength=tp).tolist()),
        batch_shape=(len(rows), max((row.num_response_tokens for row in rows), default=0)),
        counted=tensor(counted),
        shares_prefixes=shares_prefixes,
        attention=plan_attention(*own_parts, cp=cp, cp_rank=rank, images=shown) if plans_attention else None,
        gathered=gather_keys(*own_parts) if shares_prefixes and gathers_keys else None,
        blocks=plan_blocks(*own_parts) if plans_blocks else None,
        routed_experts=None if experts is None else tensor(experts[local]),
        nucleus=_of_labels(packed, [row.nucleus for row in packed], mine, device, fill=-1),
        likely_ids=_of_labels(packed, [e.ids if e else None for e in likely], mine, device, fill=-1),
        likely_logprobs=_of_labels(packed, [e.logprobs if e else None for e in likely], mine, device, fill=-np.inf),
        rope=tensor(_rope(packed, placed)) if has_mrope else None,
        images=images_of_pack(packed, placed.sequences, offsets, place, device),
    )


def _local_places(
    lengths: Sequence[int], alignment: PackAlignment
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the positions of the pack that this rank has, and where each one lies on it; -1: another rank has it."""
    local = zigzag_indices(lengths, alignment.cp, alignment.cp_rank) if alignment.cp > 1 else np.arange(sum(lengths))
    place = np.full(sum(lengths), -1, dtype=np.int64)
    place[local] = np.arange(len(local))
    return local, place


def _rope(rows: Sequence[Row], placed: "_Arrangement") -> npt.NDArray[np.int64]:
    """Return the positions [3, tokens] of a pack by which M-RoPE turns heads; those of padding count up."""
    positions = np.empty((3, placed.offsets[-1]), np.int64)
    rest = [()] * (len(placed.sequences) - len(rows))
    for sequence, images in zip(placed.sequences, [*(row.images for row in rows), *rest], strict=True):
        positions[:, sequence] = rope_positions(len(sequence), images)
    return positions


def _fill(
    paths: Sequence[RowPath], placed: "_Arrangement"
) -> tuple[IdArray, npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return a pack's tokens and their positions; for each label the token that predicts it, its id, its row and its
    column, as [4, N]; and as [2, C] the pairs of a row and a token that counts for its balance of experts.
    """
    tokens, counting = np.zeros(placed.offsets[-1], dtype=np.int32), [np.empty((2, 0), dtype=np.int64)]
    position_ids = np.concatenate([np.arange(length) for length in np.diff(placed.offsets)])
    found = [np.empty((4, 0), dtype=np.int64)]
    for i, sequence in zip(placed.order, placed.sequences, strict=False):
        row, owner, columns = paths[i]
        own = sequence[: row.num_tokens]
        tokens[own], position_ids[sequence] = row.token_ids, np.arange(len(sequence))
        counting.append(np.stack([np.full(len(own) - row.num_uncounted, owner), own[row.num_uncounted :]]))
        kept = np.flatnonzero(row.predicted)
        places = row.num_prompt_tokens + kept
        found.append(np.stack([own[places - 1], row.label_ids[kept], np.full(len(kept), owner), columns[kept]]))
    return tokens, position_ids, np.concatenate(found, axis=1), np.concatenate(counting, axis=1)


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


def _of_labels(
    rows: Sequence[Row],
    tables: Sequence[npt.NDArray[np.generic] | None],
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
    kept, start = [row.predicted for row in rows], 0
    lines = np.full((sum(int(mask.sum()) for mask in kept), width), fill, dtype=given[0].dtype)
    for mask, table in zip(kept, tables, strict=True):
        end = start + int(mask.sum())
        if table is not None:
            lines[start:end, : table.shape[1]] = table[mask]
        start = end
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

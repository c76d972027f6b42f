"""Rows → one packed sequence for the model, and per-token results back to rows.

A pack lays rows end to end, ordered by length so that equal ones are neighbours, with one filler sequence at the
end where tensor parallelism needs a multiple. This is the place where labels are shifted: position i of a row
predicts token i + 1, so the hidden state that scores response token t sits at offset + prompt + t − 1.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megarl.types import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """A micro-batch as the model reads it. T = packed tokens, N = tokens under the loss mask.

    positions: [N] where in the pack each kept label is predicted; labels: [N]; row_index, column_index: [N] its
    place in the [B, R] batch of `rows` (in the order given).
    """

    input_ids: torch.Tensor  # [1, T]
    position_ids: torch.Tensor  # [1, T]
    cu_seqlens: torch.Tensor  # [S + 1] int32
    max_length: int
    positions: torch.Tensor
    labels: torch.Tensor
    row_index: torch.Tensor
    column_index: torch.Tensor
    batch_shape: tuple[int, int]

    @property
    def packed_seq_params(self) -> PackedSeqParams:
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=self.cu_seqlens,
            cu_seqlens_kv=self.cu_seqlens,
            max_seqlen_q=self.max_length,
            max_seqlen_kv=self.max_length,
        )

    def scatter(self, values: torch.Tensor) -> torch.Tensor:
        """[N] values of kept labels → [B, R], 0 elsewhere; differentiable."""
        out = torch.zeros(self.batch_shape, dtype=values.dtype, device=values.device)
        return out.index_put((self.row_index, self.column_index), values)


def pack_rows(rows: Sequence[Row], *, multiple: int, device: torch.device) -> Pack:
    """Pack rows; the total is padded to `multiple` tokens (the tensor-parallel size under sequence parallelism)."""
    order = sorted(range(len(rows)), key=lambda i: rows[i].num_tokens)
    lengths = [rows[i].num_tokens for i in order]
    filler = -sum(lengths) % multiple
    if filler:
        lengths.append(filler)
    offsets = [0, *itertools.accumulate(lengths)]

    tokens = np.concatenate([*(rows[i].token_ids for i in order), np.zeros(filler, np.int64)])
    positions, labels, row_index, column_index = [], [], [], []
    for i, offset in zip(order, offsets, strict=False):
        row = rows[i]
        kept = np.flatnonzero(row.loss_mask)
        positions.append(offset + row.num_prompt_tokens + kept - 1)
        labels.append(row.token_ids[row.num_prompt_tokens + kept])
        row_index.append(np.full(len(kept), i))
        column_index.append(kept)

    def tensor(parts: list[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(parts).astype(np.int64)).to(device)

    return Pack(
        input_ids=torch.from_numpy(tokens).to(device)[None],
        position_ids=torch.cat([torch.arange(n) for n in lengths]).to(device)[None],
        cu_seqlens=torch.tensor(offsets, dtype=torch.int32, device=device),
        max_length=max(lengths),
        positions=tensor(positions),
        labels=tensor(labels),
        row_index=tensor(row_index),
        column_index=tensor(column_index),
        batch_shape=(len(rows), max(row.num_response_tokens for row in rows)),
    )

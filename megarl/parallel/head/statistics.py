"""Three floats a row and one all-gather: log-probs and entropies without the vocabulary in one place.

Each rank reduces its shard of a row's logits z to the local lse, the entropy H_i of the local softmax and z of the
label if it owns it. From all ranks' three: lse = logsumexp_i lse_i, log p = Σ_i z_i − lse, and with the shards' masses
m_i = e^{lse_i − lse},  H = Σ_i m_i H_i − Σ_i m_i log m_i, in which no large logits cancel.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from megarl.parallel.head.kernels import ChunkKernels
from megarl.parallel.head.shard import VocabShard
from megarl.parallel.head.top import TopLogprobs, top_from_parts, top_of_chunk

# Elements: kernels load 16 bytes at once where rows start at multiples of it.
ROW_MULTIPLE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadInputs:
    """What logits are made of. hidden: [N, H]; weight: [shard.size, H] without padding; labels: [N] as the shard's
    rows; inverse_temperature: [N]; chunk_tokens: rows of logits at a time."""

    hidden: torch.Tensor
    weight: torch.Tensor
    labels: torch.Tensor
    inverse_temperature: torch.Tensor
    shard: VocabShard
    chunk_tokens: int
    kernels: ChunkKernels

    @property
    def statistics_dtype(self) -> torch.dtype:
        return torch.promote_types(self.hidden.dtype, torch.float32)

    def chunks(self) -> Iterator[slice]:
        num_rows = len(self.hidden)
        return (slice(i, min(i + self.chunk_tokens, num_rows)) for i in range(0, num_rows, self.chunk_tokens))

    def rows(self, indices: torch.Tensor) -> "HeadInputs":
        """The same of some rows."""
        return replace(
            self,
            hidden=self.hidden[indices],
            labels=self.labels[indices],
            inverse_temperature=self.inverse_temperature[indices],
        )

    def buffer(self, num_rows: int) -> torch.Tensor:
        """Room for the raw logits of so many rows, which begin where wide loads can."""
        width = -(-self.shard.size // ROW_MULTIPLE) * ROW_MULTIPLE
        return self.hidden.new_empty(num_rows, width)[:, : self.shard.size]

    def write_logits(self, rows: slice, out: torch.Tensor) -> torch.Tensor:
        """r = h·Wᵀ of some rows, into the first rows of `out`."""
        logits = out[: rows.stop - rows.start]
        if self.shard.size:
            torch.mm(self.hidden[rows], self.weight.t(), out=logits)
        return logits


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStatistics:
    """[N] each, over the whole vocabulary, in nats."""

    logprobs: torch.Tensor
    entropy: torch.Tensor
    lse: torch.Tensor
    top: TopLogprobs | None = None


def write_chunk_statistics(x: HeadInputs, rows: slice, logits: torch.Tensor, out: torch.Tensor) -> None:
    """This shard's statistics of a chunk of raw logits into `out` [3, n]; a shard of padding has no mass."""
    if x.shard.size:
        x.kernels.statistics(logits, x.inverse_temperature[rows], x.labels[rows], out)
    else:
        out.zero_()
        out[0] = -torch.inf


def row_statistics(x: HeadInputs, *, kept: torch.Tensor | None = None, top_k: int = 0) -> RowStatistics:
    """Statistics of all rows, chunk by chunk; raw logits stay in `kept` [N, shard.size] if given.

    top_k: also the log-probs of each row's most likely tokens; they travel in the same all-gather.
    """
    parts = torch.empty(3 + 2 * top_k, len(x.hidden), dtype=x.statistics_dtype, device=x.hidden.device)
    buffer = x.buffer(min(x.chunk_tokens, len(x.hidden))) if kept is None else kept
    for rows in x.chunks():
        logits = x.write_logits(rows, buffer if kept is None else kept[rows])
        write_chunk_statistics(x, rows, logits, parts[:3, rows])
        if top_k:
            parts[3:, rows] = top_of_chunk(logits, x.inverse_temperature[rows], x.shard, top_k)
    return combine(gather_parts(parts, x.shard.group))


def gather_parts(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[k, n] of this rank → [ranks, k, n] of all: the one collective."""
    if group.size() == 1 or not parts.shape[1]:
        return parts[None]
    gathered = parts.new_empty(group.size(), *parts.shape)
    dist.all_gather_into_tensor(gathered.flatten(0, 1), parts, group=group)
    return gathered


def combine(parts: torch.Tensor) -> RowStatistics:
    """[ranks, 3 + 2k, n] → what all shards say together."""
    lse = parts[:, 0].logsumexp(0)
    mass = torch.exp(parts[:, 0] - lse)
    return RowStatistics(
        logprobs=parts[:, 2].sum(0) - lse,
        entropy=(mass * parts[:, 1] + torch.special.entr(mass)).sum(0),
        lse=lse,
        top=top_from_parts(parts[:, 3:], lse) if parts.shape[1] > 3 else None,
    )

"""Compute log-probs and entropies from three floats per token and one all-gather, without gathering the vocabulary.

Each rank reduces its shard of a token's logits z to the local lse_i, the entropy H_i of the local softmax, and z_i: z
of the label, or 0 if another rank has it. From these: lse = logsumexp_i lse_i, log p = Σ_i z_i − lse, and with the
shards' masses m_i = e^{lse_i − lse},  H = Σ_i m_i H_i − Σ_i m_i log m_i, in which no large logits cancel.

A token that was sampled from a set S of the vocabulary (top-k, top-p) has a fourth float, the lse of the shard's part
of S. Then  log p = Σ_i z_i − logsumexp_i lse_i(S),  while H remains that of the whole vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
import torch.distributed as dist

from megarl.parallel.head.kernels import ChunkKernels
from megarl.parallel.head.rows import overlaps

# The type of `ChunkKernels.statistics`, with its arguments: logits, inverse temperatures, labels, out.
StatisticsWriter: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]

# In elements. Kernels load 16 bytes at once if rows start at multiples of this.
ROW_MULTIPLE = 16
# Stands for the local label of a row whose label another rank holds.
NOT_OWNED = -1
# Token ids are sent as float32 along with the statistics; float32 represents integers exactly up to this one.
MAX_ID = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabShard:
    """The rows [start, start + size) of the output weight that this rank holds, without padding, and its
    tensor-parallel group.
    """

    group: dist.ProcessGroup
    start: int
    size: int

    def first(self, count: int | None) -> "VocabShard":
        """Return what this rank holds of the first `count` tokens of the vocabulary; None: of all."""
        return self if count is None else replace(self, size=max(0, min(self.size, count - self.start)))


def vocab_shard(group: dist.ProcessGroup, padded_rows_per_rank: int, vocab_size: int) -> VocabShard:
    """Return this rank's vocabulary shard when the padded vocabulary is split evenly over `group`."""
    start = group.rank() * padded_rows_per_rank
    return VocabShard(group=group, start=start, size=max(0, min(padded_rows_per_rank, vocab_size - start)))


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadInputs:
    """The inputs of the log-prob head, which works on `chunk_tokens` tokens at a time.

    hidden: [N, H]. weight: [shard.size, H], without padding. labels: [N], each an index into `weight`, or −1 if another
    rank holds it. inverse_temperature: [N].

    nucleus: [N, K] ids of the tokens that each label was sampled from, itself among them, each once, then −1. Log-probs
    are then those of the distribution over these tokens. For rows of −1 alone, and for None, they are those over the
    whole vocabulary, as entropies always are.

    logit_cap: c if the model caps its logits r to c·tanh(r/c) (Gemma 2); everything below calls the capped ones raw.

    runs: the output weight [shard.size, H] of so many consecutive tokens at a time; None: all have `weight`.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    labels: torch.Tensor
    inverse_temperature: torch.Tensor
    shard: VocabShard
    chunk_tokens: int
    kernels: ChunkKernels
    nucleus: torch.Tensor | None = None
    logit_cap: float | None = None
    runs: Sequence[tuple[torch.Tensor, int]] | None = None

    def __post_init__(self) -> None:
        nucleus, expected = self.nucleus, len(self.labels)
        if nucleus is not None and (nucleus.ndim != 2 or len(nucleus) != expected):
            raise ValueError(f"nucleus has shape {tuple(nucleus.shape)}, expected ({expected}, K) like the labels")

    @property
    def num_statistics(self) -> int:
        """Return how many floats per token ranks exchange."""
        return 3 if self.nucleus is None else 4

    @property
    def statistics_dtype(self) -> torch.dtype:
        return torch.promote_types(self.hidden.dtype, torch.float32)

    def chunks(self) -> Iterator[slice]:
        num_rows = len(self.hidden)
        return (slice(i, min(i + self.chunk_tokens, num_rows)) for i in range(0, num_rows, self.chunk_tokens))

    def rows(self, indices: torch.Tensor) -> "HeadInputs":
        """Return the inputs of the tokens at `indices` only."""
        assert self.runs is None, "runs of tokens have weights of their own"
        return replace(
            self,
            hidden=self.hidden[indices],
            labels=self.labels[indices],
            inverse_temperature=self.inverse_temperature[indices],
            nucleus=None if self.nucleus is None else self.nucleus[indices],
        )

    @property
    def large(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors that a graph should not hold once its backward is over, in the order of `holding`."""
        return self.hidden, self.weight, *(weight for weight, _ in self.runs or ())

    def holding(self, large: Iterator[torch.Tensor]) -> "HeadInputs":
        """Return inputs with the next of these tensors in place of the `large` ones."""
        hidden, weight = next(large), next(large)
        runs = None if self.runs is None else [(next(large), count) for _, count in self.runs]
        return replace(self, hidden=hidden, weight=weight, runs=runs)

    def buffer(self, num_rows: int) -> torch.Tensor:
        """Allocate memory for the raw logits of `num_rows` tokens, one row per token, aligned so that kernels load 16
        bytes at once.
        """
        width = -(-self.shard.size // ROW_MULTIPLE) * ROW_MULTIPLE
        return self.hidden.new_empty(num_rows, width)[:, : self.shard.size]

    def write_logits(self, rows: slice, out: torch.Tensor) -> torch.Tensor:
        """Compute a slice's raw logits, h·Wᵀ or these capped, into the first rows of `out`, and return these rows."""
        logits = out[: rows.stop - rows.start]
        if self.shard.size:
            weights, counts = zip(*self.runs or [(self.weight, len(self.hidden))], strict=True)
            for run, first, last in overlaps(counts, rows.start, len(logits)):
                torch.mm(self.hidden[rows][first:last], weights[run].t(), out=logits[first:last])
            if self.logit_cap is not None:
                logits.div_(self.logit_cap).tanh_().mul_(self.logit_cap)
        return logits

    def of_nucleus(self, rows: slice, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `at_ids` of a slice's nucleus tokens."""
        assert self.nucleus is not None
        return self.at_ids(self.nucleus[rows], rows, logits)

    def at_ids(self, ids: torch.Tensor, rows: slice, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the columns in raw `logits` of a slice's tokens `ids` [n, K], and their z: [n, K] each.

        z is −∞ where another rank has the token, or there is none (−1); its column is then 0.
        """
        ids = ids.long()
        columns = ids - self.shard.start
        owned = (ids >= 0) & (columns >= 0) & (columns < self.shard.size)
        columns = columns.where(owned, 0)
        z = logits.gather(1, columns).to(self.statistics_dtype) * self.inverse_temperature[rows, None]
        return columns, z.masked_fill(~owned, -torch.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopLogprobs:
    """The k most likely tokens at each position, likeliest first. logprobs: [N, k], nats; ids: [N, k] int64."""

    logprobs: torch.Tensor
    ids: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStatistics:
    """The log-prob, entropy and lse (log-sum-exp) of each token: [N] each, in nats.

    lse and entropy are over the whole vocabulary. nucleus_lse: the lse over the tokens that the label was sampled from,
    by which its log-prob is normalised; `lse` itself without a nucleus. squares: Σ p² over these tokens, if asked for.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor
    lse: torch.Tensor
    nucleus_lse: torch.Tensor
    top: TopLogprobs | None = None
    squares: torch.Tensor | None = None


def write_chunk_statistics(
    x: HeadInputs, rows: slice, logits: torch.Tensor, out: torch.Tensor, write: StatisticsWriter | None = None
) -> None:
    """Write the local lse, entropy and label's z of a chunk of tokens, and the lse of their nuclei if they have any.

    out: [x.num_statistics, n]. An lse over no tokens is −∞. write: writes the first three; None: the kernels do.
    """
    if x.shard.size:
        (write or x.kernels.statistics)(logits, x.inverse_temperature[rows], x.labels[rows], out[:3])
        if x.nucleus is not None:
            out[3] = x.of_nucleus(rows, logits)[1].logsumexp(1)
    else:
        out.zero_()
        out[::3] = -torch.inf


def top_of_chunk(
    logits: torch.Tensor, inverse_temperature: torch.Tensor, shard: VocabShard, top_k: int
) -> torch.Tensor:
    """Return [2k, n]: the k largest z of this vocabulary shard and their token ids; z is −∞ beyond the shard's size."""
    assert shard.start + shard.size <= MAX_ID, f"token ids up to {shard.start + shard.size} do not fit into float32"
    wide = torch.promote_types(logits.dtype, torch.float32)
    parts = torch.zeros(2 * top_k, len(logits), dtype=wide, device=logits.device)
    parts[:top_k] = -torch.inf
    count = min(top_k, shard.size)
    if count:
        values, local = logits.topk(count, dim=1)
        parts[:count] = values.to(wide).t() * inverse_temperature
        parts[top_k : top_k + count] = (local + shard.start).t().to(wide)
    return parts


def doubled_lse(x: HeadInputs, rows: slice, logits: torch.Tensor) -> torch.Tensor:
    """Return the local lse [n] of 2z of a chunk, over the tokens that each label was sampled from; −∞ over none."""
    found = x.inverse_temperature.new_full((3, len(logits)), -torch.inf)
    if x.shard.size:
        x.kernels.statistics(logits, 2 * x.inverse_temperature[rows], x.labels[rows], found)
    if x.nucleus is None or not x.shard.size:
        return found[0]
    return (2 * x.of_nucleus(rows, logits)[1]).logsumexp(1).where(x.nucleus[rows, 0] >= 0, found[0])


def row_statistics(
    x: HeadInputs, *, kept: torch.Tensor | None = None, top_k: int = 0, squares: bool = False
) -> RowStatistics:
    """Compute the statistics of all tokens, chunk by chunk. `kept` [N, shard.size], if given, receives the raw logits.

    top_k: how many most likely tokens to find per position; they are exchanged in the same all-gather. squares: whether
    to find Σ p² = exp(lse(2z) − 2·lse(z)); it takes a second pass over the logits, and one more number in the exchange.
    """
    own = x.num_statistics
    assert not (top_k and own > 3), "the most likely tokens are found for whole distributions only"
    parts = torch.empty(own + 2 * top_k + squares, len(x.hidden), dtype=x.statistics_dtype, device=x.hidden.device)
    buffer = x.buffer(min(x.chunk_tokens, len(x.hidden))) if kept is None else kept
    for rows in x.chunks():
        logits = x.write_logits(rows, buffer if kept is None else kept[rows])
        write_chunk_statistics(x, rows, logits, parts[:own, rows])
        if top_k:
            parts[own:, rows] = top_of_chunk(logits, x.inverse_temperature[rows], x.shard, top_k)
        if squares:
            parts[-1, rows] = doubled_lse(x, rows, logits)
    gathered = gather_parts(parts, x.shard.group)
    if not squares:
        return combine(gathered, x.nucleus)
    found = combine(gathered[:, :-1], x.nucleus)
    return replace(found, squares=(gathered[:, -1].logsumexp(0) - 2 * found.nucleus_lse).exp())


def gather_parts(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """All-gather the statistics [k, n] of every rank into one tensor [ranks, k, n], by a single collective."""
    if group.size() == 1 or not parts.shape[1]:
        return parts[None]
    gathered = parts.new_empty(group.size(), *parts.shape)
    dist.all_gather_into_tensor(gathered.flatten(0, 1), parts, group=group)
    return gathered


def combine(parts: torch.Tensor, nucleus: torch.Tensor | None = None) -> RowStatistics:
    """Combine the statistics of all vocabulary shards, [ranks, 3 + 2k, n], into those of the whole vocabulary.

    nucleus: those of these n tokens, if they have any; `parts` is then [ranks, 4, n].
    """
    lse = nucleus_lse = parts[:, 0].logsumexp(0)
    if nucleus is not None:
        nucleus_lse = parts[:, 3].logsumexp(0).where(nucleus[:, 0] >= 0, lse)
    mass = torch.exp(parts[:, 0] - lse)
    top = None
    if top_k := (parts.shape[1] - 3) // 2:
        candidates, ids = parts[:, 3 : 3 + top_k].flatten(0, 1), parts[:, 3 + top_k :].flatten(0, 1)
        values, places = candidates.topk(top_k, dim=0)
        top = TopLogprobs(logprobs=(values - lse).t(), ids=ids.gather(0, places).t().long())
    return RowStatistics(
        logprobs=parts[:, 2].sum(0) - nucleus_lse,
        entropy=(mass * parts[:, 1] + torch.special.entr(mass)).sum(0),
        lse=lse,
        nucleus_lse=nucleus_lse,
        top=top,
    )

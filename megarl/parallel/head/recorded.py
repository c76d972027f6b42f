"""Compute a quantity per token from the head of likeliest tokens that the engine recorded, or from another policy's
whole distribution, as score centering does.

Ranks exchange the head's z, and split their logits in two: the head, and all other tokens. So the mass 1 − P of these
is a sum of its own, not what rounding leaves of 1 − P, and no [N, V] tensor is made. Where a label has a nucleus, the
head is the whole nucleus, and p is normalised over it.

Two whole distributions are normalised first, by one all-gather of their lse; then each rank looks at its part of the
chunk again, and ranks add up two floats per token. So nothing but the chunk's logits is ever of the vocabulary's size.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.parallel.head.kernels import PolicyTerm, blocks, normalised, policy_gradient, workspaces
from megarl.parallel.head.statistics import HeadInputs, combine, write_chunk_statistics
from megarl.parallel.head.teachers import LogitsChunk, TeacherComparison, compared
from megarl.parallel.head.top_teacher import gradient_at, overwrite_at
from megarl.types.objectives import HeadMeasure, HeadProbs


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedHead:
    """The engine that sampled, beside which `measure` computes a number per token; in place of a teacher.

    logprobs: [N, K] in nats, normalised over all that could be sampled. ids: [N, K], each id once, −1 where there are
    fewer.
    """

    logprobs: Tensor
    ids: Tensor
    measure: HeadMeasure
    inputs: ClassVar[None] = None
    reads_logits_twice: ClassVar[bool] = False

    @property
    def num_statistics(self) -> int:
        return 1 + self.ids.shape[1]

    def write_statistics(self, chunk: LogitsChunk, out: Tensor) -> None:
        x, rows, logits, _ = chunk
        own = x.num_statistics
        out[own], out[own + 1 :] = -torch.inf, 0.0

        def write(logits: Tensor, inverse_temperature: Tensor, labels: Tensor, written: Tensor) -> None:
            columns, z = x.at_ids(self.ids[rows], rows, logits)
            owned, raw = z > -torch.inf, logits.gather(1, columns)
            is_label = (columns == labels[:, None]) & owned
            # So low that e^z is 0, and finite, as 0·∞ is no number.
            overwrite_at(logits, columns, owned, torch.full_like(raw, torch.finfo(raw.dtype).min / 4096))
            others = labels.masked_fill(is_label.any(1), -1)
            rest, head = torch.zeros(2, *written.shape, dtype=written.dtype, device=written.device)
            x.kernels.statistics(logits, inverse_temperature, others, rest)
            overwrite_at(logits, columns, owned, raw)
            head[0] = z.logsumexp(1)
            log_p = (z - head[0, :, None]).masked_fill(~owned, -torch.inf)
            head[1] = torch.special.entr(log_p.exp()).sum(1)
            head[2] = z.masked_fill(~is_label, 0.0).sum(1)
            both = combine(torch.stack([rest, head]))
            written[0], written[1], written[2] = both.lse, both.entropy, rest[2] + head[2]
            out[own] = rest[0]
            out[own + 1 :] = z.masked_fill(~owned, 0.0).t()

        write_chunk_statistics(x, rows, logits, out[:own], write)

    def compare(self, chunk: LogitsChunk, parts: Tensor) -> TeacherComparison:
        x, rows = chunk.x, chunk.rows
        own = x.num_statistics
        found = combine(parts[:, :own], None if x.nucleus is None else x.nucleus[rows])
        rest_lse = parts[:, own].logsumexp(0)
        z = parts[:, own + 1 :].sum(0).t().masked_fill(self.ids[rows] < 0, -torch.inf)
        probs = self._probs(x, rows, z, rest_lse, lse=found.lse, own_lse=found.nucleus_lse)
        slopes = self.measure.slopes(probs)
        floor = torch.finfo(rest_lse.dtype).tiny
        ratio_of_rests = (probs.rest_q.clamp(min=floor) / probs.rest_p.clamp(min=floor)).log()
        between = torch.where(probs.log_q > -torch.inf, probs.log_q.exp() * (probs.log_q - probs.log_p), 0.0).sum(1)
        return compared(
            found,
            divergence=self.measure.value(probs, slopes),
            mean=torch.zeros_like(rest_lse) if slopes is None else slopes.masked_fill(self.ids[rows] < 0, 0.0).sum(1),
            forward_kl=between + probs.rest_q * ratio_of_rests,
            student_lse=z.logsumexp(1),
            teacher_lse=probs.log_q.logsumexp(1),
            student_mass=1 - probs.rest_p,
            teacher_mass=1 - probs.rest_q,
            common_lse=rest_lse,
        )

    def write_gradient(
        self, chunk: LogitsChunk, found: TeacherComparison, weight: Tensor, logits: Tensor, term: PolicyTerm
    ) -> None:
        x, rows = chunk.x, chunk.rows
        columns, z = x.at_ids(self.ids[rows], rows, logits)
        probs = self._probs(x, rows, z, found.common_lse, lse=term.lse, own_lse=found.nucleus_lse)
        pulled_back = weight * found.mean
        at_ids, log_p = -pulled_back[:, None] * probs.log_p.exp(), z - term.lse[:, None]
        if (slopes := self.measure.slopes(probs)) is not None:
            at_ids += weight[:, None] * slopes
        at_ids += gradient_at(term, columns, log_p)
        # A nucleus pulls at its own tokens alone.
        everywhere = term.a + pulled_back.masked_fill(self._truncated(x, rows), 0.0)
        x.kernels.write_gradient(logits, replace(term, a=everywhere))
        overwrite_at(logits, columns, z > -torch.inf, at_ids * term.inverse_temperature[:, None])

    def _truncated(self, x: HeadInputs, rows: slice) -> Tensor:
        return torch.zeros_like(self.ids[rows, 0], dtype=torch.bool) if x.nucleus is None else x.nucleus[rows, 0] >= 0

    def _probs(
        self, x: HeadInputs, rows: slice, z: Tensor, rest_lse: Tensor, *, lse: Tensor, own_lse: Tensor
    ) -> HeadProbs:
        """Return both distributions. own_lse: what normalises p at the head's tokens."""
        log_q = self.logprobs[rows].to(z.dtype).masked_fill(self.ids[rows] < 0, -torch.inf)
        # In float32, 1 − Q would depend on the order of the sum.
        rest_q, truncated = (1 - log_q.double().exp().sum(1)).clamp(min=0).to(z.dtype), self._truncated(x, rows)
        return HeadProbs(
            log_p=(z - own_lse[:, None]).clamp(min=torch.finfo(z.dtype).min),
            log_q=log_q,
            rest_p=(rest_lse - lse).exp().masked_fill(truncated, 0.0),
            rest_q=rest_q.masked_fill(truncated, 0.0),
        )


class _Block(NamedTuple):
    """A few rows of a chunk of logits, and both policies' probabilities there."""

    rows: slice
    probs: HeadProbs


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPolicy:
    """Another policy, as a `Teacher`, whose logits are computed from its hidden states as a `WholeTeacher`'s are.

    inputs: with the student's labels. measure: what is computed beside it.
    """

    inputs: HeadInputs
    measure: HeadMeasure
    reads_logits_twice: ClassVar[bool] = True

    @property
    def num_statistics(self) -> int:
        return 2

    def write_statistics(self, chunk: LogitsChunk, out: Tensor) -> None:
        x, rows, logits, others = chunk
        own, labels, scale = x.num_statistics, x.labels[rows], self.inputs.inverse_temperature[rows]
        write_chunk_statistics(x, rows, logits, out[:own])
        out[own], out[own + 1] = -torch.inf, 0.0
        if not logits.shape[1]:
            return
        picked = others.gather(1, labels.clamp(min=0)[:, None])[:, 0].to(out.dtype) * scale
        out[own + 1] = picked.masked_fill(labels < 0, 0.0)
        # Its entropy is not asked for.
        (u,) = workspaces(logits, out.dtype, count=1)
        for block in blocks(logits, len(u)):
            z = torch.mul(others[block], scale[block, None], out=u[: block.stop - block.start])
            peak = z.amax(1, keepdim=True)
            out[own, block] = z.sub_(peak).exp_().sum(1).log_() + peak[:, 0]

    def compare(self, chunk: LogitsChunk, parts: Tensor) -> TeacherComparison:
        own = chunk.x.num_statistics
        found, there = combine(parts[:, :own]), parts[:, own].logsumexp(0)
        sums = torch.zeros(2, len(there), dtype=parts.dtype, device=parts.device)
        for block, probs in self._blocks(chunk, lse=found.lse, teacher_lse=there):
            slopes = self.measure.slopes(probs)
            sums[0, block] = self.measure.value(probs, slopes)
            if slopes is not None:
                sums[1, block] = slopes.sum(1)
        if chunk.x.shard.group.size() > 1:
            dist.all_reduce(sums, group=chunk.x.shard.group)
        whole = torch.ones_like(there)
        return compared(
            found,
            divergence=sums[0],
            teacher_logprobs=parts[:, own + 1].sum(0) - there,
            mean=sums[1],
            student_lse=found.lse,
            teacher_lse=there,
            student_mass=whole,
            teacher_mass=whole,
            common_lse=found.lse,
        )

    def write_gradient(
        self, chunk: LogitsChunk, found: TeacherComparison, weight: Tensor, logits: Tensor, term: PolicyTerm
    ) -> None:
        # The gradient by z_v is slope_v − p_v·Σ slopes; p_v has its own factor in that of the log-probs.
        everywhere, scaled = replace(term, a=term.a + weight * found.mean), weight * term.inverse_temperature
        for block, probs in self._blocks(chunk, lse=term.lse, teacher_lse=found.teacher_lse):
            if (slopes := self.measure.slopes(probs)) is None:
                chunk.x.kernels.write_gradient(logits, term)
                return
            policy_gradient(probs.log_p, everywhere.rows(block), out=probs.log_q)
            # Added before rounding to the dtype of logits.
            logits[block] = probs.log_q.addcmul_(slopes, scaled[block, None])

    def _blocks(self, chunk: LogitsChunk, *, lse: Tensor, teacher_lse: Tensor) -> Iterator[_Block]:
        """Yield blocks of this rank's part of a chunk; each block's probabilities overwrite those of the one before."""
        x, rows, logits, others = chunk
        if not logits.shape[1]:
            return
        here, there = x.inverse_temperature[rows], self.inputs.inverse_temperature[rows]
        p_block, q_block = workspaces(logits, lse.dtype, count=4)[:2]
        for block in blocks(logits, len(p_block)):
            n = block.stop - block.start
            log_p = normalised(logits[block], here[block], lse[block], out=p_block[:n])
            log_q = normalised(others[block], there[block], teacher_lse[block], out=q_block[:n])
            nothing = torch.zeros_like(lse[block])
            yield _Block(block, HeadProbs(log_p=log_p, log_q=log_q, rest_p=nothing, rest_q=nothing))

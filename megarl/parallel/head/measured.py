"""Compute a quantity per token from another policy's whole distribution, such as exact score centering's correction.

Both distributions are normalised first, by one all-gather of their lse; then each rank looks at its part of the chunk
again, and ranks add up two floats per token. So nothing but the chunk's logits is ever of the vocabulary's size.
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
from megarl.types.objectives import HeadMeasure, HeadProbs


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

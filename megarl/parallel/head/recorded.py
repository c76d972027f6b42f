"""Compute a quantity per token from the head of likeliest tokens that the engine recorded, as score centering does.

Ranks exchange the head's z, and split their logits in two: the head, and all other tokens. So the mass 1 − P of these
is a sum of its own, not what rounding leaves of 1 − P, and no [N, V] tensor is made. Where a label has a nucleus, the
head is the whole nucleus, and p is normalised over it.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from megarl.parallel.head.kernels import PolicyTerm
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

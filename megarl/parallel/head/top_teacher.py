"""Compare a student with a teacher of which only the likeliest k tokens are known; all others are one outcome.

With P and Q for the mass that student and teacher leave to the rest, the divergence is that of the k + 1 outcomes. It
is at most the exact one, and equal to it for k = V. Its gradient by z_v at a token of the rest is p_v times the same
number for all of them, so that the kernels of the plain head write it; that at the k tokens is written over it.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from megarl.parallel.head.divergence import Divergence
from megarl.parallel.head.kernels import PolicyTerm
from megarl.parallel.head.statistics import combine, write_chunk_statistics
from megarl.parallel.head.teacher_kernels import SLOPES, log_ratio_to_mixture
from megarl.parallel.head.teachers import LogitsChunk, TeacherComparison, compared


@dataclass(frozen=True, slots=True, kw_only=True)
class TopTeacher:
    """A teacher of which only the likeliest tokens are known; all others are one outcome.

    logprobs: [N, K], in nats. ids: [N, K], each id once, −1 where the teacher gave fewer. columns, cut: as in
    `WholeTeacher`; log-probs are normalised over the tokens that are compared.
    """

    logprobs: Tensor
    ids: Tensor
    divergence: Divergence
    beta: float
    columns: int
    cut: bool
    inputs: ClassVar[None] = None
    reads_logits_twice: ClassVar[bool] = False

    @property
    def num_statistics(self) -> int:
        return 1 + self.ids.shape[1] + self.cut

    def write_statistics(self, chunk: LogitsChunk, out: Tensor) -> None:
        x, rows, logits, _ = chunk
        own, end = x.num_statistics, x.num_statistics + 1 + self.ids.shape[1]
        write_chunk_statistics(x, rows, logits, out[:own])
        out[own], out[own + 1 : end], out[end:] = -torch.inf, 0.0, -torch.inf
        if self.columns:
            z, common = x.at_ids(self.ids[rows], rows, logits)[1], logits[:, : self.columns]
            out[own] = common.amax(1).to(out.dtype) * x.inverse_temperature[rows]
            out[own + 1 : end] = z.masked_fill(z == -torch.inf, 0.0).t()
            if self.cut:
                out[end] = (common.to(out.dtype) * x.inverse_temperature[rows, None]).logsumexp(1)

    def compare(self, chunk: LogitsChunk, parts: Tensor) -> TeacherComparison:
        x, rows = chunk.x, chunk.rows
        own, end = x.num_statistics, x.num_statistics + 1 + self.ids.shape[1]
        found = combine(parts[:, :own], None if x.nucleus is None else x.nucleus[rows])
        common_lse = parts[:, end].logsumexp(0) if self.cut else found.lse
        missing = self.ids[rows] < 0
        z = parts[:, own + 1 : end].sum(0).t().masked_fill(missing, -torch.inf)
        log_p, log_q = with_rest(z - common_lse[:, None]), self._teacher(rows, parts.dtype)
        reverse_kl, forward_kl = _mean_ratio(log_p, log_p - log_q), _mean_ratio(log_q, log_q - log_p)
        value = mean = reverse_kl if self.divergence is Divergence.REVERSE else forward_kl
        if self.divergence is Divergence.JSD:
            ratio = log_ratio_to_mixture(log_p, log_q, self.beta)
            mean = _mean_ratio(log_p, ratio)
            value = (1 - self.beta) * mean + self.beta * _mean_ratio(log_q, ratio + (log_q - log_p))
        likeliest = z.gather(1, log_q[:, :-1].argmax(1, keepdim=True))[:, 0]
        student_lse, teacher_lse = z.logsumexp(1), log_q[:, :-1].logsumexp(1)
        return compared(
            found,
            divergence=value.clamp(min=0),
            mean=mean,
            reverse_kl=reverse_kl.clamp(min=0),
            forward_kl=forward_kl.clamp(min=0),
            teacher_entropy=_mean_ratio(log_q, -log_q),
            agreement=(likeliest >= parts[:, own].amax(0)).to(mean.dtype),
            student_lse=student_lse,
            teacher_lse=teacher_lse,
            student_mass=(student_lse - common_lse).exp().clamp(max=1),
            teacher_mass=teacher_lse.exp().clamp(max=1),
            common_lse=common_lse,
        )

    def write_gradient(
        self, chunk: LogitsChunk, found: TeacherComparison, weight: Tensor, logits: Tensor, term: PolicyTerm
    ) -> None:
        x, rows = chunk.x, chunk.rows
        columns, z = x.at_ids(self.ids[rows], rows, logits)
        owned = z > -torch.inf
        # The student's outcomes at other ranks' tokens are not read, but those of this rank and the rest.
        common_lse, width = found.common_lse, self.columns
        log_p = torch.cat([z - common_lse[:, None], log_rest(found.student_lse - common_lse)[:, None]], 1)
        slope = SLOPES[self.divergence](log_p, self._teacher(rows, term.lse.dtype), found.mean, self.beta)
        # For all tokens of the rest alike: ∂D/∂z_v ÷ p_v, with p over the whole vocabulary.
        of_rest = slope[:, -1] * torch.exp(term.lse - common_lse - log_p[:, -1])
        at_ids = slope[:, :-1] * weight[:, None] + gradient_at(term, columns, z - term.lse[:, None])
        at_ids = (at_ids * term.inverse_temperature[:, None]).where(owned, 0.0)
        for part, first, by_mass in ((slice(width), 0, term.a - weight * of_rest), (slice(width, None), width, term.a)):
            if (z_part := logits[:, part]).shape[1]:
                x.kernels.write_gradient(z_part, replace(term.columns(first, z_part.shape[1]), a=by_mass))
        # Written whole instead of added, because what stands there may be far larger.
        overwrite_at(logits, columns, owned, at_ids)

    def _teacher(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """Return the teacher's log-probs [n, K + 1] of the outcomes."""
        return with_rest(self.logprobs[rows].to(dtype).masked_fill(self.ids[rows] < 0, -torch.inf))


def gradient_at(term: PolicyTerm, columns: Tensor, log_p: Tensor) -> Tensor:
    """Return [n, K] of what `ChunkKernels.write_gradient` defines, times T, at columns with the given log p."""
    by_mass = term.a[:, None] if term.b is None else term.a[:, None] + term.b[:, None] * log_p
    return term.grad_logprobs[:, None] * (columns == term.labels[:, None]) - log_p.exp() * by_mass


def overwrite_at(logits: Tensor, columns: Tensor, owned: Tensor, values: Tensor) -> None:
    """Write [n, K] values to the columns of logits that are `owned`, each once; other columns may be repeated."""
    logits.scatter_reduce_(1, columns, (~owned).to(logits.dtype), "prod")
    logits.scatter_add_(1, columns, values.to(logits.dtype).where(owned, 0.0))


def with_rest(logprobs: Tensor) -> Tensor:
    """Append the log of the mass that [n, K] log-probs leave, as one more outcome."""
    return torch.cat([logprobs, log_rest(logprobs.logsumexp(1))[:, None]], 1)


def log_rest(log_mass: Tensor) -> Tensor:
    """Return log(1 − e^x); what is below a step of the dtype counts as one step."""
    return (-torch.expm1(log_mass)).clamp(min=torch.finfo(log_mass.dtype).eps).log()


def _mean_ratio(log_p: Tensor, values: Tensor) -> Tensor:
    """Return [n] Σ p·values; outcomes of no probability count nothing."""
    p = log_p.exp()
    return torch.where(p > 0, p * values, 0.0).sum(1)

"""Compare a student's distribution over a sharded vocabulary with a teacher's, token by token.

A `WholeTeacher` has logits, computed from its hidden states beside the student's, which give the exact divergence; that
in `top_teacher` knows its likeliest tokens only.

The exact reverse and forward KL need one all-gather. Each rank computes KL_i(p‖q) between the softmaxes over its own
shard; with the shards' masses m_i under the student and n_i under the teacher

    KL(p‖q) = Σ_i m_i (KL_i + log m_i − log n_i),

in which no large logits cancel. JSD needs every lse first, and then an all-reduce of two floats per token.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.parallel.head.divergence import Divergence
from megarl.parallel.head.kernels import PolicyTerm
from megarl.parallel.head.statistics import HeadInputs, RowStatistics, combine, write_chunk_statistics
from megarl.parallel.head.teacher_kernels import NUM_BOTH, NUM_OWN, DivergenceTerm, LogitPair, TeacherKernels


class TeacherComparison(NamedTuple):
    """Values of each token, [n] in nats: the student's own, then those beside the teacher.

    lse and nucleus_lse: as in `RowStatistics`. divergence: the one that is optimized; its gradient subtracts `mean`.
    teacher_logprobs: of the labels; 0 where the teacher does not tell.
    agreement: 1 where both find the same token likeliest. student_lse, teacher_lse: over the tokens that are compared
    one by one. student_mass, teacher_mass: how much of each distribution these tokens have. common_lse: the student's
    over the tokens that both have; beside an engine's head, over all tokens outside it.
    """

    logprobs: Tensor
    entropy: Tensor
    divergence: Tensor
    teacher_logprobs: Tensor
    lse: Tensor
    nucleus_lse: Tensor
    mean: Tensor
    reverse_kl: Tensor
    forward_kl: Tensor
    teacher_entropy: Tensor
    agreement: Tensor
    student_lse: Tensor
    teacher_lse: Tensor
    student_mass: Tensor
    teacher_mass: Tensor
    common_lse: Tensor


class LogitsChunk(NamedTuple):
    """Tokens `rows` of the student's inputs x, and both models' raw logits [n, V]; what does not exist is empty."""

    x: HeadInputs
    rows: slice
    logits: Tensor
    others: Tensor


def compared(found: RowStatistics, **values: Tensor) -> TeacherComparison:
    """Complete a comparison by the student's own statistics, and by 0 for what the teacher does not tell."""
    nothing = dict.fromkeys(TeacherComparison._fields, torch.zeros_like(found.lse))
    own = {"logprobs": found.logprobs, "entropy": found.entropy, "lse": found.lse, "nucleus_lse": found.nucleus_lse}
    return TeacherComparison(**{**nothing, **own, **values})


class Teacher(Protocol):
    """A teacher as the head sees it."""

    @property
    def inputs(self) -> HeadInputs | None:
        """Return what the teacher's logits are computed from, or None if it has none."""

    @property
    def num_statistics(self) -> int:
        """Return how many floats per token ranks exchange for the teacher."""

    @property
    def reads_logits_twice(self) -> bool:
        """Return whether `compare` reads logits, so that each chunk is compared while they exist."""

    def write_statistics(self, chunk: LogitsChunk, out: Tensor) -> None:
        """Write this rank's statistics: `x.num_statistics` of the student, then those of the teacher."""

    def compare(self, chunk: LogitsChunk, parts: Tensor) -> TeacherComparison:
        """Combine the statistics of all ranks, [ranks, k, n]."""

    def write_gradient(
        self, chunk: LogitsChunk, found: TeacherComparison, weight: Tensor, logits: Tensor, term: PolicyTerm
    ) -> None:
        """Do what `ChunkKernels.write_gradient` does, and add weight·∂D/∂r."""


def holding(teacher: Teacher, large: Iterator[Tensor]) -> Teacher:
    """Return a teacher whose inputs, if it has any, have the next of these tensors as their `large` ones."""
    if teacher.inputs is None:
        return teacher
    return replace(cast("WholeTeacher", teacher), inputs=teacher.inputs.holding(large))


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeTeacher:
    """A teacher whose logits are computed from its hidden states, from one chunk of tokens to the next.

    columns: how many of this rank's first columns are compared. cut: whether some rank's are not all compared.
    """

    inputs: HeadInputs
    kernels: TeacherKernels
    divergence: Divergence
    beta: float
    columns: int
    cut: bool

    @property
    def num_statistics(self) -> int:
        return NUM_BOTH + 2 * self.cut

    @property
    def reads_logits_twice(self) -> bool:
        return self.divergence is Divergence.JSD

    def write_statistics(self, chunk: LogitsChunk, out: Tensor) -> None:
        x, rows, logits, others = chunk
        width, own, scale = self.columns, x.num_statistics, self.inputs.inverse_temperature[rows]
        both = torch.zeros(NUM_OWN + NUM_BOTH, len(logits), dtype=out.dtype, device=out.device)
        both[0], both[3], both[7:] = -torch.inf, -torch.inf, -torch.inf

        def write(logits: Tensor, inverse_temperature: Tensor, labels: Tensor, out: Tensor) -> None:
            if width:
                here = labels.where(labels < width, -1)
                self.kernels.statistics(
                    LogitPair(logits[:, :width], others[:, :width], inverse_temperature, scale), here, both
                )
            out.copy_(both[:NUM_OWN])
            if logits.shape[1] > width:
                beyond = torch.empty_like(out)
                elsewhere = (labels - width).clamp(min=-1)
                x.kernels.statistics(logits[:, width:], inverse_temperature, elsewhere, beyond)
                found = combine(torch.stack([out, beyond]))
                out[0], out[1], out[2] = found.lse, found.entropy, out[2] + beyond[2]

        write_chunk_statistics(x, rows, logits, out[:own], write)
        out[own : own + NUM_BOTH] = both[NUM_OWN:]
        if self.cut:
            out[own + NUM_BOTH] = both[0]
            out[own + NUM_BOTH + 1] = (others[:, width:].to(out.dtype) * scale[:, None]).logsumexp(1)

    def compare(self, chunk: LogitsChunk, parts: Tensor) -> TeacherComparison:
        x, rows, logits, others = chunk
        own, width = x.num_statistics, self.columns
        found = combine(parts[:, :own], None if x.nucleus is None else x.nucleus[rows])
        teacher_parts, teacher_entropy, reverse, forward, peak, teacher_peak, beside = parts[:, own : own + 7].unbind(1)
        student_parts = parts[:, own + NUM_BOTH] if self.cut else parts[:, 0]
        student_lse, teacher_lse = student_parts.logsumexp(0), teacher_parts.logsumexp(0)
        log_m, log_n = student_parts - student_lse, teacher_parts - teacher_lse
        m, n = log_m.exp(), log_n.exp()
        # 0·(∞ − ∞) of shards without a token that is compared.
        reverse_kl = torch.where(m > 0, m * (reverse + log_m - log_n), 0.0).sum(0)
        forward_kl = torch.where(n > 0, n * (forward + log_n - log_m), 0.0).sum(0)
        value = mean = reverse_kl if self.divergence is Divergence.REVERSE else forward_kl
        if self.divergence is Divergence.JSD:
            terms = torch.zeros(2, len(found.lse), dtype=parts.dtype, device=parts.device)
            if width:
                scales = x.inverse_temperature[rows], self.inputs.inverse_temperature[rows]
                pair = LogitPair(logits[:, :width], others[:, :width], *scales)
                self.kernels.mixture(pair, lse=student_lse, teacher_lse=teacher_lse, beta=self.beta, out=terms)
            if x.shard.group.size() > 1:
                dist.all_reduce(terms, group=x.shard.group)
            mean, value = terms[0], (1 - self.beta) * terms[0] + self.beta * terms[1]
        outside = parts[:, own + NUM_BOTH + 1].logsumexp(0) if self.cut else torch.full_like(mean, -torch.inf)
        return compared(
            found,
            # Round-off may leave a tiny negative number where the two agree.
            divergence=value.clamp(min=0),
            mean=mean,
            reverse_kl=reverse_kl.clamp(min=0),
            forward_kl=forward_kl.clamp(min=0),
            teacher_entropy=(n * teacher_entropy + torch.special.entr(n)).sum(0),
            agreement=(beside.gather(0, peak.argmax(0)[None])[0] >= teacher_peak.amax(0)).to(mean.dtype),
            student_lse=student_lse,
            teacher_lse=teacher_lse,
            student_mass=(student_lse - found.lse).exp(),
            teacher_mass=(teacher_lse - torch.logaddexp(teacher_lse, outside)).exp(),
            common_lse=student_lse,
        )

    def write_gradient(
        self, chunk: LogitsChunk, found: TeacherComparison, weight: Tensor, logits: Tensor, term: PolicyTerm
    ) -> None:
        width = self.columns
        if width:
            beside = DivergenceTerm(
                divergence=self.divergence,
                beta=self.beta,
                others=chunk.others[:, :width],
                inverse_temperature=self.inputs.inverse_temperature[chunk.rows],
                lse=found.student_lse,
                teacher_lse=found.teacher_lse,
                mean=found.mean,
                weight=weight,
            )
            self.kernels.write_gradient(logits[:, :width], term.columns(0, width), beside)
        if (beyond := logits.shape[1] - width) > 0:
            chunk.x.kernels.write_gradient(logits[:, width:], term.columns(width, beyond))

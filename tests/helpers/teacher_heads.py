"""Problems of the head with a teacher, their float64 answer from dense logits, and the head on one rank or a pool's."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from megarl.config.schema import LayoutConfig
from megarl.parallel.head.divergence import Divergence
from tests.helpers.head import HeadProblem, dense_values, head_problem
from tests.helpers.head_ranks import ONE_RANK, Collective, Collectives, token_gradients, token_loss
from tests.helpers.rank_pool import RankContext
from tests.helpers.ranks import join_layout

if TYPE_CHECKING:
    from megarl.parallel.head.distill import DistilledLogprobs
    from megarl.parallel.head.logprobs import HeadOptions

TEACHER_TEMPERATURE = 0.5
VALUES = ("logprobs", "entropy", "divergence", "reverse_kl", "forward_kl", "teacher_entropy", "agreement")
VALUES += ("student_mass", "teacher_mass")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaughtProblem:
    """A student's problem, and a teacher: its hidden states [N, H'], weight [V', H'], and how it is compared.

    The loss is `token_loss` and Σ g_D·sin(divergence). common: as in `TeacherLogits`. top_k: only the teacher's
    likeliest k tokens are known, of those in common; where `gap` is set, every other row has one less.
    """

    student: HeadProblem
    teacher_hidden: torch.Tensor
    teacher_weight: torch.Tensor
    grad_divergence: torch.Tensor
    divergence: Divergence = Divergence.REVERSE
    beta: float = 0.3
    common: int | None = None
    top_k: int | None = None
    gap: bool = False

    def to(self, dtype: torch.dtype) -> "TaughtProblem":
        return replace(
            self,
            student=self.student.to(dtype),
            teacher_hidden=self.teacher_hidden.to(dtype),
            teacher_weight=self.teacher_weight.to(dtype),
        )

    def top(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The teacher's k likeliest log-probs and ids."""
        assert self.top_k is not None
        u = self.teacher_hidden.double() @ self.teacher_weight.double().t() / TEACHER_TEMPERATURE
        logprobs, ids = u[:, : self.common].log_softmax(-1).topk(self.top_k)
        if self.gap:
            logprobs[::2, -1], ids[::2, -1] = -torch.inf, -1
        return logprobs, ids


def taught_problem(*, num_rows: int = 7, vocab_size: int = 11, teacher_vocab: int = 11, **rest: Any) -> TaughtProblem:
    """`head_problem` and a teacher of another width."""
    generator = torch.Generator().manual_seed(num_rows + 50)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    given: dict[str, Any] = {"student": head_problem(num_rows=num_rows, vocab_size=vocab_size), **rest}
    return TaughtProblem(
        teacher_hidden=randn(num_rows, 9),
        teacher_weight=randn(teacher_vocab, 9) / 3,
        grad_divergence=randn(num_rows),
        **given,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TaughtResult:
    """[N] values by name, and gradients of hidden [N, H] and weight [V, H]."""

    values: dict[str, torch.Tensor]
    grad_hidden: torch.Tensor
    grad_weight: torch.Tensor


def divergences(log_p: torch.Tensor, log_q: torch.Tensor, beta: float) -> dict[Divergence, torch.Tensor]:
    """[N] all three by their definitions."""

    def kl(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a.exp() * (a - b)).sum(-1)

    m = torch.log((1 - beta) * log_p.exp() + beta * log_q.exp())
    return {
        Divergence.REVERSE: kl(log_p, log_q),
        Divergence.FORWARD: kl(log_q, log_p),
        Divergence.JSD: (1 - beta) * kl(log_p, m) + beta * kl(log_q, m),
    }


def dense_taught(problem: TaughtProblem) -> TaughtResult:
    """Everything from dense float64 distributions and autograd."""
    student = problem.student
    hidden = student.hidden.detach().double().clone().requires_grad_()
    weight = student.weight.detach().double().clone().requires_grad_()
    z, logprobs, entropy = dense_values(student, hidden, weight)
    u = problem.teacher_hidden.double() @ problem.teacher_weight.double().t() / TEACHER_TEMPERATURE
    common = min(z.shape[1], u.shape[1]) if problem.common is None else problem.common
    log_p, log_q = z[:, :common].log_softmax(-1), u[:, :common].log_softmax(-1)
    agreement = log_p.argmax(-1) == log_q.argmax(-1)
    student_mass = z.softmax(-1)[:, :common].sum(-1).detach()
    teacher_mass = u.softmax(-1)[:, :common].sum(-1)
    if problem.top_k is not None:
        _, ids = problem.top()
        chosen = torch.zeros_like(log_p, dtype=torch.bool)
        for row, known in zip(chosen, ids.tolist(), strict=True):
            row[[v for v in known if v >= 0]] = True
        student_mass = (log_p.exp() * chosen).sum(-1).detach()
        teacher_mass = (log_q.exp() * chosen).sum(-1)
        # Tokens of the rest count nothing where p = q = 1, and so does a rest without tokens.
        nothing = chosen.all(-1, keepdim=True)
        log_p, log_q = (
            torch.cat([a.where(chosen, 0.0), ((a.exp() * ~chosen).sum(-1, keepdim=True) + nothing).log()], 1)
            for a in (log_p, log_q)
        )
    found = divergences(log_p, log_q, problem.beta)
    value = found[problem.divergence]
    loss = token_loss(student, logprobs, entropy) + (problem.grad_divergence * value.sin()).sum()
    grad_hidden, grad_weight = torch.autograd.grad(loss, (hidden, weight))
    teacher_entropy = -(log_q.exp() * log_q).sum(-1)
    values = (logprobs, entropy, value, found[Divergence.REVERSE], found[Divergence.FORWARD], teacher_entropy)
    masses = (agreement.double(), student_mass, teacher_mass)
    return TaughtResult(
        values={name: each.detach() for name, each in zip(VALUES, (*values, *masses), strict=True)},
        grad_hidden=grad_hidden,
        grad_weight=grad_weight,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TaughtCase:
    """A problem, and how it is spread over ranks. teacher_rows: how many rows of the teacher's weight each rank has;
    other splits than the student's are split anew."""

    problem: TaughtProblem
    rows_per_rank: int = 16
    teacher_rows: int | None = None
    memory_mode: str = "recompute"
    chunk_tokens: int = 3
    row_counts: tuple[int, ...] | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def solve(self, group: Any = ONE_RANK) -> tuple["TaughtResult", list[Collective]]:
        """This rank's values, its parts of the gradients, and the collectives of forward."""
        from megarl.parallel.head.statistics import vocab_shard
        from megarl.parallel.teacher import resplit_weight

        problem, rank, size = self.problem, group.rank(), group.size()
        student = problem.student
        weight = student.padded_weight(self.rows_per_rank * size).split(self.rows_per_rank)[rank]
        shard = vocab_shard(group, self.rows_per_rank, student.vocab_size)
        per = self.teacher_rows or self.rows_per_rank
        theirs = problem.teacher_weight
        padded = torch.cat([theirs, torch.full((per * size - len(theirs), theirs.shape[1]), 7.0, dtype=theirs.dtype)])
        other, other_shard = resplit_weight(padded.split(per)[rank], vocab_shard(group, per, len(theirs)), shard)
        parts = [student.hidden, problem.teacher_hidden]
        hidden, taught = (each if self.row_counts is None else each.split(self.row_counts)[rank] for each in parts)
        hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        with Collectives() as seen:
            out = self.forward(hidden, weight, shard, taught, other, other_shard)
        loss = token_loss(student, out.logprobs, out.entropy)
        loss = loss + (problem.grad_divergence * out.divergence.sin()).sum()
        grad_hidden, grad_weight = torch.autograd.grad(loss, (hidden, weight))
        values = {name: getattr(out, name).detach() for name in (*VALUES, "teacher_logprobs")}
        return TaughtResult(values=values, grad_hidden=grad_hidden, grad_weight=grad_weight), seen.seen

    def forward(
        self, hidden: torch.Tensor, weight: torch.Tensor, shard: Any, taught: Any, other: Any, other_shard: Any
    ) -> "DistilledLogprobs":
        """The head with its teacher."""
        from megarl.parallel.head.distill import vocab_parallel_divergence
        from megarl.parallel.head.given_teachers import TeacherLogits, TopLogits

        problem = self.problem
        teacher: TeacherLogits | TopLogits = TeacherLogits(
            hidden=taught, weight=other, shard=other_shard, temperature=TEACHER_TEMPERATURE, common=problem.common
        )
        if problem.top_k is not None:
            logprobs, ids = problem.top()
            teacher = TopLogits(logprobs=logprobs, ids=ids, common=problem.common)
        return vocab_parallel_divergence(
            hidden,
            weight,
            problem.student.labels,
            shard=shard,
            teacher=teacher,
            divergence=problem.divergence,
            beta=problem.beta,
            options=self.head_options(),
            nucleus=problem.student.nucleus,
        )

    def head_options(self) -> "HeadOptions":
        from megarl.parallel.head.logprobs import HeadOptions
        from megarl.parallel.head.memory_mode import HeadMemoryMode

        problem, memory_mode = self.problem, HeadMemoryMode(self.memory_mode)
        return HeadOptions(
            temperature=problem.student.temperature,
            memory_mode=memory_mode,
            chunk_tokens=self.chunk_tokens,
            entropy_needs_grad=problem.student.grad_entropy is not None,
            row_counts=self.row_counts,
            logit_cap=problem.student.logit_cap,
            loss_gradients=taught_gradients(problem) if memory_mode is HeadMemoryMode.IN_CHUNK else None,
            **self.options,
        )


def taught_gradients(problem: TaughtProblem) -> Callable[..., tuple[torch.Tensor | None, ...]]:
    """The gradients of the loss, by hand."""
    of_policy = token_gradients(problem.student)

    def gradients(
        logprobs: torch.Tensor, entropy: torch.Tensor, divergence: torch.Tensor, _: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        return *of_policy(logprobs, entropy), problem.grad_divergence * divergence.cos()

    return gradients


def taught_heads(context: RankContext, cases: Sequence[TaughtCase]) -> list[tuple[TaughtResult, list[Collective]]]:
    """Each case in turn, the vocabularies spread over all ranks."""
    group = join_layout(context, LayoutConfig(tp=context.world_size)).layout.tp_group
    return [case.solve(group) for case in cases]

"""Problems of the head beside an engine's recorded likeliest tokens, and their float64 answer from dense logits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from megarl.config.schema import LayoutConfig
from tests.helpers.head import dense_values
from tests.helpers.head_ranks import Collective, token_loss
from tests.helpers.rank_pool import RankContext
from tests.helpers.ranks import join_layout
from tests.helpers.teacher_heads import TEACHER_TEMPERATURE, TaughtCase, TaughtProblem, TaughtResult

if TYPE_CHECKING:
    from megarl.parallel.head.distill import DistilledLogprobs

COMPARED = ("logprobs", "entropy", "divergence", "forward_kl", "student_mass", "teacher_mass")


def engine_head(problem: TaughtProblem) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and ids [N, K] of the engine's head: the likeliest `top_k`, or all of a token's nucleus."""
    logprobs, ids = problem.top()
    nucleus = problem.student.nucleus
    if nucleus is None:
        return logprobs, ids
    everything = problem.teacher_hidden.double() @ problem.teacher_weight.double().t() / TEACHER_TEMPERATURE
    kept = nucleus.long()
    inside = everything.gather(1, kept.clamp(min=0)).masked_fill(kept < 0, -torch.inf).log_softmax(-1)
    wide = torch.full((len(ids), kept.shape[1]), -1)
    other = torch.full(wide.shape, -torch.inf, dtype=torch.float64)
    wide[:, : ids.shape[1]], other[:, : ids.shape[1]] = ids, logprobs
    cut = kept[:, :1] >= 0
    return torch.where(cut, inside, other), torch.where(cut, kept, wide)


def dense_recorded(problem: TaughtProblem, weight: str, low: float, high: float) -> TaughtResult:
    """Score centering from dense float64 distributions and autograd, by the definition: q outside H is κ·p."""
    student = problem.student
    hidden = student.hidden.detach().double().clone().requires_grad_()
    matrix = student.weight.detach().double().clone().requires_grad_()
    z, logprobs, entropy = dense_values(student, hidden, matrix)
    lq, ids = engine_head(problem)
    values, masses, kls = [], [], []
    for i in range(len(z)):
        known = [j for j, v in enumerate(ids[i].tolist()) if v >= 0]
        at, q = ids[i, known], lq[i, known].exp()
        whole = student.nucleus is None or int(student.nucleus[i, 0]) < 0
        lp = (
            z[i].log_softmax(-1)
            if whole
            else z[i, at].log_softmax(-1).new_zeros(len(z[i])).index_add(0, at, z[i, at].log_softmax(-1))
        )[at]
        p = lp.detach().exp()
        tail_q, tail_p = max(1 - float(q.sum()), 1e-6), max(1 - float(p.sum()), 1e-6)
        kappa = tail_q / tail_p if whole else 1.0
        c = (
            q * weights_of(p / q, weight, low, high)
            - kappa * weights_of(torch.tensor([1 / kappa], dtype=torch.float64), weight, low, high) * p
        )
        values.append((c * lp).sum())
        masses.append((float(p.sum()), float(q.sum())))
        rests = 1 - torch.stack([q.sum(), p.sum()])
        has_rest = whole and len(known) < len(z[i])
        kls.append((q * (q.log() - p.log())).sum() + (rests[0] * (rests[0] / rests[1]).log() if has_rest else 0.0))
    value = torch.stack(values) if values else z.new_zeros(0)
    loss = token_loss(student, logprobs, entropy) + (problem.grad_divergence * value.sin()).sum()
    grad_hidden, grad_weight = torch.autograd.grad(loss, (hidden, matrix))
    found = (logprobs, entropy, value, torch.tensor([float(kl) for kl in kls], dtype=torch.float64))
    student_mass, teacher_mass = torch.tensor(masses, dtype=torch.float64).reshape(-1, 2).unbind(1)
    return TaughtResult(
        values={name: each.detach() for name, each in zip(COMPARED, (*found, student_mass, teacher_mass), strict=True)},
        grad_hidden=grad_hidden,
        grad_weight=grad_weight,
    )


def weights_of(ratio: torch.Tensor, weight: str, low: float, high: float) -> torch.Tensor:
    """f(r) by its definition."""
    if weight == "none":
        return torch.ones_like(ratio)
    return ratio.clamp(low, high) if weight == "tis" else ratio * ((ratio >= low) & (ratio <= high))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCase(TaughtCase):
    """A problem whose teacher is the engine, of which a head is known."""

    weight: str = "none"
    low: float = 0.0
    high: float = 2.0

    @property
    def measure(self) -> Any:
        """What the head computes."""
        from megarl.algos.centering import Centering
        from megarl.algos.off_policy_losses import TopDivergence

        rule: Any = self.weight
        if rule in ("tv", "kl"):
            return TopDivergence(kind=rule)
        return Centering(weight=rule, low=self.low, high=self.high)

    @property
    def expected(self) -> TaughtResult:
        return dense_recorded(self.problem, self.weight, self.low, self.high)

    def forward(
        self, hidden: torch.Tensor, weight: torch.Tensor, shard: Any, taught: Any, other: Any, other_shard: Any
    ) -> "DistilledLogprobs":
        """The head beside the engine's."""
        from megarl.parallel.head.distill import vocab_parallel_divergence

        problem = self.problem
        return vocab_parallel_divergence(
            hidden,
            weight,
            problem.student.labels,
            shard=shard,
            teacher=self.sampler(taught, other, other_shard),
            options=self.head_options(),
            nucleus=problem.student.nucleus,
        )

    def sampler(self, taught: torch.Tensor, other: torch.Tensor, other_shard: Any) -> Any:
        """What the head knows of who sampled."""
        from megarl.parallel.head.recorded import RecordedHead

        logprobs, ids = engine_head(self.problem)
        return RecordedHead(logprobs=logprobs.to(taught.dtype), ids=ids, measure=self.measure)


SCALES = {-1: 1.0, 0: 0.9, 4: 1.05}


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeCase(RecordedCase):
    """A problem whose sampler's whole distribution is at hand, as a teacher's is; also weight `tv` and `kl`.

    which: the number in `SCALES` of each token's output weight, relative to the teacher's."""

    which: tuple[int, ...] | None = None

    @property
    def expected(self) -> TaughtResult:
        """By the definition, over the whole vocabulary; KLs are not computed beside it."""
        problem, student = self.problem, self.problem.student
        hidden = student.hidden.detach().double().clone().requires_grad_()
        matrix = student.weight.detach().double().clone().requires_grad_()
        z, logprobs, entropy = dense_values(student, hidden, matrix)
        lp = z.log_softmax(-1)
        u = problem.teacher_hidden.double() @ problem.teacher_weight.double().t() / TEACHER_TEMPERATURE
        if self.which is not None:
            u = u * torch.tensor([SCALES[number] for number in self.which], dtype=u.dtype)[:, None]
        lq = u.log_softmax(-1)
        p, q = lp.detach().exp(), lq.exp()
        if self.weight == "tv":
            value = (p - q).abs().sum(1) / 2
        elif self.weight == "kl":
            value = (q * (lq - lp.detach())).sum(1)
        else:
            value = ((q * weights_of(p / q, self.weight, self.low, self.high) - p) * lp).sum(1)
        loss = token_loss(student, logprobs, entropy) + (problem.grad_divergence * value.sin()).sum()
        grad_hidden, grad_weight = torch.autograd.grad(loss, (hidden, matrix))
        nothing, whole = torch.zeros_like(value), torch.ones_like(value)
        found = (logprobs, entropy, value, nothing, whole, whole)
        values = {name: each.detach() for name, each in zip(COMPARED, found, strict=True)}
        values["teacher_logprobs"] = lq.gather(1, student.labels[:, None])[:, 0]
        return TaughtResult(values=values, grad_hidden=grad_hidden, grad_weight=grad_weight)

    def sampler(self, taught: torch.Tensor, other: torch.Tensor, other_shard: Any) -> Any:
        """What the head knows of who sampled."""
        from megarl.parallel.head.given_teachers import TeacherLogits

        return TeacherLogits(
            hidden=taught,
            weight=other,
            shard=other_shard,
            temperature=TEACHER_TEMPERATURE,
            measure=self.measure,
            others={number: other * scale for number, scale in SCALES.items() if number >= 0},
            which=None if self.which is None else torch.tensor(self.which),
        )


def recorded_heads(context: RankContext, cases: Sequence[RecordedCase]) -> list[tuple[TaughtResult, list[Collective]]]:
    """Each case in turn, the vocabulary spread over all ranks."""
    group = join_layout(context, LayoutConfig(tp=context.world_size)).layout.tp_group
    return [case.solve(group) for case in cases]

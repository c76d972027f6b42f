"""Problems for the log-prob head, and their float64 answer from dense logits."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from megarl.parallel.head.statistics import VocabShard


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadProblem:
    """hidden [N, H], weight [V, H] and labels [N]; the head's outputs are weighted by `grad_*` [N] into a loss."""

    hidden: torch.Tensor
    weight: torch.Tensor
    labels: torch.Tensor
    temperature: torch.Tensor
    grad_logprobs: torch.Tensor
    grad_entropy: torch.Tensor | None
    nucleus: torch.Tensor | None = None
    logit_cap: float | None = None

    @property
    def vocab_size(self) -> int:
        return self.weight.shape[0]

    def padded_weight(self, num_rows: int) -> torch.Tensor:
        """[num_rows, H]: the weight, then padding that would matter if it were read."""
        generator = torch.Generator().manual_seed(99)
        padding = torch.randn(num_rows - self.vocab_size, self.weight.shape[1], generator=generator)
        return torch.cat([self.weight, padding.to(self.weight.dtype)])

    def to(self, dtype: torch.dtype) -> "HeadProblem":
        return replace(self, hidden=self.hidden.to(dtype), weight=self.weight.to(dtype))


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadResult:
    """Values [N], and gradients of hidden [N, H] and weight [V, H]."""

    logprobs: torch.Tensor
    entropy: torch.Tensor
    grad_hidden: torch.Tensor
    grad_weight: torch.Tensor


def head_problem(
    *, num_rows: int = 7, vocab_size: int = 11, with_entropy: bool = True, dtype: torch.dtype = torch.float64
) -> HeadProblem:
    """Random logits of deviation ~2 at temperatures whose reciprocals are exact; labels of both ends occur."""
    generator = torch.Generator().manual_seed(num_rows)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    labels = torch.randint(0, vocab_size, (num_rows,), generator=generator)
    labels[:2] = torch.tensor([0, vocab_size - 1])[:num_rows]
    problem = HeadProblem(
        hidden=randn(num_rows, 6),
        weight=randn(vocab_size, 6),
        labels=labels,
        temperature=torch.tensor([0.5, 1.0, 2.0])[torch.arange(num_rows) % 3],
        grad_logprobs=randn(num_rows),
        grad_entropy=randn(num_rows) if with_entropy else None,
    )
    return problem.to(dtype)


def nucleus_problem(*, num_rows: int = 7, with_entropy: bool = True, dtype: torch.dtype = torch.float64) -> HeadProblem:
    """`head_problem` whose labels were sampled from one to five tokens; the row before the last from all of them."""
    problem = head_problem(num_rows=num_rows, with_entropy=with_entropy, dtype=dtype)
    generator = torch.Generator().manual_seed(5)
    ids = torch.full((num_rows, 5), -1, dtype=torch.int32)
    for i, label in enumerate(problem.labels.tolist()):
        others = [v for v in torch.randperm(problem.vocab_size, generator=generator).tolist() if v != label][: i % 5]
        ids[i, : 1 + len(others)] = torch.tensor([*others[:1], label, *others[1:]])
    ids[-2:-1] = -1
    return replace(problem, nucleus=ids)


def dense_head(problem: HeadProblem) -> HeadResult:
    """log_softmax of dense float64 logits, differentiated by autograd."""
    hidden = problem.hidden.detach().clone().double().requires_grad_()
    weight = problem.weight.detach().clone().double().requires_grad_()
    _, logprobs, entropy = dense_values(problem, hidden, weight)
    loss = (logprobs * problem.grad_logprobs).sum()
    if problem.grad_entropy is not None:
        loss = loss + (entropy * problem.grad_entropy).sum()
    grad_hidden, grad_weight = torch.autograd.grad(loss, (hidden, weight))
    return HeadResult(
        logprobs=logprobs.detach(), entropy=entropy.detach(), grad_hidden=grad_hidden, grad_weight=grad_weight
    )


def dense_values(
    problem: HeadProblem, hidden: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """z [N, V], log-probs and entropies [N] of dense logits; of a nucleus the log-probs have −∞ outside of it."""
    logits = hidden @ weight.t()
    if (cap := problem.logit_cap) is not None:
        logits = cap * (logits / cap).tanh()
    z = logits / problem.temperature.double()[:, None]
    log_p = z.log_softmax(-1)
    outside = torch.zeros_like(z, dtype=torch.bool)
    for row, ids in zip(outside, [] if problem.nucleus is None else problem.nucleus.tolist(), strict=False):
        kept = [v for v in ids if v >= 0]
        row[[v for v in range(problem.vocab_size) if kept and v not in kept]] = True
    logprobs = z.masked_fill(outside, -torch.inf).log_softmax(-1).gather(1, problem.labels[:, None])[:, 0]
    return z, logprobs, -(log_p.exp() * log_p).sum(-1)


def differentiate_head(
    problem: HeadProblem, weight: torch.Tensor, shard: "VocabShard", *, chunk_tokens: int
) -> HeadResult:
    """The log-prob head on a rank's rows of the padded weight; the gradients of the hidden states and of these rows."""
    # Imported late: a rank prepares its platform first.
    from megarl.parallel.head.logprobs import HeadOptions, vocab_parallel_logprobs

    hidden, weight = problem.hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    out = vocab_parallel_logprobs(
        hidden,
        weight,
        problem.labels,
        shard=shard,
        options=HeadOptions(
            temperature=problem.temperature,
            chunk_tokens=chunk_tokens,
            entropy_needs_grad=problem.grad_entropy is not None,
        ),
    )
    loss = (out.logprobs * problem.grad_logprobs).sum()
    if problem.grad_entropy is not None:
        loss = loss + (out.entropy * problem.grad_entropy).sum()
    grad_hidden, grad_weight = torch.autograd.grad(loss, (hidden, weight))
    return HeadResult(
        logprobs=out.logprobs.detach(), entropy=out.entropy.detach(), grad_hidden=grad_hidden, grad_weight=grad_weight
    )


def pair_kl(
    hidden: torch.Tensor,
    other: torch.Tensor,
    weight: torch.Tensor,
    shard: "VocabShard",
    *,
    temperature: float,
    chunk_tokens: int | None = None,
) -> torch.Tensor:
    """[N] KL(hidden ‖ other) as the head computes it of rows and their twins."""
    from megarl.parallel.head.logprobs import HeadOptions, head_inputs
    from megarl.parallel.head.pairs import pair_statistics

    count = len(hidden)
    x = head_inputs(
        torch.cat([other, hidden]),
        weight,
        torch.zeros(2 * count, dtype=torch.int64),
        shard=shard,
        options=HeadOptions(temperature=temperature, chunk_tokens=chunk_tokens),
    )
    pairs = pair_statistics(x, torch.arange(count), torch.arange(count, 2 * count))
    assert not pairs.kl[count:].any()
    return pairs.kl[:count]

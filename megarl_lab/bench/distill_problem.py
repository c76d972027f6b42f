"""Make inputs of the head with a teacher, and their gradients by dense float64 distributions."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from megarl.algos.centering import Centering
from megarl.algos.off_policy_losses import TopDivergence
from megarl.parallel.head.divergence import Divergence
from megarl.types.objectives import HeadMeasure

BETA = 0.5
# Bounds of score centering's weight.
CLIP = (0.5, 2.0)
MEASURES: Mapping[str, HeadMeasure] = MappingProxyType(
    {"centering": Centering(weight="tis", low=CLIP[0], high=CLIP[1]), "tv": TopDivergence(kind="tv")}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillSize:
    """Vocabulary, widths of student and teacher, rows, and rows of a chunk; None: the head decides."""

    vocab: int
    hidden: int
    teacher_hidden: int
    rows: int
    chunk: int | None


# A size whose dense answer is quick; chunks must be put together.
SMALL = DistillSize(vocab=1000, hidden=32, teacher_hidden=32, rows=100, chunk=32)
FULL: Mapping[str, DistillSize] = MappingProxyType(
    {
        "cpu": DistillSize(vocab=151936, hidden=2048, teacher_hidden=2048, rows=128, chunk=64),
        "cuda": DistillSize(vocab=151936, hidden=2048, teacher_hidden=2048, rows=8192, chunk=None),
    }
)


class Inputs:
    """A rank's share of random inputs: hidden states, weights' rows, labels, and gradients of log-probs and
    divergences."""

    def __init__(self, size: DistillSize, rank: int, world_size: int, dtype: Any, device: Any) -> None:
        import torch

        shared, own = (torch.Generator(device).manual_seed(seed) for seed in (world_size, world_size + 1 + rank))
        made = {"device": device, "dtype": dtype}
        shard = size.vocab // world_size
        self.hidden = torch.randn(size.rows, size.hidden, generator=shared, **made).requires_grad_()
        self.teacher_hidden = torch.randn(size.rows, size.teacher_hidden, generator=shared, **made)
        weight = torch.randn(shard, size.hidden, generator=own, **made)
        self.weight = weight.mul_(2 / size.hidden**0.5).requires_grad_()
        other = torch.randn(shard, size.teacher_hidden, generator=own, **made)
        self.teacher_weight = other.mul_(2 / size.teacher_hidden**0.5)
        self.labels = torch.randint(0, size.vocab, (size.rows,), generator=shared, device=device)
        self.by_logprobs, self.by_divergence = torch.randn(2, size.rows, generator=shared, device=device)


def dense_gradients(compared: str, world_size: int, dtype: str, device: str) -> tuple[Any, Any]:
    """Return the gradients of the small size by dense float64 distributions, of hidden states and the whole weight."""
    import torch

    made = getattr(torch, dtype)
    parts = [Inputs(SMALL, rank, world_size, made, torch.device(device)) for rank in range(world_size)]
    x = parts[0]
    hidden = x.hidden.detach().double().requires_grad_()
    weight = torch.cat([part.weight.detach() for part in parts]).double().requires_grad_()
    log_p = (hidden @ weight.t()).log_softmax(-1)
    other = torch.cat([part.teacher_weight for part in parts]).double()
    log_q = (x.teacher_hidden.double() @ other.t()).log_softmax(-1)
    p, q = log_p.exp(), log_q.exp()
    log_m = ((1 - BETA) * p + BETA * q).log()
    values = {
        "plain": 0 * log_p,
        "tv": 0 * log_p,
        "centering": (p.detach().clamp(CLIP[0] * q, CLIP[1] * q) - p.detach()) * log_p,
        Divergence.REVERSE: p * (log_p - log_q),
        Divergence.FORWARD: q * (log_q - log_p),
        Divergence.JSD: (1 - BETA) * p * (log_p - log_m) + BETA * q * (log_q - log_m),
    }
    logprobs = log_p.gather(1, x.labels[:, None])[:, 0]
    loss = logprobs @ x.by_logprobs.double() + values[compared].sum(-1) @ x.by_divergence.double()
    by_hidden, by_weight = torch.autograd.grad(loss, (hidden, weight))
    return by_hidden.cpu(), by_weight.cpu()

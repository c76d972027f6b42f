"""Random inputs of the log-prob head on a rank, and their gradients by dense float64 distributions."""

from dataclasses import dataclass, fields, replace
from enum import StrEnum

import torch

BETA = 0.5
# Bounds of score centering's weight.
CLIP = (0.5, 2.0)
# Deviation of the logits: softmax is neither flat nor a point.
LOGIT_STD = 2.0


class HeadObjective(StrEnum):
    """A contender differentiates this beside log-probs: nothing, entropies, or a number beside another distribution."""

    PLAIN = "plain"
    ENTROPY = "entropy"
    REVERSE = "reverse"
    FORWARD = "forward"
    JSD = "jsd"
    CENTERING = "centering"
    TV = "tv"


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Vocabulary V, rows N, width H of student and teacher, and rows of a chunk; None: the head decides."""

    vocab: int
    rows: int
    hidden: int
    chunk: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """A rank's share: [N, H] hidden states, [V/tp, H] rows of the weights, [N] labels and gradients of the loss."""

    hidden: torch.Tensor
    weight: torch.Tensor
    teacher_hidden: torch.Tensor
    teacher_weight: torch.Tensor
    labels: torch.Tensor
    by_logprobs: torch.Tensor
    by_entropy: torch.Tensor
    by_divergence: torch.Tensor

    @classmethod
    def make(cls, size: Size, rank: int, world_size: int, dtype: torch.dtype, device: torch.device) -> "Inputs":
        shared, own = (torch.Generator(device).manual_seed(seed) for seed in (world_size, world_size + 1 + rank))

        def normal(*shape: int, generator: torch.Generator, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device=device, dtype=dtype)

        shard, scale = (size.vocab // world_size, size.hidden), LOGIT_STD / size.hidden**0.5
        by_logprobs, by_entropy, by_divergence = normal(3, size.rows, generator=shared, dtype=torch.float32)
        return cls(
            hidden=normal(size.rows, size.hidden, generator=shared).requires_grad_(),
            weight=normal(*shard, generator=own).mul_(scale).requires_grad_(),
            teacher_hidden=normal(size.rows, size.hidden, generator=shared),
            teacher_weight=normal(*shard, generator=own).mul_(scale),
            labels=torch.randint(size.vocab, (size.rows,), generator=shared, device=device),
            by_logprobs=by_logprobs,
            by_entropy=by_entropy,
            by_divergence=by_divergence,
        )

    def to(self, device: torch.device) -> "Inputs":
        moved = {field.name: getattr(self, field.name).detach().to(device) for field in fields(self)}
        return replace(self, **{name: moved[name].requires_grad_(name in ("hidden", "weight")) for name in moved})

    def anew(self) -> "Inputs":
        """Return the same, with hidden states that may be overwritten, and without gradients."""
        self.weight.grad = None
        return replace(self, hidden=self.hidden.detach().clone().requires_grad_())

    def loss(self, logprobs: torch.Tensor, entropy: torch.Tensor | None = None) -> torch.Tensor:
        loss = logprobs.float() @ self.by_logprobs
        return loss if entropy is None else loss + entropy.float() @ self.by_entropy


def dense_gradients(size: Size, objective: HeadObjective, world_size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the gradients of hidden states and of the whole weight, from inputs of `dtype`."""
    x, *others = (Inputs.make(size, rank, world_size, dtype, torch.device("cpu")) for rank in range(world_size))
    hidden = x.hidden.detach().double().requires_grad_()
    weight = torch.cat([part.weight.detach() for part in (x, *others)]).double().requires_grad_()
    log_p = (hidden @ weight.t()).log_softmax(-1)
    other = torch.cat([part.teacher_weight for part in (x, *others)]).double()
    log_q = (x.teacher_hidden.double() @ other.t()).log_softmax(-1)
    p, q = log_p.exp(), log_q.exp()
    log_m = ((1 - BETA) * p + BETA * q).log()
    gradient = x.by_entropy if objective is HeadObjective.ENTROPY else x.by_divergence
    values = {
        HeadObjective.PLAIN: 0 * log_p,
        HeadObjective.ENTROPY: -p * log_p,
        HeadObjective.REVERSE: p * (log_p - log_q),
        HeadObjective.FORWARD: q * (log_q - log_p),
        HeadObjective.JSD: (1 - BETA) * p * (log_p - log_m) + BETA * q * (log_q - log_m),
        HeadObjective.CENTERING: (p.detach().clamp(CLIP[0] * q, CLIP[1] * q) - p.detach()) * log_p,
        # Only a mask of rows reads it.
        HeadObjective.TV: 0 * log_p,
    }
    logprobs = log_p.gather(1, x.labels[:, None])[:, 0]
    loss = logprobs @ x.by_logprobs.double() + values[objective].sum(-1) @ gradient.double()
    return list(torch.autograd.grad(loss, (hidden, weight)))

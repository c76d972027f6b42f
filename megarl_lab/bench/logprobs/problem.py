"""The problem of every contender: log-probs and entropies from hidden states and a rank's rows of the output weight.

Differentiated is L = Σ_i g_i log p(y_i) + Σ_i e_i H_i with random g and e, as in training with an entropy bonus.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megarl_lab.bench.logprobs.records import Size

# Deviation of the logits: softmax is neither flat nor a point.
LOGIT_STD = 2.0
# Every rank has the whole of these: quantity → attribute of an answer.
_REPLICATED = {"log-prob": "logprobs", "entropy": "entropy", "hidden gradient": "grad_hidden"}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadProblem:
    """A rank's share. hidden [N, H] and weight [V/tp, H] want gradients; labels, grad_logprobs, grad_entropy [N].

    main_grad: float32 zeros [V/tp, H] that the weight's gradient is added to, as Megatron keeps them with its weights.
    """

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    grad_logprobs: Tensor
    grad_entropy: Tensor
    main_grad: Tensor | None = None

    def to(self, device: torch.device) -> "HeadProblem":
        return replace(
            self,
            hidden=self.hidden.detach().to(device).requires_grad_(),
            weight=self.weight.detach().to(device).requires_grad_(),
            labels=self.labels.to(device),
            grad_logprobs=self.grad_logprobs.to(device),
            grad_entropy=self.grad_entropy.to(device),
            main_grad=None if self.main_grad is None else self.main_grad.to(device),
        )

    @property
    def grad_weight(self) -> Tensor:
        """The weight's gradient, where it ended up."""
        grad = self.weight.grad if self.main_grad is None else self.main_grad
        assert grad is not None
        return grad


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """[N] log-probs and entropies; entropy is None where a contender computes none."""

    logprobs: Tensor
    entropy: Tensor | None


Head = Callable[[HeadProblem], Outputs]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadOutputs:
    """Values and gradients; entropy is None where a contender computes none."""

    logprobs: Tensor
    entropy: Tensor | None
    grad_hidden: Tensor
    grad_weight: Tensor


def make_problem(
    size: Size,
    *,
    rank: int,
    world_size: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    with_main_grad: bool = False,
) -> HeadProblem:
    """Everything but the weight is equal on all ranks. The vocabulary must divide by `world_size`."""
    assert size.vocab % world_size == 0, (size, world_size)
    shared = torch.Generator(device).manual_seed(world_size)
    own = torch.Generator(device).manual_seed(world_size + 1 + rank)
    labels = torch.randint(0, size.vocab, (size.rows,), generator=shared, device=device)
    grad_logprobs, grad_entropy = torch.randn(2, size.rows, generator=shared, device=device)
    hidden = torch.randn(size.rows, size.hidden, generator=shared, device=device, dtype=dtype)
    weight = torch.randn(size.vocab // world_size, size.hidden, generator=own, device=device, dtype=dtype)
    return HeadProblem(
        hidden=hidden.requires_grad_(),
        weight=weight.mul_(LOGIT_STD / size.hidden**0.5).requires_grad_(),
        labels=labels,
        grad_logprobs=grad_logprobs,
        grad_entropy=grad_entropy,
        # Written to, so that its pages are there.
        main_grad=torch.full(weight.shape, 0.0, device=device) if with_main_grad else None,
    )


def backward(problem: HeadProblem, outputs: Outputs) -> None:
    """Gradients of L into `problem.hidden.grad` and `problem.grad_weight`.

    A contender that cannot write the main gradient itself has its gradient added to it, as Megatron does.
    """
    pairs = [(outputs.logprobs, problem.grad_logprobs), (outputs.entropy, problem.grad_entropy)]
    given = [(value, grad) for value, grad in pairs if value is not None]
    torch.autograd.backward([value for value, _ in given], [grad for _, grad in given])
    if problem.main_grad is not None and problem.weight.grad is not None:
        problem.main_grad.add_(problem.weight.grad)
        problem.weight.grad = None


def solve(head: Head, problem: HeadProblem) -> HeadOutputs:
    """A contender's answer on one rank, on the CPU."""
    outputs = head(problem)
    backward(problem, outputs)
    assert problem.hidden.grad is not None
    return HeadOutputs(
        logprobs=outputs.logprobs.detach().cpu(),
        entropy=None if outputs.entropy is None else outputs.entropy.detach().cpu(),
        grad_hidden=problem.hidden.grad.cpu(),
        grad_weight=problem.grad_weight.cpu(),
    )


def solve_dense(
    size: Size, *, world_size: int, dtype: torch.dtype, with_entropy: bool, device: torch.device | str = "cpu"
) -> HeadOutputs:
    """The answer by dense float64 log_softmax over the whole vocabulary, from inputs of `dtype`, all on `device`."""
    shares = [
        make_problem(size, rank=rank, world_size=world_size, dtype=dtype, device=device) for rank in range(world_size)
    ]
    hidden = shares[0].hidden.detach().double().requires_grad_()
    weight = torch.cat([share.weight.detach() for share in shares]).double().requires_grad_()
    log_p = (hidden @ weight.t()).log_softmax(-1)
    logprobs = log_p.gather(1, shares[0].labels[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    loss = logprobs @ shares[0].grad_logprobs.double()
    if with_entropy:
        loss = loss + entropy @ shares[0].grad_entropy.double()
    grad_hidden, grad_weight = torch.autograd.grad(loss, (hidden, weight))
    return HeadOutputs(
        logprobs=logprobs.detach(), entropy=entropy.detach(), grad_hidden=grad_hidden, grad_weight=grad_weight
    )


def differences(answers: list[HeadOutputs], dense: HeadOutputs) -> dict[str, float]:
    """max |got − dense| ÷ max(1, max |dense|) of each value and gradient over all ranks' answers."""
    grad_weight = torch.cat([answer.grad_weight for answer in answers])
    found = {"weight gradient": _difference(grad_weight, dense.grad_weight)}
    for name, attribute in _REPLICATED.items():
        values = [getattr(answer, attribute) for answer in answers]
        if values[0] is not None:
            found[name] = _difference(torch.stack(values), getattr(dense, attribute))
    return found


def relative_errors(answer: HeadOutputs, dense: HeadOutputs) -> dict[str, float]:
    """‖got − dense‖ ÷ ‖dense‖ of each value and gradient of a single rank's answer."""
    found = {}
    for name, attribute in {**_REPLICATED, "weight gradient": "grad_weight"}.items():
        got, expected = getattr(answer, attribute), getattr(dense, attribute)
        if got is not None:
            error = torch.linalg.vector_norm(got.to(expected.device, expected.dtype) - expected)
            found[name] = float(error / torch.linalg.vector_norm(expected))
    return found


def _difference(got: Tensor, expected: Tensor) -> float:
    scale = max(1.0, float(expected.abs().max()))
    return float((got.double().cpu() - expected).abs().max()) / scale

"""The log-prob head on one rank, against dense float64 log_softmax."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.parallel.head.logprobs import HeadOptions, TokenLogprobs, vocab_parallel_logprobs
from megarl.parallel.head.statistics import VocabShard, vocab_shard
from tests.helpers.compare import assert_within
from tests.helpers.head import HeadProblem, HeadResult, dense_head, differentiate_head, head_problem

PADDED_ROWS = 16


def group_of(rank: int, size: int) -> Any:
    """A process group as far as the head reads it when there is one rank."""
    return SimpleNamespace(rank=lambda: rank, size=lambda: size)


ONE_RANK = group_of(0, 1)


def run_head(problem: HeadProblem, *, chunk_tokens: int = 3, shard: VocabShard | None = None) -> HeadResult:
    rows = shard or vocab_shard(ONE_RANK, PADDED_ROWS, problem.vocab_size)
    result = differentiate_head(problem, problem.padded_weight(PADDED_ROWS), rows, chunk_tokens=chunk_tokens)
    assert not result.grad_weight[problem.vocab_size :].any() or shard is not None
    return replace(result, grad_weight=result.grad_weight[: problem.vocab_size])


def assert_equal_results(got: HeadResult, expected: HeadResult, *, atol: float, grad_atol: float | None = None) -> None:
    assert_within("log-probs", got.logprobs, expected.logprobs, atol=atol)
    assert_within("entropy", got.entropy, expected.entropy, atol=atol)
    grad_atol = grad_atol or atol
    assert_within("gradient of hidden", got.grad_hidden, expected.grad_hidden, atol=grad_atol)
    assert_within("gradient of weight", got.grad_weight, expected.grad_weight, atol=grad_atol)


@pytest.mark.parametrize("with_entropy", [True, False], ids=["entropy", "no-entropy"])
@pytest.mark.parametrize("chunk_tokens", [1, 3, 7, 100])
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_values_and_gradients(dtype: torch.dtype, atol: float, chunk_tokens: int, with_entropy: bool) -> None:
    problem = head_problem(with_entropy=with_entropy, dtype=dtype)
    got = run_head(problem, chunk_tokens=chunk_tokens)
    assert got.logprobs.dtype == got.entropy.dtype == dtype
    assert_equal_results(got, dense_head(problem), atol=atol)


@pytest.mark.parametrize("num_rows", [0, 1])
def test_few_rows(num_rows: int) -> None:
    problem = head_problem(num_rows=num_rows)
    got = run_head(problem)
    assert got.logprobs.shape == (num_rows,)
    assert_equal_results(got, dense_head(problem), atol=1e-12)


def test_gradcheck() -> None:
    problem = head_problem(num_rows=4, vocab_size=5)

    def function(hidden: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = vocab_parallel_logprobs(
            hidden,
            weight,
            problem.labels,
            shard=vocab_shard(ONE_RANK, 8, problem.vocab_size),
            options=HeadOptions(temperature=problem.temperature, chunk_tokens=3, entropy_needs_grad=True),
        )
        return out.logprobs, out.entropy

    inputs = (problem.hidden.clone().requires_grad_(), problem.padded_weight(8).requires_grad_())
    assert torch.autograd.gradcheck(function, inputs)


def test_one_temperature_for_all_rows() -> None:
    problem = head_problem()
    shard = vocab_shard(ONE_RANK, problem.vocab_size, problem.vocab_size)
    for temperature in (1.0, 0.5):
        out = vocab_parallel_logprobs(
            problem.hidden, problem.weight, problem.labels, shard=shard, options=HeadOptions(temperature=temperature)
        )
        log_p = (problem.hidden @ problem.weight.t() / temperature).log_softmax(-1)
        assert_within("log-probs", out.logprobs, log_p.gather(1, problem.labels[:, None])[:, 0], atol=1e-12)


def test_by_hand() -> None:
    """Logits ln 1, ln 2, ln 5: p = 1/8, 2/8, 5/8. A fourth, padded row would take half of the mass."""
    weight = torch.tensor([[1.0], [2.0], [5.0], [8.0]], dtype=torch.float64).log()
    labels = torch.tensor([0, 2])
    hidden = torch.ones(2, 1, dtype=torch.float64)
    shard = vocab_shard(ONE_RANK, 4, 3)
    assert (shard.start, shard.size) == (0, 3)
    out = vocab_parallel_logprobs(hidden, weight, labels, shard=shard)
    p = torch.tensor([1 / 8, 2 / 8, 5 / 8], dtype=torch.float64)
    assert_within("log-probs", out.logprobs, p[labels].log(), atol=1e-15)
    assert_within("entropy", out.entropy, [-(p * p.log()).sum().item()] * 2, atol=1e-15)


@pytest.mark.parametrize("offset", [-1e4, 1e4])
def test_logits_far_from_zero(offset: float) -> None:
    """A constant added to all logits changes nothing; float32 exponentials of them would."""
    problem = head_problem(dtype=torch.float32)
    column = torch.full((problem.vocab_size, 1), offset)
    shifted = vocab_parallel_logprobs(
        torch.cat([problem.hidden, torch.ones(7, 1)], dim=1),
        torch.cat([problem.weight, column], dim=1),
        problem.labels,
        shard=vocab_shard(ONE_RANK, problem.vocab_size, problem.vocab_size),
    )
    plain = (problem.hidden.double() @ problem.weight.double().t()).log_softmax(-1)
    # Numbers near 1e4 have float32 steps of 1e-3.
    expected = plain.gather(1, problem.labels[:, None])[:, 0]
    assert_within("log-probs", shifted.logprobs, expected, atol=2e-3)
    assert_within("entropy", shifted.entropy, -(plain.exp() * plain).sum(-1), atol=2e-3)


def test_bfloat16_inputs_keep_float32_statistics() -> None:
    """A vocabulary of 4096: bfloat16 sums would stall, and their log-probs be off by tenths."""
    problem = head_problem(num_rows=40, vocab_size=4096, dtype=torch.bfloat16)
    shard = vocab_shard(ONE_RANK, 4096, 4096)
    hidden, weight = (x.clone().requires_grad_() for x in (problem.hidden, problem.weight))
    options = HeadOptions(entropy_needs_grad=True)
    out = vocab_parallel_logprobs(hidden, weight, problem.labels, shard=shard, options=options)
    assert out.logprobs.dtype == out.entropy.dtype == torch.float32
    # The logits themselves are a bfloat16 matrix product, as in the sampling engine.
    log_p = (problem.hidden @ problem.weight.t()).double().log_softmax(-1)
    assert_within("log-probs", out.logprobs.detach(), log_p.gather(1, problem.labels[:, None])[:, 0], atol=1e-5)
    assert_within("entropy", out.entropy.detach(), -(log_p.exp() * log_p).sum(-1), atol=1e-5)

    out.logprobs.sum().backward()
    grad_logits = torch.nn.functional.one_hot(problem.labels, 4096) - log_p.exp()
    for grad, expected in (
        (hidden.grad, grad_logits @ problem.weight.double()),
        (weight.grad, grad_logits.t() @ problem.hidden.double()),
    ):
        assert grad is not None
        assert grad.dtype == torch.bfloat16
        # Eight bits of mantissa.
        assert_within("gradient", grad.double() / expected.abs().max(), expected / expected.abs().max(), atol=2**-7)


def test_padding_matters_to_the_reference() -> None:
    """Without the mask the same comparison fails, for values and for gradients."""
    problem = head_problem()
    expected = dense_head(problem)
    unmasked = run_head(problem, shard=VocabShard(group=ONE_RANK, start=0, size=PADDED_ROWS))
    for name in ("logprobs", "entropy", "grad_hidden", "grad_weight"):
        assert (getattr(unmasked, name) - getattr(expected, name)).abs().max() > 0.01, name
    with pytest.raises(AssertionError, match="log-probs"):
        assert_equal_results(unmasked, expected, atol=1e-5)


def test_entropy_has_a_gradient_only_if_asked_for() -> None:
    problem = head_problem()
    hidden = problem.hidden.clone().requires_grad_()

    def head(entropy_needs_grad: bool) -> TokenLogprobs:
        return vocab_parallel_logprobs(
            hidden,
            problem.weight,
            problem.labels,
            shard=vocab_shard(ONE_RANK, problem.vocab_size, problem.vocab_size),
            options=HeadOptions(entropy_needs_grad=entropy_needs_grad),
        )

    assert head(False).logprobs.requires_grad
    assert not head(False).entropy.requires_grad
    assert head(True).entropy.requires_grad
    # Through the entropy alone.
    grad = torch.autograd.grad(head(True).entropy.sum(), hidden)[0]
    log_p = (hidden @ problem.weight.t()).log_softmax(-1)
    expected = torch.autograd.grad(-(log_p.exp() * log_p).sum(), hidden)[0]
    assert_within("gradient of hidden", grad, expected, atol=1e-12)


@pytest.mark.parametrize(
    ("size", "rows_per_rank", "expected"),
    [
        (1, 16, [(0, 11)]),
        (2, 8, [(0, 8), (8, 3)]),
        # All of the second half, then parts of the last two shards are padding.
        (2, 16, [(0, 11), (16, 0)]),
        (4, 4, [(0, 4), (4, 4), (8, 3), (12, 0)]),
    ],
)
def test_shards_cover_the_true_vocabulary(size: int, rows_per_rank: int, expected: list[tuple[int, int]]) -> None:
    shards = [vocab_shard(group_of(rank, size), rows_per_rank, 11) for rank in range(size)]
    assert [(shard.start, shard.size) for shard in shards] == expected


def test_rows_must_agree() -> None:
    problem = head_problem()
    shard = vocab_shard(ONE_RANK, problem.vocab_size, problem.vocab_size)
    with pytest.raises(ValueError, match="hidden has 7 rows, labels 6"):
        vocab_parallel_logprobs(problem.hidden, problem.weight, problem.labels[:6], shard=shard)


def test_entropy_golden(golden: Any, check_golden: Any) -> None:
    """Logits are hidden states under the identity."""
    case = golden("C.entropy")
    logits = torch.tensor([case["inputs"]["logits"]], dtype=torch.float64)
    out = vocab_parallel_logprobs(
        logits, torch.eye(3, dtype=torch.float64), torch.tensor([0]), shard=vocab_shard(ONE_RANK, 3, 3)
    )
    check_golden(out.entropy[0], case["expected"], case)

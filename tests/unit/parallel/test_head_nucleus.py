"""Log-probs of tokens that were sampled from a part of the vocabulary, on one rank."""

import math
from dataclasses import replace

import pytest
import torch

from megarl.parallel.head.logprobs import vocab_parallel_logprobs
from megarl.parallel.head.statistics import vocab_shard
from tests.helpers.compare import assert_within
from tests.helpers.head import HeadProblem, HeadResult, nucleus_problem
from tests.helpers.head_ranks import ONE_RANK, REGIMES, HeadCase, dense_token_loss


def run_head(problem: HeadProblem, memory_mode: str, *, chunk_tokens: int = 3) -> HeadResult:
    case = HeadCase(problem=problem, rows_per_rank=11, memory_mode=memory_mode, chunk_tokens=chunk_tokens)
    return case.differentiate(problem.weight, vocab_shard(ONE_RANK, 11, 11))


@pytest.mark.parametrize("memory_mode", REGIMES)
@pytest.mark.parametrize("with_entropy", [True, False], ids=["entropy", "no-entropy"])
@pytest.mark.parametrize("chunk_tokens", [1, 3, 100])
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_values_and_gradients(
    dtype: torch.dtype, atol: float, chunk_tokens: int, with_entropy: bool, memory_mode: str
) -> None:
    problem = nucleus_problem(with_entropy=with_entropy, dtype=dtype)
    got, expected = run_head(problem, memory_mode, chunk_tokens=chunk_tokens), dense_token_loss(problem)
    for name in ("logprobs", "entropy", "grad_hidden", "grad_weight"):
        assert_within(name, getattr(got, name), getattr(expected, name), atol=atol)


def test_by_hand() -> None:
    """Logits ln 1, ln 2, ln 5: out of {0, 2} token 0 has p = 1/6, out of {2} token 2 has p = 1, out of all 2/8."""
    weight = torch.tensor([[1.0], [2.0], [5.0]], dtype=torch.float64).log()
    hidden, labels = torch.ones(3, 1, dtype=torch.float64), torch.tensor([0, 2, 1])
    nucleus = torch.tensor([[2, 0], [2, -1], [-1, -1]], dtype=torch.int32)
    weight.requires_grad_()
    out = vocab_parallel_logprobs(hidden, weight, labels, shard=vocab_shard(ONE_RANK, 3, 3), nucleus=nucleus)
    assert_within("log-probs", out.logprobs.detach(), [math.log(1 / 6), 0.0, math.log(2 / 8)], atol=1e-15)
    p = torch.tensor([1 / 8, 2 / 8, 5 / 8], dtype=torch.float64)
    assert_within("entropy", out.entropy, [-(p * p.log()).sum().item()] * 3, atol=1e-15)
    (grad,) = torch.autograd.grad(out.logprobs.sum(), weight)
    # 1[v = label] − q_v of the three rows: (5/6, 0, −5/6), (0, 0, 0), (−1/8, 6/8, −5/8).
    assert_within("gradient", grad[:, 0], [5 / 6 - 1 / 8, 6 / 8, -5 / 6 - 5 / 8], atol=1e-15)


@pytest.mark.parametrize("memory_mode", REGIMES)
def test_a_nucleus_of_all_tokens_changes_nothing(memory_mode: str) -> None:
    problem = nucleus_problem()
    everything = replace(problem, nucleus=torch.arange(11).expand(7, 11))
    got, expected = run_head(everything, memory_mode), run_head(replace(problem, nucleus=None), memory_mode)
    for name in ("logprobs", "entropy", "grad_hidden", "grad_weight"):
        assert_within(name, getattr(got, name), getattr(expected, name), atol=1e-12)


def test_bfloat16_gradient_of_a_likely_token() -> None:
    """A label with q = 1 − 2⁻¹⁰: 1 − q is rounded once, while bfloat16 steps near 1 are 2⁻⁸."""
    hidden = torch.ones(1, 1, dtype=torch.bfloat16)
    weight = torch.tensor([[7.0], [0.0], [3.0]], dtype=torch.bfloat16).requires_grad_()
    nucleus = torch.tensor([[0, 1]])
    shard = vocab_shard(ONE_RANK, 3, 3)
    out = vocab_parallel_logprobs(hidden, weight, torch.tensor([0]), shard=shard, nucleus=nucleus)
    (grad,) = torch.autograd.grad(out.logprobs.sum(), weight)
    rest = 1 / (1 + math.exp(7))
    assert_within("gradient", grad[:, 0].float() / rest, [1.0, -1.0, 0.0], atol=2**-8)


def test_foreign_nucleus_is_refused() -> None:
    problem = nucleus_problem()
    with pytest.raises(ValueError, match=r"nucleus has shape \(3, 5\), expected \(7, K\)"):
        vocab_parallel_logprobs(
            problem.hidden,
            problem.weight,
            problem.labels,
            shard=vocab_shard(ONE_RANK, 11, 11),
            nucleus=torch.zeros(3, 5, dtype=torch.int32),
        )

"""The log-prob head of models that cap their logits, c·tanh(h·Wᵀ/c), against dense float64 logits."""

import math
from dataclasses import replace

import pytest
import torch

from megarl.parallel.head.logprobs import HeadOptions, head_inputs, vocab_parallel_logprobs, vocab_parallel_top_logprobs
from megarl.parallel.head.pairs import pair_statistics
from megarl.parallel.head.statistics import vocab_shard
from tests.helpers.compare import assert_within
from tests.helpers.head import head_problem, nucleus_problem
from tests.helpers.head_ranks import ONE_RANK, REGIMES, HeadCase, dense_token_loss

# Of logits of deviation 2: some are nearly where they were, some nearly at the cap.
CAP = 3.0


@pytest.mark.parametrize("memory_mode", REGIMES)
@pytest.mark.parametrize("with_nucleus", [False, True], ids=["all", "nucleus"])
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_values_and_gradients(dtype: torch.dtype, atol: float, with_nucleus: bool, memory_mode: str) -> None:
    make = nucleus_problem if with_nucleus else head_problem
    problem = replace(make(dtype=dtype), logit_cap=CAP)
    expected = dense_token_loss(problem)
    plain = dense_token_loss(replace(problem, logit_cap=None))
    assert (expected.logprobs - plain.logprobs).abs().max() > 0.5
    got = HeadCase(problem=problem, rows_per_rank=16, memory_mode=memory_mode).differentiate(
        problem.padded_weight(16), vocab_shard(ONE_RANK, 16, problem.vocab_size)
    )
    assert_within("gradient of weight", got.grad_weight[: problem.vocab_size], expected.grad_weight, atol=atol)
    for name in ("logprobs", "entropy", "grad_hidden"):
        assert_within(name, getattr(got, name), getattr(expected, name), atol=atol)


def test_by_hand() -> None:
    """h·Wᵀ = ln 3 and 0, c = 2: the logits are 2·tanh(ln 3 / 2) = 1 and 0, and their derivatives 1 − ¼ and 1."""
    weight = torch.tensor([[math.log(3)], [0.0]], dtype=torch.float64).requires_grad_()
    out = vocab_parallel_logprobs(
        torch.ones(1, 1, dtype=torch.float64),
        weight,
        torch.tensor([1]),
        shard=vocab_shard(ONE_RANK, 2, 2),
        options=HeadOptions(logit_cap=2.0),
    )
    p = math.e / (1 + math.e)
    assert_within("log-probs", out.logprobs.detach(), [math.log(1 - p)], atol=1e-15)
    (grad,) = torch.autograd.grad(out.logprobs.sum(), weight)
    assert_within("gradient", grad[:, 0], [-0.75 * p, p], atol=1e-15)


def test_most_likely_tokens_and_pairs() -> None:
    problem = replace(head_problem(), temperature=torch.ones(7))
    logits = CAP * (problem.hidden @ problem.weight.t() / CAP).tanh()
    log_p, options = logits.log_softmax(-1), HeadOptions(chunk_tokens=3, logit_cap=CAP)
    shard = vocab_shard(ONE_RANK, 16, problem.vocab_size)
    inputs = problem.hidden, problem.padded_weight(16), problem.labels
    _, top = vocab_parallel_top_logprobs(*inputs, shard=shard, top_k=2, options=options)
    assert_within("top log-probs", top.logprobs, log_p.topk(2).values, atol=1e-12)
    pairs = pair_statistics(head_inputs(*inputs, shard=shard, options=options), torch.arange(3), torch.arange(3, 6))
    kl = (log_p[3:6].exp() * (log_p[3:6] - log_p[:3])).sum(-1)
    assert_within("KL", pairs.kl[:3], kl, atol=1e-12)

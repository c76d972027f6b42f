"""Top-k log-probs on one rank, against dense float64 log_softmax."""

import math
from dataclasses import replace

import pytest
import torch

from megarl.config.models import HeadConfig
from megarl.parallel.head.logprobs import TokenLogprobs, vocab_parallel_top_logprobs
from megarl.parallel.head.policy import HeadRequest, TopTokens
from megarl.parallel.head.statistics import MAX_ID, VocabShard, top_of_chunk, vocab_shard
from tests.helpers.compare import assert_within
from tests.helpers.head import HeadProblem, dense_head, head_problem
from tests.helpers.head_ranks import ONE_RANK, HeadCase, TopResult, top_result
from tests.unit.parallel.test_multipliers import DIVISOR, pack_of, policy_head

PADDED_ROWS = 16


def run_top(problem: HeadProblem, top_k: int, chunk_tokens: int | None = 3) -> TopResult:
    case = HeadCase(problem=problem, rows_per_rank=PADDED_ROWS, chunk_tokens=chunk_tokens)
    shard = vocab_shard(ONE_RANK, PADDED_ROWS, problem.vocab_size)
    return top_result(case, problem.padded_weight(PADDED_ROWS), shard, top_k)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("chunk_tokens", [1, 3, None])
@pytest.mark.parametrize("top_k", [1, 4, 11])
def test_against_dense(top_k: int, chunk_tokens: int | None, dtype: torch.dtype, atol: float) -> None:
    problem = head_problem(dtype=dtype)
    got = run_top(problem, top_k, chunk_tokens)
    logits = problem.hidden.double() @ problem.weight.double().t() / problem.temperature.double()[:, None]
    expected = logits.log_softmax(-1).topk(top_k)
    assert got.ids.dtype == torch.int64
    assert torch.equal(got.ids, expected.indices)
    assert_within("top log-probs", got.logprobs, expected.values, atol=atol)
    # The labels' are those of the pass without.
    assert_within("log-probs", got.label_logprobs, dense_head(problem).logprobs, atol=atol)


@pytest.mark.parametrize("num_rows", [0, 1])
def test_few_rows(num_rows: int) -> None:
    got = run_top(head_problem(num_rows=num_rows), 2)
    assert got.logprobs.shape == got.ids.shape == (num_rows, 2)


def test_by_hand() -> None:
    """Logits ln 1, ln 2, ln 5: p = 1/8, 2/8, 5/8. A fourth, padded row would be the likeliest."""
    weight = torch.tensor([[1.0], [2.0], [5.0], [8.0]], dtype=torch.float64).log()
    hidden = torch.ones(1, 1, dtype=torch.float64)
    values, top = vocab_parallel_top_logprobs(
        hidden, weight, torch.tensor([0]), shard=vocab_shard(ONE_RANK, 4, 3), top_k=2
    )
    assert top.ids.tolist() == [[2, 1]]
    assert_within("top log-probs", top.logprobs, [[math.log(5 / 8), math.log(2 / 8)]], atol=1e-15)
    assert_within("log-probs", values.logprobs, [math.log(1 / 8)], atol=1e-15)


def test_more_than_there_are() -> None:
    """Places without a token are at the end, with no probability."""
    problem = head_problem(vocab_size=5)
    got = run_top(problem, 7)
    assert torch.equal(got.logprobs[:, 5:], torch.full((7, 2), -torch.inf, dtype=torch.float64))
    log_p = (problem.hidden @ problem.weight.t() / problem.temperature[:, None]).log_softmax(-1)
    expected = log_p.sort(descending=True)
    assert torch.equal(got.ids[:, :5], expected.indices)
    assert_within("top log-probs", got.logprobs[:, :5], expected.values, atol=1e-12)


def test_bfloat16_logits_have_float32_log_probs() -> None:
    problem = replace(head_problem(dtype=torch.bfloat16), temperature=torch.ones(7))
    got = run_top(problem, 3)
    log_p = (problem.hidden @ problem.weight.t()).double().log_softmax(-1)
    assert got.logprobs.dtype == torch.float32
    # Logits that are equal in bfloat16 may come in any order.
    assert_within("top log-probs", got.logprobs, log_p.topk(3).values, atol=1e-5)
    assert_within("log-probs of the ids", got.logprobs, log_p.gather(1, got.ids), atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("common", [3, 11, 14])
@pytest.mark.parametrize("top_k", [None, 2])
def test_a_distribution_over_the_first_tokens(top_k: int | None, common: int) -> None:
    """A teacher's, over those that the student has, too."""
    problem = head_problem()
    problem = replace(problem, labels=problem.labels % common)
    request = HeadRequest(temperature=0.7, settings=HeadConfig(), top_k=top_k, common=common)
    head = policy_head(problem, problem.padded_weight(PADDED_ROWS))
    out = head(problem.hidden[:, None], pack_of(problem), request, None)  # type: ignore[arg-type]
    assert isinstance(out, TokenLogprobs if top_k is None else TopTokens)
    log_p = (problem.hidden @ problem.weight[:common].t() / DIVISOR / 0.7).log_softmax(-1)
    assert_within("log-probs", out.logprobs, log_p.gather(1, problem.labels[:, None])[:, 0], atol=1e-12)
    assert_within("entropy", out.entropy, -(log_p.exp() * log_p).sum(-1), atol=1e-12)
    if isinstance(out, TopTokens):
        assert_within("likeliest", out.top_logprobs, log_p.topk(2).values, atol=1e-12)


def test_no_graph() -> None:
    problem = head_problem()
    hidden = problem.hidden.clone().requires_grad_()
    values, top = vocab_parallel_top_logprobs(
        hidden, problem.weight, problem.labels, shard=vocab_shard(ONE_RANK, 11, 11), top_k=2
    )
    assert not any(x.requires_grad for x in (values.logprobs, values.entropy, top.logprobs))


def test_ids_are_exact_up_to_the_largest() -> None:
    """Token ids travel as float32, which is exact to 2²⁴."""
    shard = VocabShard(group=ONE_RANK, start=MAX_ID - 3, size=3)
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    parts = top_of_chunk(logits, torch.ones(1), shard, 2)
    assert parts[2:, 0].long().tolist() == [MAX_ID - 2, MAX_ID - 1]
    beyond = VocabShard(group=ONE_RANK, start=MAX_ID - 2, size=3)
    with pytest.raises(AssertionError, match="do not fit into float32"):
        top_of_chunk(logits, torch.ones(1), beyond, 2)

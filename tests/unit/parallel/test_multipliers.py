"""Models that multiply: logits by the head, against dense float64 ones, and what their config.json says."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest
import torch

from megarl.config.models import HeadConfig
from megarl.parallel.head.pairs import TokenPairs
from megarl.parallel.head.policy import HeadRequest, PolicyHead
from megarl.parallel.head.statistics import vocab_shard
from megarl.weights.families import read_model_spec
from megarl.weights.rules import Multipliers
from tests.helpers.compare import assert_within
from tests.helpers.head import HeadProblem, dense_head, head_problem
from tests.helpers.head_ranks import ONE_RANK
from tests.unit.weights.test_families import GEMMA_2B, GRANITE_3_3_8B, LLAMA_3_1_8B, write_config

DIVISOR, TEMPERATURE = 16.0, 0.7


def policy_head(problem: HeadProblem, weight: torch.Tensor) -> PolicyHead:
    return PolicyHead(
        weight=weight,
        shard=vocab_shard(ONE_RANK, len(weight), problem.vocab_size),
        cp_group=ONE_RANK,
        sequence_parallel=False,
        logits_divisor=DIVISOR,
    )


def pack_of(problem: HeadProblem) -> SimpleNamespace:
    rows = torch.arange(len(problem.labels))
    return SimpleNamespace(
        positions=rows,
        kept_per_rank=(len(rows),),
        labels=problem.labels,
        nucleus=None,
        row_index=rows,
        column_index=torch.zeros_like(rows),
        batch_shape=(len(rows), 1),
    )


@pytest.mark.parametrize("memory_mode", ["recompute", "keep"])
def test_logits_are_divided_in_log_probs_entropies_and_gradients(memory_mode: Literal["recompute", "keep"]) -> None:
    """Logits of deviation 32, so that a sixteenth of them is far from uniform, at a temperature besides."""
    problem = head_problem()
    problem = replace(problem, hidden=problem.hidden * DIVISOR)
    expected = dense_head(replace(problem, temperature=torch.full((7,), DIVISOR * TEMPERATURE, dtype=torch.float64)))
    hidden, weight = problem.hidden.clone().requires_grad_(), problem.padded_weight(16).requires_grad_()
    request = HeadRequest(temperature=TEMPERATURE, settings=HeadConfig(regime=memory_mode), entropy_needs_grad=True)
    out = policy_head(problem, weight)(hidden[:, None], pack_of(problem), request, None)  # type: ignore[arg-type]
    assert not isinstance(out, TokenPairs)
    assert problem.grad_entropy is not None
    loss = (out.logprobs * problem.grad_logprobs + out.entropy * problem.grad_entropy).sum()
    grad_hidden, grad_weight = torch.autograd.grad(loss, (hidden, weight))
    assert_within("log-probs", out.logprobs.detach(), expected.logprobs, atol=1e-12)
    assert_within("entropies", out.entropy.detach(), expected.entropy, atol=1e-12)
    assert_within("gradient of hidden states", grad_hidden, expected.grad_hidden, atol=1e-12)
    assert_within("gradient of weight", grad_weight[: problem.vocab_size], expected.grad_weight, atol=1e-12)


@torch.no_grad()
def test_logits_are_divided_in_divergences() -> None:
    problem = head_problem(num_rows=6)
    log_p = (problem.hidden @ problem.weight.t() / DIVISOR / TEMPERATURE).log_softmax(-1)
    request = HeadRequest(temperature=TEMPERATURE, settings=HeadConfig(), paired=True)
    head = policy_head(problem, problem.padded_weight(16))
    out = head(problem.hidden[:, None], pack_of(problem), request, None)  # type: ignore[arg-type]
    assert isinstance(out, TokenPairs)
    assert_within("log-probs", out.logprobs, log_p.gather(1, problem.labels[:, None])[:, 0], atol=1e-12)
    kl = (log_p[3:].exp() * (log_p[3:] - log_p[:3])).sum(-1)
    assert_within("KL", out.kl[:3], kl, atol=1e-12)


def test_multipliers_of_published_models(tmp_path: Path) -> None:
    granite = read_model_spec(write_config(tmp_path, GRANITE_3_3_8B)).multipliers
    assert granite == Multipliers(embedding=12.0, attention=1 / 128, residual=0.22, logits_divisor=16.0)
    assert read_model_spec(write_config(tmp_path, LLAMA_3_1_8B)).multipliers == Multipliers()
    assert read_model_spec(write_config(tmp_path, GEMMA_2B)).multipliers == Multipliers(embedding=2048**0.5)

"""The head beside recorded heads against formulas that were written without sight of our code, on random cases."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megarl.algos.centering import Centering
from megarl.algos.off_policy_losses import TopDivergence
from megarl.algos.policy_losses import PolicyLossInputs, policy_loss
from megarl.config.algo import PolicyLossConfig
from megarl.parallel.head.distill import DistilledLogprobs, vocab_parallel_divergence
from megarl.parallel.head.logprobs import HeadOptions
from megarl.parallel.head.recorded import RecordedHead
from megarl.parallel.head.statistics import vocab_shard
from megarl.rollout.nucleus import nucleus_of
from megarl.types.objectives import HeadMeasure
from tests.helpers import offpolicy_oracle as oracle
from tests.helpers.exact_centering import Weight, gradient
from tests.helpers.head_ranks import ONE_RANK
from tests.helpers.offpolicy_cases import KINDS, Case, cases

RELATIVE = 1e-9
RULES = [("none", None, None, 0.0, 2.0), ("tis", None, None, 0.0, 2.0), ("tis", 0.5, 3.0, 0.5, 3.0)]
RULES += [("mis", None, None, 0.5, 5.0)]
numbers_of_cases = pytest.mark.parametrize(
    ("seed", "count"), [(0, len(KINDS)), pytest.param(1, 2000, marks=pytest.mark.long)]
)


def beside(
    case: Case, logits: Tensor, ids: Tensor, log_q: Tensor, measure: HeadMeasure, nucleus: Tensor | None = None
) -> DistilledLogprobs:
    """Our head, whose hidden states are the logits themselves."""
    size = logits.shape[-1]
    return vocab_parallel_divergence(
        logits,
        torch.eye(size, dtype=torch.float64),
        case.tokens.flatten(),
        shard=vocab_shard(ONE_RANK, size, size),
        teacher=RecordedHead(logprobs=log_q.flatten(0, 1), ids=ids.flatten(0, 1), measure=measure),
        options=HeadOptions(chunk_tokens=3),
        nucleus=nucleus if nucleus is None else nucleus.flatten(0, 1),
    )


def ids_of(support: Tensor) -> Tensor:
    """The tokens of a mask [B, T, V], padded with −1."""
    order = support.double().sort(dim=-1, descending=True, stable=True)
    width = int(support.sum(-1).max())
    return order.indices.masked_fill(order.values == 0, -1)[..., :width]


def closed_form(
    case: Case, ids: Tensor, recorded: Tensor, sampled: Tensor, weight: Weight, nucleus: Tensor | None
) -> tuple[np.ndarray, np.ndarray]:
    """The gradient by the logits [B, T, V], and what float64 may lose."""
    exact, doubt = np.zeros((2, *case.logits.shape), np.longdouble)
    for i, t in case.mask.nonzero().tolist():
        known = ids[i, t] >= 0
        exact[i, t], doubt[i, t] = gradient(
            case.logits[i, t].numpy(),
            int(case.tokens[i, t]),
            float(sampled[i, t]),
            ids[i, t, known].tolist(),
            recorded[i, t, known].tolist(),
            float(case.advantage[i]),
            weight,
            support=None if nucleus is None else nucleus[i, t][nucleus[i, t] >= 0].tolist(),
        )
    return exact, doubt


@numbers_of_cases
@pytest.mark.parametrize("truncates", [False, True])
def test_score_centering(truncates: bool, seed: int, count: int) -> None:
    num_gradients = 0
    for number, case in enumerate(cases(seed, count)):
        weight, low, high, lo, hi = RULES[number % len(RULES)]
        given: Any = weight
        cfg = PolicyLossConfig(name="score_centering", center_weight=given, center_low=low, center_high=high)
        theirs, ours = (case.logits.clone().requires_grad_() for _ in range(2))
        if truncates:
            log_q = case.roll_logits.masked_fill(~case.support, -torch.inf).log_softmax(-1)
            log_q = log_q.masked_fill(~case.support, 0.0)
            ids = nucleus = ids_of(case.support)
            recorded = log_q.gather(-1, ids.clamp(min=0))
            args = (case.advantage, case.mask, weight, lo, hi)
            expected = oracle.score_centering_support(theirs, case.tokens, case.support, log_q, *args)
        else:
            log_q, nucleus = case.roll_logits.log_softmax(-1), None
            ids, recorded = case.head_ids.masked_fill(~case.head_mask, -1), log_q.gather(-1, case.head_ids)
            args = (case.head_mask, case.advantage, case.mask, weight, lo, hi)
            expected = oracle.score_centering_head(theirs, case.tokens, case.roll, case.head_ids, recorded, *args)
        sampled = log_q.gather(-1, case.tokens[..., None])[..., 0]
        out = beside(case, ours.flatten(0, 1), ids, recorded, Centering.of(cfg), nucleus)
        x = PolicyLossInputs(
            logprobs=out.logprobs.view_as(sampled),
            old_logprobs=sampled,
            advantages=case.advantage[:, None].expand(sampled.shape),
            loss_mask=case.mask,
            rollout_logprobs=sampled,
            beside=out.divergence.view_as(sampled),
        )
        loss = torch.where(case.mask, policy_loss(x, cfg).loss, 0.0).sum()
        what = f"case {number} ({case.kind}), {weight}"
        gradients = [torch.autograd.grad(value, leaf)[0] for value, leaf in ((loss, ours), (expected, theirs))]
        exact, doubt = closed_form(case, ids, recorded, sampled, Weight(name=weight, low=lo, high=hi), nucleus)
        for found in gradients:
            assert (np.abs(found.numpy() - exact) <= RELATIVE * np.abs(exact) + doubt).all(), what
        size = float(torch.where(case.mask, x.advantages.abs(), 0.0).sum())
        assert float((loss - expected).detach().abs()) <= RELATIVE * (float(expected.detach().abs()) + size), what
        # What float64 may lose says little only where terms cancel.
        num_gradients += int((np.abs(exact) > 1e6 * doubt).sum())
    assert num_gradients > 10 * count


def cut(q: Tensor, *, top_k: int = 8, top_p: float = 1.0) -> Tensor:
    """What is left of probabilities [V]: the likeliest k, then as few of these as have a share p."""
    order = q.argsort(descending=True)[:top_k]
    left = q[order] / q[order].sum()
    order = order[left.cumsum(0) - left < top_p]
    return torch.zeros_like(q).index_copy(0, order, q[order] / q[order].sum())


@pytest.mark.parametrize("truncation", [{"top_k": 3}, {"top_p": 0.9}, {"top_k": 6, "top_p": 0.8}], ids=str)
@pytest.mark.parametrize(("weight", "low", "high"), [rule[:3] for rule in RULES])
def test_the_expected_update_of_a_constant_advantage_over_what_truncation_left(
    weight: str, low: float | None, high: float | None, truncation: dict[str, Any]
) -> None:
    """Of all tokens that could be sampled from a vocabulary of 8, each with its probability, it is 0 at every logit.

    As engines record them: the sampled token, then all of the vocabulary, with −∞ at what was left out.
    """
    given: Any = weight
    cfg = PolicyLossConfig(name="score_centering", center_weight=given, center_low=low, center_high=high)
    generator, bias = torch.Generator().manual_seed(8), 0.0
    for _ in range(5):
        logits, noise = torch.randn(2, 8, generator=generator, dtype=torch.float64)
        leaf, q = (logits / 2).requires_grad_(), cut((logits / 2 + noise).softmax(0), **truncation)
        left, order = q.nonzero()[:, 0], q.argsort(descending=True)
        assert len(left) < 8
        ids = torch.cat([left[:, None], order.expand(len(left), 8)], 1)
        nucleus, sampled, head = nucleus_of(ids.numpy(), q.log()[ids].numpy())
        out = vocab_parallel_divergence(
            leaf.expand(len(left), 8),
            torch.eye(8, dtype=torch.float64),
            left,
            shard=vocab_shard(ONE_RANK, 8, 8),
            teacher=RecordedHead(
                logprobs=torch.from_numpy(head.logprobs),
                ids=torch.from_numpy(head.ids).long(),
                measure=Centering.of(cfg),
            ),
            options=HeadOptions(chunk_tokens=3),
            nucleus=torch.from_numpy(nucleus).long(),
        )
        torch.testing.assert_close(torch.from_numpy(sampled), q[left].log())
        x = PolicyLossInputs(
            logprobs=out.logprobs[None],
            old_logprobs=torch.zeros(1, len(left), dtype=torch.float64),
            advantages=torch.ones(1, len(left), dtype=torch.float64),
            loss_mask=torch.ones(1, len(left), dtype=torch.bool),
            rollout_logprobs=q[left].log()[None],
            beside=out.divergence[None],
        )
        plain = replace(x, beside=torch.zeros_like(x.advantages))
        update, biased = (
            torch.autograd.grad((q[left] * policy_loss(each, cfg).loss).sum(), leaf, retain_graph=True)[0]
            for each in (x, plain)
        )
        torch.testing.assert_close(update, torch.zeros_like(update), rtol=0, atol=1e-13)
        bias += float(biased.abs().sum())
    # Weights whose bounds no ratio reaches have no bias.
    assert bias > 0.1 or weight != "none"


@numbers_of_cases
def test_divergences_of_the_likeliest_tokens(seed: int, count: int) -> None:
    for number, case in enumerate(cases(seed, count)):
        log_q = case.roll_logits.log_softmax(-1)
        chosen = torch.zeros_like(log_q, dtype=torch.bool)
        chosen.scatter_(-1, log_q.topk(min(case.topk, log_q.shape[-1]), dim=-1).indices, True)
        ids = ids_of(chosen.scatter(-1, case.tokens[..., None], True))
        recorded = log_q.gather(-1, ids.clamp(min=0))
        for kind, expected in (("tv", oracle.topk_tv), ("kl", oracle.topk_kl)):
            given: Any = kind
            out = beside(case, case.logits.flatten(0, 1), ids, recorded, TopDivergence(kind=given))
            theirs = expected(case.logits, log_q, case.tokens, case.topk)
            # 1 − Q is what a recorded head leaves of 1, so that a tail below rounding is not seen.
            torch.testing.assert_close(
                out.divergence.view_as(theirs), theirs, rtol=RELATIVE, atol=1e-12, msg=lambda m, n=number: f"{n}: {m}"
            )

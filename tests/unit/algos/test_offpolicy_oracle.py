"""Off-policy methods against formulas that were written without sight of our code, on random cases with edges."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from megarl.algos.advantages.turns import token_baseline
from megarl.algos.aggregation import AGGREGATIONS
from megarl.algos.batch_statistics import effective_sample_size, high_entropy
from megarl.algos.build import build_algorithm
from megarl.algos.corrections import CorrectionInputs, compute_correction
from megarl.algos.off_policy_losses import balanced_bounds, binary_kl, binary_tv
from megarl.algos.policy_losses import PolicyLossInputs, policy_loss
from megarl.config.algo import AlgoConfig, CorrectionConfig, PolicyLossConfig
from megarl.types import Algorithm, PolicyOutputs, Row, RowBatch
from tests.helpers import offpolicy_oracle as oracle
from tests.helpers.offpolicy_cases import KINDS, Case, cases

RELATIVE = 1e-9
# (case, log-probs, advantages [B, T]) → the sum of the losses of the loss tokens.
Method = Callable[[Case, Tensor, Tensor], Tensor]


def of_tokens(
    case: Case, logprobs: Tensor, advantages: Tensor, anchor: Tensor, cfg: PolicyLossConfig, **more: Tensor
) -> Tensor:
    """Our loss, summed up by the aggregation over tokens."""
    x = PolicyLossInputs(logprobs=logprobs, old_logprobs=anchor, advantages=advantages, loss_mask=case.mask, **more)
    return AGGREGATIONS.get("seq-mean-token-sum").local_sum(policy_loss(x, cfg).loss, case.mask)


def dppo(name: str, divergence: Callable[[Tensor, Tensor], Tensor]) -> tuple[Method, Method]:
    cfg = PolicyLossConfig(name=name, clip_low=0.05, clip_high=0.1)
    return (
        lambda c, lp, a: of_tokens(c, lp, a, c.roll, cfg),
        lambda c, lp, a: oracle.dppo(lp, c.roll, a, c.mask, divergence(lp, c.roll), 0.05, 0.1),
    )


def drpo(delta: float) -> tuple[Method, Method]:
    cfg = PolicyLossConfig(name="drpo", drpo_delta=delta)
    return (
        lambda c, lp, a: of_tokens(c, lp, a, c.roll, cfg),
        lambda c, lp, a: oracle.drpo(lp, c.roll, a, c.mask, delta),
    )


def ctpo(name: str, mode: str) -> tuple[Method, Method]:
    cfg = PolicyLossConfig(name=name, clip_low=0.025, clip_high=0.05)
    return (
        lambda c, lp, a: of_tokens(c, lp, a, c.old, cfg),
        lambda c, lp, a: oracle.ctpo(lp, c.old, a, c.mask, mode),
    )


def our_m2po(c: Case, lp: Tensor, a: Tensor) -> Tensor:
    inputs = CorrectionInputs(
        old_logprobs=c.old,
        rollout_logprobs=c.roll,
        advantages=a,
        loss_mask=c.mask,
        demonstration_mask=torch.zeros_like(c.mask),
    )
    weights = compute_correction(inputs, CorrectionConfig(name="m2po")).weights
    return of_tokens(c, lp, a, c.old, PolicyLossConfig(dual_clip=None), correction=weights)


def our_bapo(c: Case, lp: Tensor, a: Tensor) -> Tensor:
    """With the bounds at the current log-probs, as the oracle has them."""
    cfg = PolicyLossConfig(name="bapo")
    ratio = oracle.clamped_exp((lp - c.roll).detach())
    low, high = balanced_bounds(ratio[c.mask], a[c.mask], cfg)
    bounds = torch.where(a < 0, low, torch.full_like(a, high))
    return of_tokens(c, lp, a, c.roll, cfg, clip_bounds=bounds)


def our_flowrl(c: Case, lp: Tensor, a: Tensor) -> Tensor:
    further = {"ref_logprobs": c.ref, "log_z": c.log_z[:, None].expand_as(lp)}
    x = PolicyLossInputs(logprobs=lp, old_logprobs=c.old, advantages=a, loss_mask=c.mask, **further)
    loss = policy_loss(x, PolicyLossConfig(name="flowrl", clip_low=0.3, clip_high=0.3)).loss
    return AGGREGATIONS.get("seq-mean-token-mean").local_sum(loss, c.mask)


VESPO = PolicyLossConfig(name="vespo")
GSPO = PolicyLossConfig(name="gspo", clip_low=3e-4, clip_high=4e-4)
METHODS: dict[str, tuple[Method, Method]] = {
    "dppo_tv": dppo("dppo_tv", oracle.binary_tv),
    "dppo_kl": dppo("dppo_kl", oracle.binary_kl),
    "drpo": drpo(12.5),
    "drpo that ends gradients": drpo(0.3),
    "ctpo": ctpo("ctpo", "cumprod"),
    "ctpo_geomean": ctpo("ctpo_geomean", "geomean"),
    "m2po": (our_m2po, lambda c, lp, a: oracle.m2po(lp, c.old, c.roll, a, c.mask)),
    "bapo": (our_bapo, lambda c, lp, a: oracle.bapo(lp, c.roll, a, c.mask)),
    "vespo": (
        lambda c, lp, a: of_tokens(c, lp, a, c.old, VESPO),
        lambda c, lp, a: oracle.vespo(lp, c.old, a, c.mask),
    ),
    "vespo with a correction": (
        lambda c, lp, a: of_tokens(c, lp, a, c.old, VESPO, correction=c.log_tis.exp()),
        lambda c, lp, a: oracle.vespo(lp, c.old, a, c.mask, c.log_tis),
    ),
}
# These have one advantage for each row.
OF_ROWS: dict[str, tuple[Method, Method]] = {
    "luspo": (
        lambda c, lp, a: of_tokens(c, lp, a, c.old, GSPO),
        lambda c, lp, a: oracle.luspo(lp, c.old, c.advantage, c.mask),
    ),
    "flowrl": (
        our_flowrl,
        lambda c, lp, a: oracle.flowrl(c.log_z, lp, c.old, c.ref, c.advantage, c.mask, eps=0.3),
    ),
    "topr": (
        lambda c, lp, a: of_tokens(c, lp, a, c.roll, PolicyLossConfig(name="topr")),
        lambda c, lp, a: oracle.topr(lp, c.roll, c.advantage, c.mask),
    ),
}
numbers_of_cases = pytest.mark.parametrize(
    ("seed", "count"), [(0, 2 * len(KINDS)), pytest.param(1, 2000, marks=pytest.mark.long)]
)


def advantages_of(case: Case, name: str) -> Iterator[Tensor]:
    yield case.advantage[:, None].expand(case.mask.shape)
    if name not in OF_ROWS:
        yield case.token_advantage


@numbers_of_cases
@pytest.mark.parametrize("name", [*METHODS, *OF_ROWS])
def test_values_and_gradients(name: str, seed: int, count: int) -> None:
    ours, theirs = (METHODS | OF_ROWS)[name]
    num_gradients = 0
    for number, case in enumerate(cases(seed, count)):
        for advantages in advantages_of(case, name):
            found = []
            for method in (ours, theirs):
                logprobs = case.at_tokens(case.logits).requires_grad_()
                loss = method(case, logprobs, advantages)
                (gradient,) = torch.autograd.grad(loss, logprobs, allow_unused=True)
                found.append((loss.detach(), torch.zeros_like(logprobs) if gradient is None else gradient))
            (value, gradient), (expected_value, expected_gradient) = found
            what = f"{name}, case {number} ({case.kind})"
            # Sums of both signs may cancel.
            scale = float(expected_gradient.abs().sum()) + float(expected_value.abs())
            torch.testing.assert_close(
                value, expected_value, rtol=RELATIVE, atol=RELATIVE * scale, msg=lambda m, w=what: f"{w}: {m}"
            )
            torch.testing.assert_close(
                gradient, expected_gradient, rtol=RELATIVE, atol=1e-30, msg=lambda m, w=what: f"{w}: {m}"
            )
            num_gradients += bool(gradient.any())
    assert num_gradients > count / 4


@numbers_of_cases
def test_what_environments_said(seed: int, count: int) -> None:
    """ECHO beside REINFORCE, each with a denominator of its own; the head answers for both masks."""
    cfg = AlgoConfig(policy_loss=PolicyLossConfig(name="reinforce"), echo_coef=0.1)
    algorithm = build_algorithm(cfg, max_response_tokens=8)
    num_said = 0
    for case in cases(seed, count):
        found = []
        for dense in (False, True):
            logprobs = case.at_tokens(case.logits).requires_grad_()
            if dense:
                loss = oracle.echo(-case.token_advantage * logprobs, logprobs, case.mask, case.observation_mask, 0.1)
            else:
                loss = echo_loss(algorithm, case, logprobs)
            found.append((loss.detach(), *torch.autograd.grad(loss, logprobs)))
        for got, expected in zip(*found, strict=True):
            scale = float(found[1][1].abs().sum()) + 1e-30
            torch.testing.assert_close(got, expected, rtol=RELATIVE, atol=RELATIVE * scale)
        num_said += bool(case.observation_mask.any())
    assert num_said > count / 4


def echo_loss(algorithm: Algorithm, case: Case, logprobs: Tensor) -> Tensor:
    masks = zip(case.mask.numpy(), case.observation_mask.numpy(), strict=True)
    rows = [
        Row(
            uid="q",
            sample_index=i,
            token_ids=np.zeros(len(mask) + 2, np.int32),
            num_prompt_tokens=2,
            loss_mask=mask,
            quantities={"observed": said.astype(np.float32)},
        )
        for i, (mask, said) in enumerate(masks)
    ]
    quantities = {"advantages": case.token_advantage, "observed": case.observation_mask.double()}
    batch = RowBatch(labels=tuple(row.label for row in rows), loss_mask=case.mask, quantities=quantities)
    out = PolicyOutputs(logprobs=logprobs, entropy=None)
    return algorithm.loss(batch, out, algorithm.initial_state()).total(algorithm.denominators(rows))


@numbers_of_cases
def test_statistics(seed: int, count: int) -> None:
    for case in cases(seed, count):
        lp, old, roll = case.at_tokens(case.logits), case.old, case.roll
        torch.testing.assert_close(binary_tv(lp, roll), oracle.binary_tv(lp, roll), rtol=RELATIVE, atol=0)
        torch.testing.assert_close(binary_kl(lp, roll), oracle.binary_kl(lp, roll), rtol=RELATIVE, atol=1e-15)
        entropy = oracle.token_entropy(case.old_logits)
        for share in (0.2, 0.5):
            assert high_entropy(entropy, case.mask, share).equal(oracle.high_entropy_keep(entropy, case.mask, share))
        sigma, energy = oracle.otb_sigma(case.old_logits), oracle.otb_energy(case.old_logits, case.tokens)
        torch.testing.assert_close(1 - 2 * case.old.exp() + sigma, energy, rtol=RELATIVE, atol=1e-15)
        for by_count in (False, True):
            weights = torch.where(case.mask, energy * case.rho_bar**2, 0.0).cumsum(-1)
            found = token_baseline(
                case.returns, weights, case.mask, list(map(str, case.groups.tolist())), count_loss_tokens=by_count
            )
            expected = oracle.otb_baseline(
                case.returns, energy, case.mask, case.groups, case.rho_bar, multi_turn=by_count
            )
            torch.testing.assert_close(found, expected, rtol=RELATIVE, atol=1e-12)
        # Rows without loss tokens do not count here; there they have the weight 1.
        rows = case.mask.any(-1)
        if rows.any():
            sums = torch.where(case.mask, old - roll, 0.0).sum(-1)[rows]
            expected = oracle.ess(old[rows], roll[rows], case.mask[rows])
            assert effective_sample_size(sums) == pytest.approx(float(expected), rel=RELATIVE)

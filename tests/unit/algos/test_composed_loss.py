"""The loss of the composed algorithm: values, gradients and invariances."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megarl.algos import build_algorithm
from megarl.algos.aggregation import AGGREGATIONS
from megarl.config.algo import AlgoConfig, KLConfig
from megarl.types import (
    Algorithm,
    AlgoState,
    EntropyState,
    PolicyOutputs,
    Row,
    RowBatch,
)
from tests.helpers.objectives import Problem, append_padding, run

MakeBatch = Callable[..., RowBatch]
MakeRows = Callable[[Tensor], list[Row]]

HORIZON = 8
# Three loss tokens in row 0, one in row 1, none in row 2.
MASK = torch.tensor([[True, True, True], [False, True, False], [False, False, False]])
# What the loss of each token is multiplied by, by aggregation.
TOKEN_WEIGHTS = {
    "token-mean": [1 / 4, 1 / 4],
    "seq-mean-token-sum": [1 / 2, 1 / 2],
    "seq-mean-token-mean": [1 / 6, 1 / 2],
    "seq-mean-token-sum-norm": [1 / 8, 1 / 8],
    "dr_grpo": [1 / 16, 1 / 16],
}


def f64(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def algorithm(**cfg: Any) -> Algorithm:
    return build_algorithm(AlgoConfig(**cfg), max_response_tokens=HORIZON)


def random_problem(mask: Tensor, seed: int) -> Problem:
    generator = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> Tensor:
        return torch.randn(mask.shape, dtype=torch.float64, generator=generator) * scale * mask

    logprobs = -noise(1.0).abs()
    return Problem(
        mask=mask,
        logprobs=logprobs,
        entropy=noise(1.0).abs(),
        quantities={
            "old_logprobs": logprobs + noise(0.3),
            "ref_logprobs": logprobs + noise(0.3),
            "advantages": noise(1.0),
        },
    )


@pytest.mark.parametrize("name", list(AGGREGATIONS))
def test_denominators(name: str, make_rows: MakeRows) -> None:
    counts = algorithm(aggregation=name).denominators(make_rows(MASK))
    # Row 0 has 3 tokens, row 1 has 1; only seq-mean-token-mean divides a row before summing.
    by_row = 1 if name != "seq-mean-token-mean" else 3
    assert 1 / counts["loss"] / by_row == pytest.approx(TOKEN_WEIGHTS[name][0])
    assert counts["tokens"] == counts["policy_tokens"] == 4
    # None of these are demonstrated: what nothing is divided by is 1.
    assert counts["demonstration_tokens"] == counts["imitated_tokens"] == 1


@pytest.mark.parametrize("name", list(AGGREGATIONS))
def test_at_ratio_1_the_loss_is_minus_the_mean_advantage(name: str) -> None:
    advantages = torch.where(MASK, f64([[2.0], [-1.5], [9.0]]), 0.0)
    problem = Problem(
        mask=MASK,
        logprobs=torch.where(MASK, f64(-0.7), 0.0),
        entropy=torch.zeros(3, 3, dtype=torch.float64),
        quantities={"advantages": advantages},
    )
    got = run(algorithm(aggregation=name), problem)
    weights = torch.where(MASK, f64([*TOKEN_WEIGHTS[name], 0.0])[:, None], 0.0)
    assert got.loss == pytest.approx(-(weights * advantages).sum().item())
    torch.testing.assert_close(got.logprobs_grad, -weights * advantages)
    assert got.metrics["actor/pg_loss"] == pytest.approx(got.loss)
    diagnostics = ("actor/ppo_kl", "actor/pg_clipfrac", "actor/pg_clipfrac_lower")
    assert [got.metrics[name] for name in diagnostics] == [0.0, 0.0, 0.0]


def test_old_logprobs_are_used_when_they_are_there() -> None:
    # One row, ratios 2 and 1/2, A = 1: losses −1.2 (clipped) and −0.5.
    mask = torch.ones(1, 2, dtype=torch.bool)
    problem = Problem(
        mask=mask,
        logprobs=f64([[math.log(2) - 1, -math.log(2) - 1]]),
        entropy=torch.zeros(1, 2, dtype=torch.float64),
        quantities={"advantages": f64([[1.0, 1.0]]), "old_logprobs": f64([[-1.0, -1.0]])},
    )
    got = run(algorithm(), problem)
    assert got.loss == pytest.approx(-0.85)
    assert got.metrics["actor/pg_clipfrac"] == 0.5
    assert got.metrics["actor/ppo_kl"] == pytest.approx(0.0)


def test_kl_and_entropy_in_the_loss() -> None:
    """Two tokens with Δ = 0.5 and −1: k2 is 0.125 and 0.5, mean 0.3125; entropies 1 and 3, mean 2."""
    mask = torch.ones(1, 2, dtype=torch.bool)
    problem = Problem(
        mask=mask,
        logprobs=f64([[-1.0, -2.0]]),
        entropy=f64([[1.0, 3.0]]),
        quantities={"advantages": f64([[1.0, 1.0]]), "ref_logprobs": f64([[-1.5, -1.0]])},
    )
    algo = algorithm(kl=KLConfig(where="loss", estimator="k2", coef=99.0), entropy_coef=77.0)
    # The coefficients are the state's, not the configured start.
    got = run(algo, problem, state=AlgoState(kl_coef=0.2, entropy=EntropyState(coef=0.01)))
    assert got.loss == pytest.approx(-1 + 0.2 * 0.3125 - 0.01 * 2)
    assert got.metrics["actor/pg_loss"] == pytest.approx(-1.0)
    assert got.metrics["actor/kl_loss"] == pytest.approx(0.3125)
    assert got.metrics["actor/ref_kl"] == pytest.approx(0.3125)
    assert got.metrics["actor/entropy_loss"] == pytest.approx(2.0)
    assert got.metrics["actor/entropy"] == pytest.approx(2.0)
    torch.testing.assert_close(got.logprobs_grad, f64([[(-1 + 0.2 * 0.5) / 2, (-1 + 0.2 * -1) / 2]]))
    torch.testing.assert_close(got.entropy_grad, f64([[-0.005, -0.005]]))


def test_the_loss_has_its_own_kl_beside_that_of_the_reward() -> None:
    """As above: k2 has the mean 0.3125. The state's coefficient is that of the reward."""
    problem = Problem(
        mask=torch.ones(1, 2, dtype=torch.bool),
        logprobs=f64([[-1.0, -2.0]]),
        entropy=f64([[1.0, 3.0]]),
        quantities={"advantages": f64([[1.0, 1.0]]), "ref_logprobs": f64([[-1.5, -1.0]])},
    )
    algo = algorithm(kl=KLConfig(where="both", estimator="k1", loss_estimator="k2", loss_coef=0.25))
    got = run(algo, problem, state=AlgoState(kl_coef=99.0))
    assert got.loss == pytest.approx(-1 + 0.25 * 0.3125)
    assert got.metrics["actor/ref_kl"] == pytest.approx(0.3125)


def test_without_coefficients_only_the_policy_loss_is_reported() -> None:
    got = run(algorithm(), random_problem(MASK, 0))
    assert set(got.metrics) == {
        "actor/pg_loss",
        "actor/pg_clipfrac",
        "actor/pg_clipfrac_lower",
        "actor/ppo_kl",
        "actor/entropy",
    }
    assert not got.entropy_grad.any()


def test_kl_coefficient_0_equals_no_kl() -> None:
    problem = random_problem(MASK, 1)
    without = run(algorithm(), problem)
    zero = run(algorithm(kl=KLConfig(where="loss", coef=0.0)), problem)
    assert zero.loss == without.loss
    assert torch.equal(zero.logprobs_grad, without.logprobs_grad)
    assert zero.metrics["actor/kl_loss"] > 0


COMPOSITIONS = [
    {"aggregation": name, "entropy_coef": 0.02, "kl": KLConfig(where="loss", estimator=kl, coef=0.3)}
    for name, kl in zip(AGGREGATIONS, ["k2", "k3", "k3_straight_through", "mse", "low_var_kl"], strict=True)
]


@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=7),
    cut=st.integers(0, 7),
    seed=st.integers(0, 2**31),
    cfg=st.sampled_from(COMPOSITIONS),
    data=st.data(),
)
def test_split_order_and_padding_do_not_matter(
    lengths: list[int],
    cut: int,
    seed: int,
    cfg: dict[str, Any],
    data: st.DataObject,
) -> None:
    mask = torch.arange(5)[None, :] < torch.tensor(lengths)[:, None]
    problem, algo = random_problem(mask, seed), algorithm(**cfg)
    whole = run(algo, problem)

    split = run(algo, problem, micro_batches=[range(len(lengths))[:cut], range(len(lengths))[cut:]])
    order = data.draw(st.permutations(range(len(lengths))))
    shuffled = run(algo, problem.transformed(lambda x: x[order]))
    padded = run(algo, problem.transformed(append_padding))

    for other in (split, shuffled, padded):
        assert other.loss == pytest.approx(whole.loss, abs=1e-12)
        assert other.metrics == pytest.approx(whole.metrics, abs=1e-12)
    for name in ("logprobs_grad", "entropy_grad"):
        grad = getattr(whole, name)
        torch.testing.assert_close(getattr(split, name), grad, rtol=0, atol=1e-12)
        torch.testing.assert_close(getattr(shuffled, name), grad[order], rtol=0, atol=1e-12)
        torch.testing.assert_close(getattr(padded, name), append_padding(grad), rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(0, 0), (1, 3), (4, 2)])
def test_no_loss_tokens_gives_zero_loss_and_gradient(shape: tuple[int, int]) -> None:
    problem = random_problem(torch.zeros(shape, dtype=torch.bool), 0)
    for cfg in COMPOSITIONS:
        got = run(algorithm(**cfg), problem)
        assert got.loss == 0.0
        assert not got.logprobs_grad.any()


def test_inputs_are_not_mutated(make_batch: MakeBatch) -> None:
    problem = random_problem(MASK, 2)
    before = problem.transformed(Tensor.clone)
    for cfg in COMPOSITIONS:
        out = PolicyOutputs(logprobs=problem.logprobs, entropy=problem.entropy)
        algorithm(**cfg).loss(make_batch(problem.mask, **problem.quantities), out, AlgoState(kl_coef=0.1))
    for name in ("mask", "logprobs", "entropy"):
        assert torch.equal(getattr(problem, name), getattr(before, name))
    assert all(torch.equal(problem.quantities[name], before.quantities[name]) for name in problem.quantities)


def test_nan_logprob_is_not_hidden() -> None:
    problem = random_problem(MASK, 3)
    problem.logprobs[0, 1] = math.nan
    for cfg in COMPOSITIONS:
        assert math.isnan(run(algorithm(**cfg), problem).loss)


def test_missing_inputs_are_named(make_batch: MakeBatch) -> None:
    zeros = torch.zeros(3, 3)
    out = PolicyOutputs(logprobs=zeros, entropy=None)
    with pytest.raises(KeyError, match="advantages was not computed"):
        algorithm().loss(make_batch(MASK), out, AlgoState())
    with pytest.raises(KeyError, match="ref_logprobs was not computed"):
        algorithm(kl=KLConfig(where="loss")).loss(make_batch(MASK, advantages=zeros), out, AlgoState())
    with pytest.raises(ValueError, match=r"entropy: got none.*0\.1"):
        algorithm(entropy_coef=0.1).loss(make_batch(MASK, advantages=zeros), out, AlgoState())
    cut = PolicyOutputs(logprobs=zeros[:, :2], entropy=None)
    with pytest.raises(ValueError, match=r"logprobs: got shape \(3, 2\), expected \(3, 3\)"):
        algorithm().loss(make_batch(MASK, advantages=zeros), cut, AlgoState())


def test_kl_in_the_reward_leaves_the_loss_alone() -> None:
    problem = random_problem(MASK, 4)
    without = run(algorithm(), problem)
    got = run(algorithm(kl=KLConfig(where="reward", coef=0.5)), problem)
    assert (got.loss, got.metrics) == (without.loss, without.metrics)

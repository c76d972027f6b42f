"""GAE, the critic as its own reward, and the critic's metrics. Golden cases of the whole flow: test_rewards.py."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megarl.algos.advantages import compute_advantages
from megarl.algos.advantages.critic import value_metrics
from megarl.algos.token_rewards import TURN_REWARDS
from megarl.config.algo import AdvantageConfig
from megarl.types import ScoredBatch

MakeScored = Callable[..., ScoredBatch]


def f64(values: list[list[float]]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def gae_by_hand(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """A_t = Σ_k (γλ)^k δ_{t+k}, straight from the definition."""
    padded = [*values, 0.0]
    delta = [r + gamma * padded[t + 1] - padded[t] for t, r in enumerate(rewards)]
    return [sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, len(delta))) for t in range(len(delta))]


@given(
    mask=st.lists(st.booleans(), min_size=1, max_size=7),
    gamma=st.sampled_from([1.0, 0.9]),
    lam=st.sampled_from([0.0, 0.5, 1.0]),
    lam_critic=st.sampled_from([None, 0.8]),
    data=st.data(),
)
def test_gae_skips_tokens_outside_the_mask(
    make_scored: MakeScored, mask: list[bool], gamma: float, lam: float, lam_critic: float | None, data: st.DataObject
) -> None:
    numbers = st.lists(st.integers(-8, 8), min_size=len(mask), max_size=len(mask))
    values, penalty, earned = ([n / 4 for n in data.draw(numbers)] for _ in range(3))
    quantities = {"values": f64([values]), "kl_penalty": f64([penalty]), TURN_REWARDS: f64([earned])}
    batch = make_scored(["a"], [1.5], torch.tensor([mask]), **quantities)
    cfg = AdvantageConfig(estimator="gae", gamma=gamma, lam=lam, lam_critic=lam_critic, whiten=False)
    got = compute_advantages(batch, cfg)
    assert got.returns is not None

    kept = [t for t, is_loss in enumerate(mask) if is_loss]
    # An environment gave rewards for turns; the last token has what is left of the row's reward.
    rewards = [earned[t] - penalty[t] for t in kept]
    if kept:
        rewards[-1] += 1.5 - sum(earned[t] for t in kept)
    kept_values = [values[t] for t in kept]
    expected = gae_by_hand(rewards, kept_values, gamma, lam)
    targets = gae_by_hand(rewards, kept_values, gamma, lam if lam_critic is None else lam_critic)
    assert got.advantages[0, kept].tolist() == pytest.approx(expected)
    assert got.returns[0, kept].tolist() == pytest.approx([a + v for a, v in zip(targets, kept_values, strict=True)])
    outside = ~batch.loss_mask
    assert not got.advantages[outside].any()
    assert not got.returns[outside].any()


def test_gae_of_no_discount_is_reward_minus_value(make_scored: MakeScored) -> None:
    batch = make_scored(["a"], [1.0], values=f64([[0.25, 0.5]]))
    got = compute_advantages(batch, AdvantageConfig(estimator="gae", whiten=False))
    assert got.advantages.tolist() == [[0.75, 0.5]]
    assert got.returns is not None
    assert got.returns.tolist() == [[1.0, 1.0]]


def test_the_critic_as_reward_is_gae_with_its_last_value_for_reward(make_scored: MakeScored) -> None:
    values, mask = f64([[0.2, 0.4, 0.9], [0.5, 0.3, 7.0]]), torch.tensor([[True, True, True], [True, True, False]])
    by_value = compute_advantages(
        make_scored(["a", "a"], [5.0, 6.0], mask, values=values), AdvantageConfig(estimator="critic_value")
    )
    by_gae = compute_advantages(
        make_scored(["a", "a"], [0.9, 0.3], mask, values=values), AdvantageConfig(estimator="gae")
    )
    assert by_value.returns is not None
    torch.testing.assert_close(by_value.advantages, by_gae.advantages)
    torch.testing.assert_close(by_value.returns, by_gae.returns)
    assert by_value.metrics == pytest.approx(dict(by_gae.metrics))


def test_whitening_has_mean_zero_and_unbiased_variance_one(make_scored: MakeScored) -> None:
    mask = torch.tensor([[True, True, False], [True, False, False]])
    batch = make_scored(["a", "b"], [1.0, 0.0], mask, values=f64([[0.5, 1.0, 9.0], [2.0, 9.0, 9.0]]))
    got = compute_advantages(batch, AdvantageConfig(estimator="gae")).advantages
    assert got[mask].mean().item() == pytest.approx(0.0, abs=1e-12)
    assert got[mask].var().item() == pytest.approx(1.0, abs=1e-7)
    assert not got[~mask].any()


def test_whitening_a_single_token_gives_zero(make_scored: MakeScored) -> None:
    batch = make_scored(["a"], [1.0], torch.tensor([[True, False]]), values=f64([[0.25, 0.0]]))
    assert compute_advantages(batch, AdvantageConfig(estimator="gae")).advantages.tolist() == [[0.0, 0.0]]


def test_values_are_required(make_scored: MakeScored) -> None:
    with pytest.raises(KeyError, match="values was not computed"):
        compute_advantages(make_scored(["a"], [1.0]), AdvantageConfig(estimator="gae"))


def test_value_metrics() -> None:
    # R − V = 0, 1, −1 (variance 1), R = 1, 2, 3 (variance 1).
    values, returns = f64([[1.0, 1.0, 4.0, 99.0]]), f64([[1.0, 2.0, 3.0, 99.0]])
    got = value_metrics(values, returns, torch.tensor([[True, True, True, False]]))
    assert got == pytest.approx(
        {
            "critic/values/mean": 2.0,
            "critic/values/max": 4.0,
            "critic/values/min": 1.0,
            "critic/returns/mean": 2.0,
            "critic/returns/max": 3.0,
            "critic/returns/min": 1.0,
            "critic/vf_explained_var": 1 - 1 / (1 + 1e-5),
        }
    )


def test_perfect_and_absent_values() -> None:
    returns = f64([[1.0, 2.0]])
    assert value_metrics(returns, returns, returns > 0)["critic/vf_explained_var"] == 1.0
    assert value_metrics(returns, returns, returns < 0) == {}

"""Advantages and reward shaping against OpenRLHF's experience maker, run without its models."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.algos.advantages import compute_advantages
from megarl.algos.kl import KL_ESTIMATORS
from megarl.algos.rewards import shape_rewards
from megarl.algos.token_rewards import returns_to_go
from megarl.config.algo import AdvantageConfig, RewardConfig
from tests.conformance.batches import SEEDS, Batch, group_order, our_advantages, random_batch
from tests.conformance.compare import FLOAT32, FLOAT64, assert_close
from tests.conformance.peer_openrlhf import experience_maker

# OpenRLHF knows one size of groups.
GROUP_SIZE = 4
GROUPS = (GROUP_SIZE,) * 3
KL_COEF = 0.05


def openrlhf_experience(batch: Batch, estimator: str, *, kl: Tensor | None = None, **advantage: Any) -> Any:
    """What OpenRLHF makes of the batch; its `advantages` and `returns` are [B, T]."""
    args = SimpleNamespace(
        algo=SimpleNamespace(
            advantage=SimpleNamespace(
                **{"estimator": estimator, "gamma": 1.0, "lambd": 1.0, "no_std_norm": False} | advantage
            )
        ),
        rollout=SimpleNamespace(n_samples_per_prompt=GROUP_SIZE),
        reward=SimpleNamespace(clip_range=None),
    )
    maker = object.__new__(experience_maker.RemoteExperienceMaker)
    maker.strategy = SimpleNamespace(args=args)
    maker.advantage_estimator = estimator
    maker.kl_ctl = SimpleNamespace(value=KL_COEF)
    experience = experience_maker.Experience(
        index=group_order(batch.uids).argsort().tolist(),  # Each row's place with groups side by side.
        rewards=batch.rewards.clone(),
        values=batch.values.clone(),
        kl=torch.zeros_like(batch.values) if kl is None else kl,
        action_mask=batch.mask,
        info={},
    )
    (made,) = maker.compute_advantages_and_returns([experience])
    return made


def our_kl(batch: Batch) -> Tensor:
    return KL_ESTIMATORS.get("k1").compute(batch.old_logprobs, batch.ref_logprobs)


@pytest.mark.parametrize("estimator", ["rloo", "dr_grpo", "group_norm"])
@pytest.mark.parametrize("seed", SEEDS)
def test_group_advantages(seed: int, estimator: str) -> None:
    batch = random_batch(seed, group_sizes=GROUPS, holes=True)
    ours = our_advantages(batch, AdvantageConfig(estimator=estimator))
    assert_close(ours[batch.mask], openrlhf_experience(batch, estimator).advantages[batch.mask], FLOAT64)


@pytest.mark.parametrize("estimator", ["rloo", "dr_grpo", "group_norm"])
@pytest.mark.parametrize("seed", SEEDS)
def test_group_advantages_differ_in_where_the_kl_penalty_enters(seed: int, estimator: str) -> None:
    """Known difference: before the baseline here, as part of the row's reward; in OpenRLHF after it, token by token."""
    batch = random_batch(seed, group_sizes=GROUPS)
    theirs = openrlhf_experience(batch, estimator, kl=our_kl(batch)).advantages
    penalty = torch.where(batch.mask, KL_COEF * our_kl(batch), 0.0)
    with_penalised_rewards = replace(batch, rewards=batch.rewards - penalty.sum(dim=-1))
    cfg = AdvantageConfig(estimator=estimator)
    assert_close(our_advantages(batch, cfg, kl_penalty=penalty), our_advantages(with_penalised_rewards, cfg), FLOAT64)
    after = our_advantages(batch, cfg) - returns_to_go(penalty)
    assert_close(after[batch.mask], theirs[batch.mask], FLOAT64)


@pytest.mark.parametrize("norm_by_std", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
def test_reinforce_baseline(seed: int, norm_by_std: bool) -> None:
    batch = random_batch(seed, group_sizes=GROUPS)
    cfg = AdvantageConfig(estimator="reinforce_baseline", norm_by_std=norm_by_std)
    ours = our_advantages(batch, cfg, kl_penalty=KL_COEF * our_kl(batch))
    theirs = openrlhf_experience(batch, "reinforce_baseline", kl=our_kl(batch), no_std_norm=not norm_by_std)
    assert_close(ours[batch.mask], theirs.advantages[batch.mask], FLOAT32)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("seed", SEEDS)
def test_reinforce_plus_plus(seed: int, gamma: float) -> None:
    batch = random_batch(seed, group_sizes=GROUPS)
    cfg = AdvantageConfig(estimator="reinforce_plus_plus", gamma=gamma)
    ours = our_advantages(batch, cfg, kl_penalty=KL_COEF * our_kl(batch))
    theirs = openrlhf_experience(batch, "reinforce", kl=our_kl(batch), gamma=gamma)
    assert_close(ours[batch.mask], theirs.advantages[batch.mask], FLOAT32)


def packed(batch: Batch) -> Batch:
    """The same loss tokens without the gaps between them."""
    order = (~batch.mask).to(torch.int8).argsort(dim=-1, stable=True)
    return replace(batch, mask=batch.mask.gather(-1, order), values=batch.values.gather(-1, order))


@pytest.mark.parametrize("holes", [False, True], ids=["whole", "holes"])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.97, 0.9)])
@pytest.mark.parametrize("seed", SEEDS)
def test_gae_differs_in_variance_and_gaps(seed: int, gamma: float, lam: float, holes: bool) -> None:
    """Known differences: (σ²·n/(n − 1) + 1e-8) of a batch here, max(σ², 1e-8) there; gaps count there as value 0."""
    batch = random_batch(seed, group_sizes=GROUPS, holes=holes)
    cfg = AdvantageConfig(estimator="gae", gamma=gamma, lam=lam)
    ours = compute_advantages(batch.scored(), cfg)
    raw = compute_advantages(batch.scored(), replace(cfg, whiten=False)).advantages
    whole = packed(batch)
    theirs = openrlhf_experience(whole, "gae", gamma=gamma, lambd=lam)
    variance, n = raw[batch.mask].var(correction=0), batch.num_tokens
    assert ours.returns is not None
    assert_close(ours.returns[batch.mask], theirs.returns[whole.mask], FLOAT64)
    assert_close(
        ours.advantages[batch.mask] * (variance * n / (n - 1) + 1e-8).sqrt(),
        theirs.advantages[whole.mask] * variance.clamp(min=1e-8).sqrt(),
        FLOAT32,
    )


@pytest.mark.parametrize("truncated", [None, 0.5, -0.5])
@pytest.mark.parametrize("seed", SEEDS)
def test_penalties_for_length(seed: int, truncated: float | None) -> None:
    """Rewards of rows near the limit, then of those cut at it."""
    batch = random_batch(seed, group_sizes=GROUPS)
    lengths = batch.mask.sum(dim=-1)
    cut = lengths >= 7
    cfg = RewardConfig(overlong_buffer_tokens=4, overlong_factor=0.7, truncated=truncated)
    ours = shape_rewards(replace(batch.scored(), truncated=cut), cfg, max_response_tokens=9).rewards
    experience = SimpleNamespace(
        rewards=batch.rewards.clone(), response_length=lengths, truncated=cut, info={"reward": batch.rewards}
    )
    reward = SimpleNamespace(overlong_buffer_len=4, overlong_penalty_factor=0.7, stop_properly_penalty_coef=truncated)
    args = SimpleNamespace(reward=reward, rollout=SimpleNamespace(max_new_tokens=9))
    experience_maker.apply_length_penalties([experience], args)
    assert (experience.rewards != batch.rewards).any()
    assert_close(ours, experience.rewards, FLOAT64)

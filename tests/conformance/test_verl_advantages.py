"""Advantages, KL and its controllers against verl."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor
from verl.trainer.ppo import core_algos

from megarl.algos.advantages import compute_advantages
from megarl.algos.kl import KL_CONTROLLERS, KL_ESTIMATORS, KLObservation, apply_kl_penalty
from megarl.config.algo import AdvantageConfig, KLConfig
from megarl.types import AlgoState
from tests.conformance.batches import SEEDS, Batch, our_advantages, random_batch, with_empty_rows
from tests.conformance.compare import COUNT_EPS, FLOAT32, FLOAT64, assert_close, value_and_gradient

SINGLETONS = (4, 1, 3, 1, 2)
LAYOUTS: dict[str, Callable[[int], Batch]] = {
    "groups": lambda seed: random_batch(seed, holes=True),
    "singletons": lambda seed: random_batch(seed, group_sizes=SINGLETONS),
    "empty rows": lambda seed: with_empty_rows(random_batch(seed)),
}

Estimator = Callable[..., tuple[Tensor, Tensor]]


def verl_advantages(estimator: Estimator, batch: Batch, **options: Any) -> Tensor:
    """verl reads a row's reward from its tokens, and has it in the last column if the row has none."""
    rewards = batch.token_rewards
    rewards[:, -1] += torch.where(batch.mask.any(dim=-1), 0.0, batch.rewards)
    return estimator(rewards, response_mask=batch.mask.double(), index=np.array(batch.uids), **options)[0]


@dataclass(frozen=True, kw_only=True)
class Case:
    cfg: AdvantageConfig
    verl: Estimator
    options: dict[str, Any] = field(default_factory=dict)
    tolerance: float = FLOAT64


WITHOUT_STD = {"norm_adv_by_std_in_grpo": False}
GROUP_CASES = {
    "grpo": Case(cfg=AdvantageConfig(estimator="grpo"), verl=core_algos.compute_grpo_outcome_advantage),
    "grpo without std": Case(
        cfg=AdvantageConfig(estimator="grpo", norm_by_std=False),
        verl=core_algos.compute_grpo_outcome_advantage,
        options=WITHOUT_STD,
    ),
    "dr_grpo": Case(
        cfg=AdvantageConfig(estimator="dr_grpo"),
        verl=core_algos.compute_grpo_outcome_advantage,
        options=WITHOUT_STD,
    ),
    "rloo": Case(cfg=AdvantageConfig(estimator="rloo"), verl=core_algos.compute_rloo_outcome_advantage),
    "opo": Case(cfg=AdvantageConfig(estimator="opo"), verl=core_algos.compute_opo_outcome_advantage),
    "dr_grpo, vectorized": Case(
        cfg=AdvantageConfig(estimator="dr_grpo"),
        verl=core_algos.compute_grpo_vectorized_outcome_advantage,
        options=WITHOUT_STD,
        tolerance=FLOAT32,
    ),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", GROUP_CASES)
def test_group_advantages(name: str, layout: str, seed: int) -> None:
    case, batch = GROUP_CASES[name], LAYOUTS[layout](seed)
    theirs = verl_advantages(case.verl, batch, **case.options)
    # verl has the mean 0 and the deviation 1 + 1e-6 of a group of one in float32.
    tolerance = FLOAT32 if layout == "singletons" else case.tolerance
    assert_close(our_advantages(batch, case.cfg), theirs, tolerance)


@pytest.mark.parametrize("norm_by_std", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
def test_best_of_a_group(seed: int, norm_by_std: bool) -> None:
    batch = LAYOUTS["groups"](seed)
    options = {"norm_adv_by_std_in_grpo": norm_by_std}
    theirs = verl_advantages(core_algos.compute_grpo_passk_outcome_advantage, batch, config=options)
    ours = our_advantages(batch, AdvantageConfig(estimator="passk_best", norm_by_std=norm_by_std))
    assert_close(ours, theirs, FLOAT64)


@pytest.mark.parametrize("seed", SEEDS)
def test_gpg_differs_in_what_it_counts(seed: int) -> None:
    """Known difference: rows of groups of unequal rewards here, as in the paper; rows of rewards other than 0 there."""
    batch = LAYOUTS["groups"](seed)
    of_group = [{float(r) for r, u in zip(batch.rewards, batch.uids, strict=True) if u == uid} for uid in batch.uids]
    num_unequal, num_nonzero = sum(len(rewards) > 1 for rewards in of_group), int(batch.rewards.count_nonzero())
    ours = our_advantages(batch, AdvantageConfig(estimator="gpg"))
    theirs = verl_advantages(core_algos.compute_gpg_outcome_advantage, batch)
    # verl's ratio of two counts is a float32.
    assert_close(ours * num_unequal, theirs * num_nonzero, FLOAT32)


@pytest.mark.parametrize("seed", SEEDS)
def test_remax(seed: int) -> None:
    batch = random_batch(seed)
    greedy = batch.rewards.flip(0)
    penalty = 0.05 * KL_ESTIMATORS.get("k1").compute(batch.old_logprobs, batch.ref_logprobs)
    scored = replace(batch.scored(kl_penalty=penalty), details={"greedy_score": greedy})
    ours = compute_advantages(scored, AdvantageConfig(estimator="remax")).advantages
    theirs, _ = core_algos.compute_remax_outcome_advantage(batch.token_rewards - penalty, greedy, batch.mask.double())
    assert_close(ours[batch.mask], theirs[batch.mask], FLOAT64)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("seed", SEEDS)
def test_reinforce_plus_plus_differs_in_the_variance(seed: int, gamma: float) -> None:
    """Known difference: max(σ², 1e-8) of a batch here, σ²·n/(n − 1) + 1e-8 there."""
    batch = random_batch(seed)
    cfg = AdvantageConfig(estimator="reinforce_plus_plus", gamma=gamma)
    raw = our_advantages(batch, replace(cfg, norm_by_std=False))
    variance, n = raw[batch.mask].var(correction=0), batch.num_tokens
    theirs, _ = core_algos.compute_reinforce_plus_plus_outcome_advantage(
        batch.token_rewards, batch.mask.double(), config=SimpleNamespace(gamma=gamma)
    )
    peers = theirs * (variance * n / (n - 1) + 1e-8).sqrt()
    assert_close((our_advantages(batch, cfg) * variance.sqrt())[batch.mask], peers[batch.mask], COUNT_EPS)


@pytest.mark.parametrize("weights", [None, [1.0, 0.25]])
@pytest.mark.parametrize("seed", SEEDS)
def test_gdpo_differs_in_what_it_normalises_over(seed: int, weights: list[float] | None) -> None:
    """Known difference: the sum of the components has mean 0 and deviation 1 over rows here, over tokens there."""
    batch = random_batch(seed)
    style = batch.values[:, 0]
    scored = replace(batch.scored(), details={"style": style})
    components = dict(zip(("score", "style"), weights or [1.0, 1.0], strict=True))
    ours = compute_advantages(scored, AdvantageConfig(estimator="gdpo", components=components)).advantages
    prompts = torch.ones(len(batch.uids), 1, dtype=torch.long)
    theirs, _ = core_algos.compute_gdpo_outcome_advantage(
        batch.token_rewards,
        batch.mask.double(),
        np.array(batch.uids),
        config={"gdpo_reward_keys": ["score", "style"], "gdpo_reward_weights": weights},
        non_tensor_batch={"score": batch.rewards.numpy(), "style": style.numpy()},
        batch={"prompts": prompts, "attention_mask": torch.cat([prompts, batch.mask], dim=1)},
    )
    of_rows, of_tokens = ours[:, 0], ours[batch.mask]
    # Here 1e-6 is added to the deviation.
    assert_close(torch.stack([of_rows.mean(), of_rows.std()]), torch.tensor([0.0, 1.0]), FLOAT32)
    assert_close((of_tokens - of_tokens.mean()) / of_tokens.std(), theirs[batch.mask], FLOAT32)


@pytest.mark.parametrize("seed", SEEDS)
def test_vectorized_rloo_differs_in_groups_of_one(seed: int) -> None:
    """Known difference: there a group of one has advantage 0; here, and in verl's other RLOO, its own reward."""
    batch = random_batch(seed, group_sizes=SINGLETONS)
    alone = torch.tensor([batch.uids.count(uid) == 1 for uid in batch.uids])[:, None]
    ours = our_advantages(batch, AdvantageConfig(estimator="rloo"))
    theirs = verl_advantages(core_algos.compute_rloo_vectorized_outcome_advantage, batch)
    assert_close(torch.where(alone, 0.0, ours), theirs, FLOAT64)
    assert_close(torch.where(alone, ours, 0.0), (batch.rewards[:, None] * alone * batch.mask), FLOAT64)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", SEEDS)
def test_reinforce_baseline_differs_in_the_variance(seed: int, layout: str) -> None:
    """Known difference: (A − μ)/√max(σ², 1e-8) with the population's σ² here, with (σ²·n/(n − 1) + 1e-8) in verl."""
    batch = LAYOUTS[layout](seed)
    raw = our_advantages(batch, AdvantageConfig(estimator="reinforce_baseline", norm_by_std=False))
    variance, n = raw[batch.mask].var(correction=0), batch.num_tokens
    ours = our_advantages(batch, AdvantageConfig(estimator="reinforce_baseline"))
    theirs = verl_advantages(core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage, batch)
    assert float(variance) > 1e-8
    assert_close(ours * variance.sqrt(), theirs * (variance * n / (n - 1) + 1e-8).sqrt(), COUNT_EPS)


@pytest.mark.parametrize("holes", [False, True], ids=["whole", "holes"])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.97, 0.9)])
@pytest.mark.parametrize("seed", SEEDS)
def test_gae_and_its_whitening(seed: int, gamma: float, lam: float, holes: bool) -> None:
    """Outside the loss mask verl's numbers carry no meaning, ours are 0."""
    batch = random_batch(seed, holes=holes)
    ours = compute_advantages(batch.scored(), AdvantageConfig(estimator="gae", gamma=gamma, lam=lam))
    theirs, returns = core_algos.compute_gae_advantage_return(
        batch.token_rewards, batch.values.clone(), batch.mask.double(), gamma, lam
    )
    assert ours.returns is not None
    assert_close(ours.advantages[batch.mask], theirs[batch.mask], COUNT_EPS)
    assert_close(ours.returns[batch.mask], returns[batch.mask], FLOAT64)


# Our name, verl's name.
KL_NAMES = [
    ("k1", "kl"),
    ("k1", "k1"),
    ("abs", "abs"),
    ("k2", "mse"),
    ("k2", "k2"),
    ("k3", "low_var_kl"),
    ("k3", "k3"),
    ("k3_straight_through", "k3+"),
    ("k3_straight_through", "low_var_kl+"),
]


@pytest.mark.parametrize("scale", [1.0, 8.0], ids=["near", "beyond the clamps"])
@pytest.mark.parametrize(("ours", "theirs"), KL_NAMES)
@pytest.mark.parametrize("seed", SEEDS)
def test_kl_per_token(seed: int, ours: str, theirs: str, scale: float) -> None:
    batch = random_batch(seed)
    ref = batch.logprobs + scale * (batch.ref_logprobs - batch.logprobs)
    weights = batch.advantages  # Any direction of the gradient, so that every token's is compared.

    def answers(estimator: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        values = estimator(batch.logprobs.clone(), ref.clone())
        return values, *value_and_gradient(lambda lp: (weights * estimator(lp, ref.clone())).sum(), batch.logprobs)

    for mine, peers in zip(
        answers(KL_ESTIMATORS.get(ours).compute),
        answers(lambda lp, ref_lp: core_algos.kl_penalty(lp, ref_lp, theirs)),
        strict=True,
    ):
        assert_close(mine, peers, FLOAT64)


@pytest.mark.parametrize("seed", SEEDS)
def test_kl_in_the_reward(seed: int) -> None:
    batch = random_batch(seed, holes=True)
    kl = KL_ESTIMATORS.get("k1").compute(batch.old_logprobs, batch.ref_logprobs)
    ours = apply_kl_penalty(batch.token_rewards, kl, batch.mask, coef=0.05).token_level_rewards
    theirs = core_algos.compute_rewards(batch.token_rewards, batch.old_logprobs, batch.ref_logprobs, 0.05)
    assert_close(ours[batch.mask], theirs[batch.mask], FLOAT64)


@pytest.mark.parametrize("name", ["fixed", "adaptive"])
def test_kl_controllers(name: str) -> None:
    cfg = KLConfig(where="reward", coef=0.02, target_nats=0.1, horizon=500.0)
    theirs = {
        "fixed": core_algos.FixedKLController(cfg.coef),
        "adaptive": core_algos.AdaptiveKLController(cfg.coef, cfg.target_nats, cfg.horizon),
    }[name]
    state, coefs = AlgoState(kl_coef=cfg.coef), []
    for kl_nats, num_rows in [(0.1, 64), (0.3, 64), (0.09, 32), (0.0, 128), (0.105, 7), (-0.2, 64)]:
        state = KL_CONTROLLERS.get(name)(state, KLObservation(kl_nats=kl_nats, num_rows=num_rows), cfg)
        theirs.update(kl_nats, num_rows)
        coefs.append((state.kl_coef, theirs.value))
    assert_close(*torch.tensor(coefs, dtype=torch.float64).T, FLOAT64)
    assert (len({ours for ours, _ in coefs}) > 1) == (name == "adaptive")


@pytest.mark.parametrize("weight_cap", [None, 1.5])
@pytest.mark.parametrize("places", ["response", "loss"])
@pytest.mark.parametrize("seed", SEEDS)
def test_otb(seed: int, places: Literal["response", "loss"], weight_cap: float | None) -> None:
    """Rows with holes have places among loss tokens alone: verl has a second function for these."""
    batch = random_batch(seed, holes=places == "loss")
    old = batch.old_logprobs.clamp(max=-0.01)
    # Σ p² is at least the label's p², and at most that and (1 − p)².
    squares = old.exp().square() + batch.values.sigmoid() * (1 - old.exp()).square()
    cfg = AdvantageConfig(estimator="otb", places=places, weight_cap=weight_cap)
    scored = batch.scored(old_logprobs=old, old_squares=squares, rollout_logprobs=batch.rollout_logprobs)
    ours = compute_advantages(scored, cfg).advantages
    weights = None if weight_cap is None else (old - batch.rollout_logprobs).exp().clamp(max=weight_cap)
    names = {"response": "optimal_token_baseline", "loss": "tir_optimal_token_baseline"}
    theirs = verl_advantages(
        core_algos.get_adv_estimator_fn(names[places]),
        batch,
        old_log_probs=old,
        sum_pi_squared=squares,
        rollout_is_weights=weights,
        handle_zero_tail=True,
    )
    assert_close(ours, theirs, FLOAT64)
    assert not torch.allclose(ours, batch.rewards[:, None] * batch.mask)

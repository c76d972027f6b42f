"""The entropy coefficient's controllers, the learned one against torch's optimizer."""

import dataclasses
import json
import math
from typing import Any

import pytest
import torch

from megarl.algos.entropy import EntropyState, next_entropy_state
from megarl.algos.validate import check_algo_config
from megarl.config.algo import AlgoConfig
from megarl.config.algo.compose import EntropyConfig
from megarl.errors import ConfigError, NonFiniteError


def config(controller: Any, coef: float = 0.01, **entropy: Any) -> AlgoConfig:
    return AlgoConfig(entropy_coef=coef, entropy=EntropyConfig(controller=controller, **entropy))


def test_learned_golden(golden: Any, check_golden: Any) -> None:
    case = golden("E.adaptive_temp")
    inputs, expected = case["inputs"], case["expected"]
    cfg = config("learned", coef=math.exp(inputs["log_alpha"]), target_nats=case["params"]["target_entropy"])
    state = EntropyState(coef=cfg.entropy_coef)
    check_golden(state.coef, expected["entropy_coeff"], case)
    after = next_entropy_state(state, inputs["mean_entropy"], cfg)
    # The first moment of the first step is (1 − 0.9) times the gradient.
    check_golden(after.exp_avg / 0.1, expected["grad_log_alpha"], case)
    assert after.coef > state.coef


def test_learned_takes_the_steps_of_adamw() -> None:
    cfg = config("learned", lr=0.05, target_nats=0.7)
    log_alpha = torch.tensor(math.log(0.01), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.AdamW([log_alpha], lr=0.05, weight_decay=0.0)
    state = EntropyState(coef=cfg.entropy_coef)
    for entropy in (0.6, 0.2, 1.9, 0.71, 0.0):
        optimizer.zero_grad()
        ((entropy - 0.7) * log_alpha.exp()).backward()
        optimizer.step()
        state = next_entropy_state(state, entropy, cfg)
        assert state.coef == pytest.approx(log_alpha.exp().item(), rel=1e-12)
    assert state.num_updates == 5


def test_the_bound_holds_and_is_left_at_once() -> None:
    # The first AdamW step moves the logarithm by lr.
    cfg = config("learned", lr=0.1, target_nats=1.0, max_coef=0.0102)
    state = next_entropy_state(EntropyState(coef=cfg.entropy_coef), 0.5, cfg)
    assert state.coef == 0.0102
    for _ in range(20):
        state = next_entropy_state(state, 0.5, cfg)
    assert state.coef == 0.0102
    # Moments decay, and soon the coefficient falls.
    for _ in range(20):
        state = next_entropy_state(state, 3.0, cfg)
    assert state.coef < 0.0102


def test_proportional(golden: Any, check_golden: Any) -> None:
    case = golden("E.adaptive_temp")
    cfg = config("proportional", target_nats=case["params"]["target_entropy"])
    state = next_entropy_state(EntropyState(coef=cfg.entropy_coef), case["inputs"]["mean_entropy"], cfg)
    # The fixed variant of the case's note: 1/0.6 × the coefficient.
    check_golden(state.coef, 0.01 / 0.6, case)
    # It does not compound.
    assert next_entropy_state(state, 0.5, cfg).coef == pytest.approx(0.02)
    assert next_entropy_state(state, 0.0, cfg).coef == pytest.approx(0.01 / 1e-4)
    bounded = config("proportional", max_coef=0.015)
    assert next_entropy_state(state, 0.5, bounded).coef == 0.015


def test_fixed_never_changes() -> None:
    cfg = config("fixed", coef=0.3)
    assert next_entropy_state(EntropyState(coef=cfg.entropy_coef), 7.0, cfg) == EntropyState(coef=0.3)


def test_the_state_survives_json() -> None:
    cfg = config("learned")
    state = next_entropy_state(EntropyState(coef=cfg.entropy_coef), 1 / 3, cfg)
    assert EntropyState(**json.loads(json.dumps(dataclasses.asdict(state)))) == state


@pytest.mark.parametrize("controller", ["fixed", "learned", "proportional"])
def test_a_bad_entropy_is_an_error(controller: str) -> None:
    cfg = config(controller)
    with pytest.raises(NonFiniteError, match="entropy: got nan, expected a finite number of nats"):
        next_entropy_state(EntropyState(coef=cfg.entropy_coef), math.nan, cfg)


def test_settings_that_cannot_work() -> None:
    check_algo_config(config("fixed", coef=0.0), max_response_tokens=8)
    check_algo_config(config("learned", max_coef=0.01), max_response_tokens=8)
    with pytest.raises(ConfigError, match=r"entropy_coef: got 0 with algo.entropy.controller=learned, which scales"):
        check_algo_config(config("learned", coef=0.0), max_response_tokens=8)
    with pytest.raises(ConfigError, match=r"entropy_coef: got 0.1, expected <= algo.entropy.max_coef=0.01"):
        check_algo_config(config("learned", coef=0.1, max_coef=0.01), max_response_tokens=8)
    with pytest.raises(ConfigError, match="unknown entropy controller 'pid'"):
        check_algo_config(config("pid"), max_response_tokens=8)

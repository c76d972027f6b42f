import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.algos.kl import KL_CONTROLLERS, KL_ESTIMATORS, KLObservation, apply_kl_penalty
from megarl.config.algo import KLConfig
from megarl.errors import NonFiniteError
from megarl.types import AlgoState


def f64(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("case_id", ["C.kl_penalty", "C.kl_penalty.clamp"])
def test_estimators_golden(case_id: str, golden: Any, check_golden: Any) -> None:
    case = golden(case_id)
    logprobs, ref = f64(case["inputs"]["logprob"]), f64(case["inputs"]["ref_logprob"])
    for name, expected in case["expected"].items():
        check_golden(KL_ESTIMATORS.get(name).compute(logprobs, ref), expected, case)


@pytest.mark.parametrize(("alias", "name"), [("kl", "k1"), ("mse", "k2"), ("low_var_kl", "k3")])
def test_aliases(alias: str, name: str) -> None:
    assert KL_ESTIMATORS.get(alias) is KL_ESTIMATORS.get(name)


def gradient(name: str, delta: float) -> float:
    logprobs = f64([delta - 1.0]).requires_grad_()
    KL_ESTIMATORS.get(name).compute(logprobs, f64([-1.0])).sum().backward()
    assert logprobs.grad is not None
    return logprobs.grad.item()


@pytest.mark.parametrize("delta", [-2.0, -0.3, 0.0, 0.4, 3.0])
def test_gradients(delta: float) -> None:
    # d/dlp of Δ, Δ²/2 and e^−Δ + Δ − 1.
    assert gradient("k1", delta) == 1.0
    assert gradient("k2", delta) == pytest.approx(delta)
    assert gradient("k3", delta) == pytest.approx(1 - math.exp(-delta))


@pytest.mark.parametrize("delta", [-12.0, -2.0, 0.0, 0.4])
def test_straight_through_has_the_value_of_k3_and_the_gradient_of_k2(delta: float) -> None:
    logprobs, ref = f64([delta - 1.0]), f64([-1.0])
    value = KL_ESTIMATORS.get("k3_straight_through").compute(logprobs, ref).item()
    assert value == pytest.approx(min(math.exp(-delta) + delta - 1, 10.0), abs=1e-12)
    assert gradient("k3_straight_through", delta) == pytest.approx(delta)


def test_k3_exponent_is_bounded() -> None:
    value = KL_ESTIMATORS.get("k3").compute(torch.tensor([-1000.0]), torch.tensor([0.0]))
    assert value.item() == 10.0


def test_expected_gradient_of_the_estimators_on_policy() -> None:
    """Exact over a three-token vocabulary: 0 for k1, that of KL(p ‖ q) for k2, another one for k3."""
    logits = f64([0.3, -1.0, 0.9]).requires_grad_()
    ref = f64([-0.5, 0.2, 0.1]).log_softmax(-1)

    def expected_gradient(name: str) -> Tensor:
        logprobs = logits.log_softmax(-1)
        loss = (logprobs.detach().exp() * KL_ESTIMATORS.get(name).compute(logprobs, ref)).sum()
        return torch.autograd.grad(loss, logits)[0]

    logprobs = logits.log_softmax(-1)
    reverse_kl = torch.autograd.grad((logprobs.exp() * (logprobs - ref)).sum(), logits)[0]
    torch.testing.assert_close(expected_gradient("k1"), torch.zeros(3, dtype=torch.float64), atol=1e-12, rtol=0)
    torch.testing.assert_close(expected_gradient("k2"), reverse_kl)
    torch.testing.assert_close(expected_gradient("k3_straight_through"), reverse_kl)
    assert (expected_gradient("k3") - reverse_kl).abs().max() > 0.05


def test_nan_is_not_hidden() -> None:
    for name in KL_ESTIMATORS:
        assert KL_ESTIMATORS.get(name).compute(f64([math.nan]), f64([-1.0])).isnan().all(), name


def test_penalty_golden(golden: Any, check_golden: Any) -> None:
    case = golden("C.kl_in_reward")
    inputs = case["inputs"]
    got = apply_kl_penalty(
        f64(inputs["token_level_scores"]),
        f64(inputs["kl"]),
        f64(inputs["mask"]).bool(),
        coef=case["params"]["beta"],
    )
    check_golden(got.token_level_rewards, case["expected"]["token_level_rewards"], case)
    check_golden(got.current_kl, case["expected"]["current_kl"], case)


def test_penalty_ignores_rows_without_loss_tokens() -> None:
    mask = torch.tensor([[True, True], [False, False]])
    got = apply_kl_penalty(torch.zeros(2, 2), torch.tensor([[0.5, 1.5], [math.nan, 9.0]]), mask, coef=2.0)
    assert got.token_level_rewards.tolist() == [[-1.0, -3.0], [0.0, 0.0]]
    assert got.current_kl == 1.0


def test_penalty_of_nothing() -> None:
    empty = torch.zeros(0, 0)
    assert apply_kl_penalty(empty, empty, empty.bool(), coef=1.0).current_kl == 0.0


def test_adaptive_controller_golden(golden: Any, check_golden: Any) -> None:
    case = golden("C.adaptive_kl")
    params = case["params"]
    cfg = KLConfig(target_nats=params["target"], horizon=params["horizon"])
    state, coefs = AlgoState(kl_coef=params["init"]), []
    for kl in case["inputs"]["kl"]:
        seen = KLObservation(kl_nats=kl, num_rows=params["n_steps"])
        state = KL_CONTROLLERS.get("adaptive")(state, seen, cfg)
        coefs.append(state.kl_coef)
    check_golden(coefs, case["expected"], case)


def test_adaptive_controller_refuses_non_finite_kl() -> None:
    with pytest.raises(NonFiniteError, match="finite number of nats"):
        KL_CONTROLLERS.get("adaptive")(AlgoState(kl_coef=0.1), KLObservation(kl_nats=math.nan, num_rows=8), KLConfig())


def test_fixed_controller_keeps_the_coefficient() -> None:
    state = AlgoState(kl_coef=0.3)
    assert KL_CONTROLLERS.get("fixed")(state, KLObservation(kl_nats=99.0, num_rows=8), KLConfig()) == state

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

"""Reshapes by hand: P = 1/4, P_old = 1/2, so R = 1/2."""

import math
from typing import Any

import pytest
import torch

from megarl.algos.reshape import Reshape, demonstration_reshape, ratio_reshape
from megarl.config.algo import OffPolicyConfig
from megarl.errors import ConfigError

LN2 = math.log(2)
P, P_OLD = torch.tensor([-2 * LN2], dtype=torch.float64), torch.tensor([-LN2], dtype=torch.float64)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("no_reshape", 0.25),
        ("logp", 0.2 * -2 * LN2),
        ("p_logp", 0.25 + 0.2 * -2 * LN2),
        ("square_root", 0.5),
        ("pow", 0.25**1.5),
        ("p_div_p_0.25", 0.5),
    ],
)
def test_on_demonstration_tokens(name: str, expected: float) -> None:
    f = demonstration_reshape(OffPolicyConfig(reshape=name, reshape_weight=0.2, reshape_exponent=1.5))
    assert f.of_probability(P).item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("no_reshape", 0.5),
        ("logp", -LN2),
        ("p_logp", 0.5 + 0.2 * -LN2),
        ("square_root", math.sqrt(0.5)),
        ("pow", 0.5**1.5),
        ("p_div_p_0.25", 0.5 / (2 / 3)),
    ],
)
def test_on_ratios(name: str, expected: float) -> None:
    cfg = OffPolicyConfig(on_policy_reshape=name, on_policy_reshape_weight=0.2, on_policy_reshape_exponent=1.5)
    assert ratio_reshape(cfg).of_ratio(P, P_OLD).item() == pytest.approx(expected, abs=1e-12)


def test_gradient_golden(golden: Any, check_golden: Any) -> None:
    case = golden("E.reshape_grad")
    logprobs = torch.tensor(case["inputs"]["logp"], dtype=torch.float64, requires_grad=True)
    Reshape(half=case["params"]["gamma"]).of_probability(logprobs).sum().backward()
    check_golden(logprobs.grad, case["expected"], case)


@pytest.mark.parametrize("name", ["p_div_p", "p_div_p_0"])
def test_p_div_p_needs_a_positive_number(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"algo.off_policy.reshape: got '{name}', expected p_div_p_C with C > 0"):
        demonstration_reshape(OffPolicyConfig(reshape=name))
    with pytest.raises(ConfigError, match=r"algo\.off_policy\.on_policy_reshape: got"):
        ratio_reshape(OffPolicyConfig(on_policy_reshape=name))

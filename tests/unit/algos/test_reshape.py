"""Reshapes by hand: P = 1/4, P_old = 1/2, so R = 1/2."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.algos.reshape import Reshape, demonstration_reshape, ratio_reshape
from megarl.config.algo import OffPolicyConfig
from megarl.errors import ConfigError

LN2 = math.log(2)
P, P_OLD = torch.tensor([-2 * LN2], dtype=torch.float64), torch.tensor([-LN2], dtype=torch.float64)


def log_p(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("no_reshape", 0.25),
        ("logp", 0.2 * -2 * LN2),
        ("p_logp", 0.25 + 0.2 * -2 * LN2),
        ("square_root", 0.5),
        ("pow", 0.25**1.5),
        ("p_div_p_0.25", 0.5),
        ("p_div_p_1", 0.2),
        ("p_div_p_.75", 0.25),
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


@pytest.mark.parametrize("name", ["no_reshape", "square_root", "pow", "p_div_p_0.1", "p_logp"])
def test_a_ratio_of_one_stays_one(name: str) -> None:
    f = ratio_reshape(OffPolicyConfig(on_policy_reshape=name))
    assert f.of_ratio(P, P).item() == pytest.approx(1.0, abs=1e-15)


def test_gradient_golden(golden: Any, check_golden: Any) -> None:
    case = golden("E.reshape_grad")
    logprobs = torch.tensor(case["inputs"]["logp"], dtype=torch.float64, requires_grad=True)
    Reshape(half=case["params"]["gamma"]).of_probability(logprobs).sum().backward()
    check_golden(logprobs.grad, case["expected"], case)


def test_gradient_is_largest_where_the_probability_is_c() -> None:
    def gradient(p: float) -> float:
        leaf = log_p(math.log(p))
        Reshape(half=0.1).of_probability(leaf).sum().backward()
        assert leaf.grad is not None
        return leaf.grad.item()

    # c·P / (P + c)² at P = c is 1/4.
    assert gradient(0.1) == pytest.approx(0.25)
    assert gradient(0.09) < 0.25 > gradient(0.11)


def test_log_ratio_is_bounded_at_20() -> None:
    logprobs = log_p(0.0)
    value = Reshape().of_ratio(logprobs, torch.full((1,), -1000.0, dtype=torch.float64))
    assert value.item() == pytest.approx(math.exp(20))


def test_improbable_tokens_stay_finite_in_float32() -> None:
    logprobs = torch.tensor([-200.0], requires_grad=True)
    value = Reshape(half=0.1).of_probability(logprobs)
    value.sum().backward()
    assert value.item() == 0.0
    assert logprobs.grad is not None
    assert logprobs.grad.item() == 0.0


@pytest.mark.parametrize("name", ["p_div_p", "p_div_p_0", "p_div_p_0.0"])
def test_p_div_p_needs_a_positive_number(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"algo.off_policy.reshape: got '{name}', expected p_div_p_C with C > 0"):
        demonstration_reshape(OffPolicyConfig(reshape=name))
    with pytest.raises(ConfigError, match=r"algo\.off_policy\.on_policy_reshape: got"):
        ratio_reshape(OffPolicyConfig(on_policy_reshape=name))


def test_unknown_names_list_the_known() -> None:
    with pytest.raises(ConfigError, match=r"algo.off_policy.reshape: unknown reshape 'p_div_p_x'; did you mean"):
        demonstration_reshape(OffPolicyConfig(reshape="p_div_p_x"))
    with pytest.raises(ConfigError, match=r"algo\.off_policy\.on_policy_reshape: unknown reshape 'sqrt'"):
        ratio_reshape(OffPolicyConfig(on_policy_reshape="sqrt"))

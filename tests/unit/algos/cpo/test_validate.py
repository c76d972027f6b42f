"""Conflicts of `algo.cpo`."""

from typing import Any

import pytest

from megarl.algos.cpo import check_cpo
from megarl.config.algo import CpoConfig, HintConfig
from megarl.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "mi4"}, r"algo.cpo.method: unknown CPO method 'mi4'"),
        ({"method": "verifier_sign", "formula_set": "ref"}, r"got 'ref', which has no formula of 'verifier_sign'"),
        ({"method": "mi", "neg_scope": "negative_sample"}, r"algo.cpo.neg_scope: .* set it to null"),
        ({"neg_scope": "negative_sample"}, r"algo.cpo.neg_scope: .* set it to null"),
        (
            {"method": "mi", "shuffled_baseline": True, "mi_estimator": "full_kl"},
            r"algo.cpo.shuffled_baseline: .* set it to false",
        ),
        ({"method": "mi", "formula_set": "fix", "difficulty": "variance"}, r"set algo.cpo.difficulty=variance_signed"),
        ({"method": "mi", "hint": HintConfig(template="Hint")}, r"algo.cpo.hint.template: got 'Hint'"),
        ({"method": "mi", "difficulty": "four_way"}, r"algo.cpo.difficulty: unknown difficulty 'four_way'"),
        ({"method": "mi", "mi_estimator": "mine"}, r"algo.cpo.mi_estimator: unknown mutual-information estimator"),
    ],
)
def test_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        check_cpo(CpoConfig(**settings))
    assert "\n" not in str(caught.value)


def test_accepted() -> None:
    for settings in (
        {},
        {"method": "verifier_sign", "shuffled_baseline": True},
        {"method": "negonly_mi3", "neg_scope": "negative_sample", "formula_set": "fix", "difficulty": "five_way"},
        {"method": "tok_kl_qwen3", "difficulty": "variance"},
    ):
        check_cpo(CpoConfig(**settings))

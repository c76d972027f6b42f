"""Conflicts of `algo.cpo`."""

from typing import Any

import pytest

from megarl.algos.cpo import check_cpo
from megarl.config.algo import CpoConfig, HintConfig
from megarl.config.setting import check_values
from megarl.errors import ConfigError


def check(cfg: CpoConfig) -> None:
    check_values(cfg, ("algo.cpo",), "algo.cpo")
    check_cpo(cfg)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "mi4"}, r"algo.cpo.method: unknown CPO method 'mi4'"),
        (
            {"method": "mi", "neg_scope": "negative_sample"},
            r"^algo.cpo.neg_scope: got negative_sample, which is not read with the doc formula of algo.cpo.method=mi; "
            r"leave it at null, or choose another method or formula set$",
        ),
        ({"method": "verifier_sign", "mi_estimator": "full_kl"}, r"mi_estimator: got full_kl, .* at p_weighted"),
        ({"method": "mi", "coefficients": {"beta": 1.0}}, r"coefficients: 'mi' has no coefficient 'beta'; it has none"),
        ({"method": "tok_kl", "formula_set": "fix", "difficulty": "variance"}, r"set algo.cpo.difficulty=variance_sig"),
        ({"method": "mi", "hint": HintConfig(template="{hint} {hint}")}, r"expected text with {hint} in it once"),
        ({"method": "mi", "hint": HintConfig(field="answer", source="answer")}, r"algo.cpo.hint.source: got 'answer'"),
    ],
)
def test_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        check(CpoConfig(**settings))
    assert "\n" not in str(caught.value)


def test_accepted() -> None:
    for settings in (
        {},
        {"hint": HintConfig(template="Hint: {hint}", source="answer", max_tokens=9)},
        {"hint": HintConfig(template="{hint}\n{question}", place="user_turn", field="answer")},
        {"method": "mi", "formula_set": "ref", "entropy_source": "current", "exclude_answer": True, "kl_alpha": 0.0},
        {"method": "verifier_sign", "mix": 0.5, "mix_decay_steps": 9, "weight_clip": 0.5, "ratio_clamp": 2.0},
        {"method": "verifier_sign", "shuffled_baseline": True},
        {"method": "negonly_mi3", "neg_scope": "negative_sample", "formula_set": "fix", "difficulty": "five_way"},
        {"method": "tok_kl_qwen3", "difficulty": "variance"},
        {"method": "seq_kl", "difficulty": "data", "difficulty_field": "level"},
    ):
        check(CpoConfig(**settings))

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
        ({"method": "verifier_sign", "formula_set": "ref"}, r"got 'ref', which has no formula of 'verifier_sign'"),
        (
            {"method": "mi", "neg_scope": "negative_sample"},
            r"^algo.cpo.neg_scope: got negative_sample, which is not read with the doc formula of algo.cpo.method=mi; "
            r"leave it at null, or choose another method or formula set$",
        ),
        ({"neg_scope": "negative_sample"}, r"neg_scope: .* not read with the fix formula of algo.cpo.method=none"),
        ({"formula_set": "ref"}, r"formula_set: got ref, .* algo.cpo.method=none; leave it at null"),
        ({"pos_alpha": 0.0}, r"pos_alpha: got 0.0, .* algo.cpo.method=none; leave it at 0.05"),
        ({"entropy_source": "current"}, r"entropy_source: got current, .* algo.cpo.method=none; leave it at old"),
        ({"method": "mi3", "mix": 0.5}, r"mix: got 0.5, .* the ref formula of algo.cpo.method=mi3; leave it at 1.0"),
        ({"method": "mi3", "mix_decay_steps": 9}, r"mix_decay_steps: got 9, .* leave it at 0"),
        ({"method": "mi3", "weight_clip": 0.5}, r"weight_clip: got 0.5, .* leave it at 0.2"),
        ({"method": "naive_qwen3", "exclude_answer": True}, r"exclude_answer: got true, .* leave it at false"),
        ({"method": "naive_qwen3", "shuffled_baseline": True}, r"shuffled_baseline: got true, .* leave it at false"),
        ({"method": "naive_qwen3", "ratio_clamp": 2.0}, r"ratio_clamp: got 2.0, .* leave it at 5.0"),
        ({"method": "verifier_sign", "mi_estimator": "full_kl"}, r"mi_estimator: got full_kl, .* at p_weighted"),
        ({"method": "mi", "entropy_source": "current"}, r"entropy_source: got current, .* leave it at old"),
        ({"method": "mi", "difficulty": "five_way"}, r"difficulty: got five_way, .* leave it at three_way"),
        (
            {"method": "mi", "pos_alpha": 0.5},
            r"pos_alpha: got 0.5, .* formula of algo.cpo.method=mi; leave it at 0.05",
        ),
        (
            {"method": "verifier_sign", "kl_alpha": 0.5},
            r"kl_alpha: got 0.5, .* leave it at 0.1, or choose another",
        ),
        ({"method": "seq_kl", "difficulty_field": "level"}, r"difficulty_field: got level, .* leave it at null"),
        (
            {"method": "seq_kl", "difficulty": "data"},
            r"difficulty_field: got null .* set it to the field of",
        ),
        ({"method": "mi", "coefficients": {"beta": 1.0}}, r"coefficients: 'mi' has no coefficient 'beta'; it has none"),
        (
            {"method": "mi", "shuffled_baseline": True, "mi_estimator": "full_kl"},
            r"algo.cpo.shuffled_baseline: .* set it to false",
        ),
        ({"method": "tok_kl", "formula_set": "fix", "difficulty": "variance"}, r"set algo.cpo.difficulty=variance_sig"),
        ({"method": "mi", "hint": HintConfig(template="Hint")}, r"algo.cpo.hint.template: got 'Hint'"),
        ({"method": "mi", "hint": HintConfig(template="{hint} {hint}")}, r"expected text with {hint} in it once"),
        ({"method": "mi", "hint": HintConfig(template="{question}{hint}")}, r"and {question} not at all"),
        (
            {"method": "mi", "hint": HintConfig(place="user_turn", template="{hint}")},
            r"place=user_turn, .* and {question} also",
        ),
        ({"method": "mi", "hint": HintConfig(field="answer", source="answer")}, r"algo.cpo.hint.source: got 'answer'"),
        ({"method": "mi", "difficulty": "four_way"}, r"algo.cpo.difficulty: unknown difficulty 'four_way'"),
        ({"method": "mi", "mi_estimator": "mine"}, r"algo.cpo.mi_estimator: unknown mutual-information estimator"),
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

"""Formulas against the golden numbers, which for `ref` are also those of the public code run in float64."""

from typing import Any

import pytest
import torch

from megarl.algos.cpo import CpoInputs, required_quantities, shape_advantages
from megarl.algos.cpo.formulas import Formula, Term
from megarl.algos.cpo.methods import Method, formula
from megarl.config.algo import CpoConfig
from megarl.errors import ConfigError
from megarl.types import TokenQuantity

DOC = ("naive_qwen3", "mi_qwen3", "negonly_mi3_qwen3", "mi_clamp_unify_difficulty_qwen3", "negonly_seq_kl_qwen3")
REF = (
    "naive",
    "naive_qwen3",
    "noaccmask_qwen3",
    "mi_qwen3",
    "mi_accmask_qwen3",
    "mi_unify_qwen3",
    "mi_clamp_unify_qwen3",
    "mi_clamp_unify_difficulty_qwen3",
    "mi3_qwen3",
    "negonly_mi3_qwen3",
    "negonly_mi_qwen3",
    "reverse_mi3_qwen3",
    "addition_mi3_qwen3",
    "mi2_qwen3",
    "negonly_seq_kl_qwen3",
    "seq_kl_qwen3",
    "negonly_tok_kl_qwen3",
    "tok_kl_qwen3",
)


@pytest.mark.parametrize("method", REF)
def test_ref_golden(method: str, golden: Any, golden_inputs: Any, golden_config: Any, check_golden: Any) -> None:
    case = golden(f"A.wrap.ref.{method}")
    check_golden(shape_advantages(golden_inputs(case), golden_config(case, formula_set="ref")), case["expected"], case)


@pytest.mark.parametrize("method", DOC)
def test_doc_golden(method: str, golden: Any, golden_inputs: Any, golden_config: Any, check_golden: Any) -> None:
    case = golden(f"A.wrap.doc.{method}")
    check_golden(shape_advantages(golden_inputs(case), golden_config(case, formula_set="doc")), case["expected"], case)


def test_the_methods_own_formula_set(golden: Any, golden_inputs: Any, golden_config: Any, check_golden: Any) -> None:
    for method in REF:
        case = golden(f"A.wrap.{'doc' if method in DOC else 'ref'}.{method}")
        check_golden(shape_advantages(golden_inputs(case), golden_config(case)), case["expected"], case)


@pytest.mark.parametrize(
    ("scope", "expected"),
    [("not_all_correct", [1, 0, 1, 1]), ("all_wrong_group", [1, 0, 0, 0]), ("negative_sample", [1, 0, 1, 0])],
)
def test_who_is_negative(scope: Any, expected: list[int]) -> None:
    """Rows: all-wrong group, all-correct group, then a wrong and a correct row of a mixed group. MI is 1, α 0.1."""
    ones = torch.ones(4, 1, dtype=torch.float64)
    x = CpoInputs(
        advantages=ones * 0,
        loss_mask=ones.bool(),
        correct=torch.tensor([False, True, False, True]),
        difficulty=torch.tensor([-1, 1, 0, 0]),
        vocab_size=10,
        old_logprobs=-ones,
        hint_logprobs=ones * 0,
    )
    got = shape_advantages(x, CpoConfig(method="negonly_seq_kl", formula_set="doc", neg_scope=scope))
    assert got.flatten().tolist() == pytest.approx([0.1 * e for e in expected])


def test_required_quantities() -> None:
    both = {TokenQuantity.OLD_LOGPROBS, TokenQuantity.HINT_LOGPROBS}
    assert required_quantities(CpoConfig()) == set()
    assert required_quantities(CpoConfig(method="naive_qwen3")) == set()
    assert required_quantities(CpoConfig(method="verifier_sign")) == both
    assert required_quantities(CpoConfig(method="mi")) == both
    assert required_quantities(CpoConfig(method="mi", shuffled_baseline=True)) == both | {
        TokenQuantity.SHUFFLED_HINT_LOGPROBS
    }
    assert required_quantities(CpoConfig(method="mi", mi_estimator="full_kl")) == both | {TokenQuantity.HINT_KL}
    assert required_quantities(CpoConfig(method="verifier_sign", mi_estimator="full_kl")) == both
    assert required_quantities(CpoConfig(method="mi3")) == both | {TokenQuantity.OLD_ENTROPY}
    assert required_quantities(CpoConfig(method="mi3", entropy_source="current")) == both


def test_what_a_factor_reads_is_in_its_signature() -> None:
    """A factor of a method of one's own gets the entropy, and not zeros, though no list names it."""

    def own(entropy: torch.Tensor, beta: float) -> torch.Tensor:
        return beta * entropy

    made = Formula(terms=(Term(weight="mi_alpha", factors=(own,)),))
    assert made.reads == {"entropy", "beta", "mi_alpha"}
    with pytest.raises(ValueError, match=r"the fix formula reads 'beta', expected one of .*entropy.*; rename the"):
        Method(default="fix", formulas={"fix": made})
    assert Method(default="fix", formulas={"fix": made}, coefficients={"beta": 2.0}).coefficients == {"beta": 2.0}


def test_unknown_names_and_sets() -> None:
    with pytest.raises(ConfigError, match=r"algo.cpo.method: unknown CPO method 'mi4'; did you mean"):
        formula(CpoConfig(method="mi4"))
    with pytest.raises(ConfigError, match=r"got 'doc', which has no formula of 'tok_kl'; expected one of: ref, fix"):
        formula(CpoConfig(method="tok_kl", formula_set="doc"))

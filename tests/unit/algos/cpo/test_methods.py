"""Formulas against the golden numbers, which for `ref` are also those of the public code run in float64."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.algos.cpo import CpoInputs, required_quantities, shape_advantages
from megarl.algos.cpo.formulas import Formula, Term
from megarl.algos.cpo.methods import CPO_METHODS, Method, formula
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


def test_fixed_golden(golden: Any, golden_inputs: Any, golden_config: Any, check_golden: Any) -> None:
    case = golden("A.wrap.fixed.negonly_mi3_qwen3")
    for cfg in (golden_config(case, formula_set="doc"), golden_config(case, formula_set="fix", neg_scope=None)):
        check_golden(shape_advantages(golden_inputs(case), cfg), case["expected"], case)


def test_literal_reading_of_the_description_is_not_followed(
    golden: Any, golden_inputs: Any, golden_config: Any
) -> None:
    """Printed code halves only the last token of a correct row: its mask is the sparse reward. Ours halves the row."""
    case = golden("A.wrap.doc_literal.naive_qwen3")
    got = shape_advantages(golden_inputs(case), golden_config(case, formula_set="doc"))
    literal = torch.tensor(case["expected"], dtype=torch.float64)
    differs = (got - literal).abs() > 1e-9
    assert differs.nonzero().tolist() == [[2, 0], [5, 0], [5, 1]]
    assert got[2, 0].item() == pytest.approx(0.05)


def test_the_methods_own_formula_set(golden: Any, golden_inputs: Any, golden_config: Any, check_golden: Any) -> None:
    for method in REF:
        case = golden(f"A.wrap.{'doc' if method in DOC else 'ref'}.{method}")
        check_golden(shape_advantages(golden_inputs(case), golden_config(case)), case["expected"], case)


def test_seed_example(golden: Any, check_golden: Any) -> None:
    case = golden("A.seed_example")
    one = torch.tensor([[1.0]], dtype=torch.float64)
    x = CpoInputs(
        advantages=one * case["inputs"]["adv"],
        loss_mask=one.bool(),
        correct=torch.tensor([True]),
        difficulty=torch.tensor([0]),
        vocab_size=10,
        old_logprobs=-one,
        hint_logprobs=-one,
        hint_kl=one * case["inputs"]["mi"],
    )
    cfg = CpoConfig(method="mi", mi_estimator="full_kl", mi_alpha=case["params"]["mi_alpha"])
    check_golden(shape_advantages(x, cfg)[0, 0], case["expected"], case)


def test_suffix_is_optional_but_for_naive() -> None:
    for method in REF:
        if "naive" not in method:
            assert CPO_METHODS.get(method) is CPO_METHODS.get(method.removesuffix("_qwen3"))
    assert CPO_METHODS.get("naive") is not CPO_METHODS.get("naive_qwen3")


def test_fixed_sequence_terms_do_not_grow_with_length_or_with_one_token() -> None:
    def shaped(method: str, delta: list[float]) -> float:
        n = len(delta)
        x = CpoInputs(
            advantages=torch.zeros(1, n, dtype=torch.float64),
            loss_mask=torch.ones(1, n, dtype=torch.bool),
            correct=torch.tensor([False]),
            difficulty=torch.tensor([-1]),
            vocab_size=10,
            old_logprobs=-torch.tensor([delta], dtype=torch.float64),
            hint_logprobs=torch.zeros(1, n, dtype=torch.float64),
            entropy=torch.zeros(1, n, dtype=torch.float64),
        )
        return shape_advantages(x, CpoConfig(method=method, formula_set="fix"))[0, 0].item()

    # exp(0)·d = 0.5 on every token: the mean is 0.5 for any length, × kl_alpha 0.1.
    assert shaped("negonly_seq_kl", [0.5] * 3) == pytest.approx(0.05)
    assert shaped("negonly_seq_kl", [0.5] * 30) == pytest.approx(0.05)
    # d = 100 counts as 10: the mean of 10 and 0 is 5, × neg_alpha 0.1.
    assert shaped("seq_kl", [100.0, 0.0]) == pytest.approx(0.5)


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


def test_unknown_names_and_sets() -> None:
    with pytest.raises(ConfigError, match=r"algo.cpo.method: unknown CPO method 'mi4'; did you mean"):
        formula(CpoConfig(method="mi4"))
    with pytest.raises(ConfigError, match=r"got 'doc', which has no formula of 'tok_kl'; expected one of: ref, fix"):
        formula(CpoConfig(method="tok_kl", formula_set="doc"))


def test_what_formulas_read() -> None:
    """Of the tables of docs/algorithms/cpo.md, the formulas without MI, and those with D or N."""
    chosen = {(n, s): f for n in CPO_METHODS for s, f in CPO_METHODS.get(n).formulas.items() if "_qwen3" not in n}
    assert {key for key, f in chosen.items() if "mi" not in f.reads} == {
        *(("none", s) for s in ("doc", "ref", "fix")),
        *(("naive", s) for s in ("doc", "ref", "fix")),
        *((n, s) for n in ("noaccmask", "seq_kl", "negonly_tok_kl", "tok_kl") for s in ("ref", "fix")),
        ("negonly_seq_kl", "ref"),
        ("verifier_sign", "fix"),
    }
    assert {key for key, f in chosen.items() if f.uses_difficulty} == {
        ("naive", "doc"),
        *(("mi_clamp_unify_difficulty", s) for s in ("doc", "ref", "fix")),
        *((n, s) for n in ("negonly_mi3", "negonly_seq_kl") for s in ("doc", "ref", "fix")),
        *((n, s) for n in ("negonly_mi", "negonly_tok_kl", "seq_kl", "tok_kl") for s in ("ref", "fix")),
    }


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


def test_the_page_names_the_default_formula_set_of_every_method() -> None:
    """Null takes `doc` where the page's table has such a formula, else `ref`, with the exceptions that it names."""
    page = (Path(__file__).parents[4] / "docs" / "algorithms" / "cpo.md").read_text()
    assert "`naive` takes `ref`; `none` and `verifier_sign` take `fix`" in " ".join(page.split())
    for name in CPO_METHODS:
        method = CPO_METHODS.get(name)
        expected = {"naive": "ref", "none": "fix", "verifier_sign": "fix"}.get(
            name, "doc" if "doc" in method.formulas else "ref"
        )
        assert method.default == expected, name

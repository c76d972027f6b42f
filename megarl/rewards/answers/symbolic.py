"""Equality by computer algebra: latex2sympy2_extended reads LaTeX, math-verify and sympy compare."""

import math
import re
from functools import lru_cache
from typing import Any

import sympy
from latex2sympy2_extended import NormalizationConfig, latex2sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from math_verify.grader import sympy_expr_eq

from megarl.rewards.answers.guard import refusal
from megarl.rewards.answers.numbers import REL_TOLERANCE
from megarl.rewards.answers.verdict import Verdict

_READ_AS_WRITTEN = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
)
_KEEP_CASE = ConversionConfig(lowercase_symbols=False)
_IMAGINARY = re.compile(r"(?<![a-zA-Z\\_])i(?![a-zA-Z_])")
_DECIMAL = re.compile(r"\d\.\d")
_DEGREE = re.compile(r"\s*degree\b")
# Decimal places and digits at which math-verify compares floats.
_FLOAT_ROUNDING, _NUMERIC_PRECISION = 6, 15


@lru_cache(maxsize=8192)
def parse_latex(text: str, *, is_complex: bool = False) -> Any:
    """The sympy object of `text`, or None if it is refused or no LaTeX; never evaluates Python.

    Variables are real; `is_complex`: they are not, and i is the imaginary unit.
    """
    if refusal(text):
        return None
    try:
        expression = latex2sympy(
            _DEGREE.sub(r"^{\\circ}", text),
            is_real=None if is_complex else True,
            convert_degrees=True,
            conversion_config=_KEEP_CASE,
            normalization_config=_READ_AS_WRITTEN,
        )
        return expression.xreplace({sympy.Symbol("i"): sympy.I}) if is_complex else expression
    except Exception:  # the parser raises Exception itself, and sympy whatever its constructors meet
        return None


def compare_symbolic(answer: str, gold: str) -> Verdict:
    """Whether two expressions are equal for all values of their variables; takes unbounded time in the worst case."""
    is_complex = any(_IMAGINARY.search(text) for text in (answer, gold))
    a, g = (parse_latex(text, is_complex=is_complex) for text in (answer, gold))
    if a is None or g is None:
        return Verdict.UNPARSED
    try:
        if sympy_expr_eq(g, a, _FLOAT_ROUNDING, _NUMERIC_PRECISION) or sympy_expr_eq(
            a, g, _FLOAT_ROUNDING, _NUMERIC_PRECISION
        ):
            return Verdict.EQUAL
        if _DECIMAL.search(answer) or _DECIMAL.search(gold):
            return Verdict.of(_close(a, g))
    except Exception:  # as above: sympy has no base class of its errors
        return Verdict.UNPARSED
    return Verdict.DIFFERENT


def _close(a: Any, g: Any) -> bool:
    """Within the tolerance, for constants of which one is written with decimals; integers are exact."""
    values = [sympy.N(x) for x in (a, g) if isinstance(x, sympy.Expr) and x.is_number]
    if len(values) < 2 or any(x.is_Integer for x in (a, g)) or not all(v.is_real and v.is_finite for v in values):
        return False
    return math.isclose(float(values[0]), float(values[1]), rel_tol=REL_TOLERANCE)

"""Compare answers by computer algebra: latex2sympy2_extended parses LaTeX, math-verify and sympy compare formulas."""

import itertools
import math
import re
from functools import lru_cache
from typing import Any

import sympy
from latex2sympy2_extended import NormalizationConfig, latex2sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from math_verify.grader import sympy_expr_eq

from megarl_answers import structure
from megarl_answers.guard import refusal
from megarl_answers.numbers import REL_TOLERANCE, parse_number
from megarl_answers.options import Equality

_READ_AS_WRITTEN = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
)
_KEEP_CASE = ConversionConfig(lowercase_symbols=False)
# The parser adds an integer to the number after it, as if `(2)(3)` and `2\binom{5}{2}` were mixed fractions. These are
# joined before, so here such numbers are multiplied.
_INTEGER_FACTOR = re.compile(
    r"((?<![\w.^\\])(?:\d+|\(\s*-?\d+\s*\)|\\binom\s*\{[^{}]*\}\s*\{[^{}]*\}))\s*(?=\(|\\(?:binom|frac|lfloor|lceil)(?![a-zA-Z]))"
)
_IMAGINARY = re.compile(r"(?<![a-zA-Z\\_])i(?![a-zA-Z_])")
_DEGREE = re.compile(r"\s*degree\b")
# The parser takes \gamma for the gamma function of what follows; here it is a variable, whose new name nobody writes.
_GAMMA = re.compile(r"\\gamma(?![a-zA-Z])")
# Decimal places and digits at which math-verify compares floats.
_FLOAT_ROUNDING, _NUMERIC_PRECISION = 6, 15
# Values of the variables in the order of their names; negative ones distinguish sqrt(x^2) from x.
_POINTS = tuple(
    tuple(sympy.Rational(value) for value in values.split())
    for values in (
        "7/5 13/11 17/19 23/29 31/37 41/43 47/53 59/61",
        "19/7 5/13 29/11 3/17 37/23 11/31 43/41 7/47",
        "-3/7 11/5 -13/17 19/3 -2/23 31/29 -5/37 41/7",
        "5/3 -7/11 -2/13 17/5 23/19 -3/29 -37/31 13/41",
    )
)
_DIGITS, _AGREEMENT, _MIN_AGREEMENTS = 30, 1e-12, 2
# Values that agree so far are compared to more decimal places, because 2^{2009} is no 2^{2009}-1. Rounding may cost the
# last ones.
_CONSTANT_DIGITS, _DECIMAL_DIGITS, _LOST_DIGITS = 1_000, 80, 30


@lru_cache(maxsize=8192)
def parse_latex(text: str, *, is_complex: bool = False) -> Any:
    """Parse LaTeX to a sympy object, without evaluating Python code; None if `guard` refuses it, or it is not LaTeX or
    has no value, as a division by zero.

    Variables are real. With `is_complex` they are complex, and i is the imaginary unit.
    """
    if refusal(text):
        return None
    try:
        expression = latex2sympy(
            _GAMMA.sub(r"\\varpi ", _DEGREE.sub(r"^{\\circ}", _INTEGER_FACTOR.sub(r"\1 \\cdot ", text))),
            is_real=None if is_complex else True,
            convert_degrees=True,
            conversion_config=_KEEP_CASE,
            normalization_config=_READ_AS_WRITTEN,
        )
        if expression.has(sympy.zoo, sympy.nan):
            return None
        return expression.xreplace({sympy.Symbol("i"): sympy.I}) if is_complex else expression
    except Exception:  # the parser raises Exception itself, and sympy whatever its constructors meet
        return None


def compare_symbolic(answer: str, gold: str) -> Equality:
    """Decide whether two expressions are equal for all values of their variables.

    Expressions are evaluated at a few points, constants exactly. This decides most pairs without the costly `simplify`.
    Sets, relations and expressions without values go to math-verify, whose time is not bounded.
    """
    is_complex = any(_IMAGINARY.search(text) for text in (answer, gold))
    a, g = (parse_latex(text, is_complex=is_complex) for text in (answer, gold))
    if a is None or g is None:
        return Equality.UNPARSED
    if isinstance(a, sympy.Symbol) and isinstance(g, sympy.Symbol):
        # math-verify would ignore their case.
        return Equality.of(a.name.removeprefix("var") == g.name.removeprefix("var"))
    try:
        if isinstance(a, sympy.Expr) and isinstance(g, sympy.Expr):
            # If one of two constants is a decimal, they are compared within the tolerance, but integers exactly. A
            # computation with decimals, 2^{2009}-0.5, is exact.
            numbers = [parse_number(text) for text in (answer, gold)]
            is_rounded = any(number is not None and number.rounded for number in numbers)
            is_integer = is_rounded and any(_with_exact_decimals(each).doit().is_Integer for each in (a, g))
            if is_rounded and a.is_number and g.is_number and not is_integer:
                x, y = sympy.N(a), sympy.N(g)
                is_real = all(value.is_real and value.is_finite for value in (x, y))
                if is_real and math.isclose(float(x), float(y), rel_tol=REL_TOLERANCE):
                    return Equality.EQUAL
            agree = agree_at_points(a, g)
            if agree is not None:
                return Equality.of(agree)
        return Equality.of(
            sympy_expr_eq(g, a, _FLOAT_ROUNDING, _NUMERIC_PRECISION)
            or sympy_expr_eq(a, g, _FLOAT_ROUNDING, _NUMERIC_PRECISION)
        )
    except Exception:  # as above: sympy has no base class of its errors
        return Equality.UNPARSED


def agree_at_points(a: sympy.Expr, g: sympy.Expr) -> bool | None:
    """Return whether two expressions have equal values at a few points, or None if too few of the values exist.

    Rational values are compared exactly, other constants to 970 decimal places, values of formulas to 50.
    """
    a, g = (_with_exact_decimals(expression) for expression in (a, g))
    names = sorted(a.free_symbols | g.free_symbols, key=str)
    if len(names) > len(_POINTS[0]):
        return None
    agreements = 0
    for point in _POINTS:
        values = dict(zip(names, point, strict=False))
        x, y = (expression.evalf(_DIGITS, subs=values) for expression in (a, g))
        if not all(v.is_number and v.is_finite for v in (x, y)):
            continue
        # Where logarithms have no real value, which of their branches is meant depends on the spelling.
        if x.is_real is False and y.is_real is False and a.has(sympy.log):
            continue
        if abs(x - y) > max(_AGREEMENT * max(abs(x), abs(y)), 10.0**-_DIGITS):
            return False
        digits = _DECIMAL_DIGITS if names else _CONSTANT_DIGITS
        # One point is enough to tell formulas apart that agree to a few digits everywhere.
        if agreements == 0 and not _is_zero(a.subs(values) - g.subs(values), digits, max(abs(x), 1)):
            return False
        agreements += 1
        if not names:
            return True
    return True if agreements >= _MIN_AGREEMENTS else None


def sign_of_factor(answer: str, gold: str) -> int | None:
    """Return the sign of the number k with answer = k · gold, as k = 2 for `2x+4y-6` and `x+2y-3`.

    Returns None if there is no such number, and for constants, all of which are multiples of each other.
    """
    a, g = (parse_latex(text) for text in (answer, gold))
    if not isinstance(a, sympy.Expr) or not isinstance(g, sympy.Expr) or not (a.free_symbols and g.free_symbols):
        return None
    names = sorted(a.free_symbols | g.free_symbols, key=str)
    for point in _POINTS if len(names) <= len(_POINTS[0]) else ():
        values = dict(zip(names, point, strict=False))
        x, y = (_with_exact_decimals(expression).subs(values) for expression in (a, g))
        if all(v.is_number and v.is_finite and v.is_zero is False for v in (x, y)):
            ratio = x / y
            return int(sympy.sign(ratio)) if ratio.is_real and agree_at_points(a, ratio * g) else None
    return None


def solve_linear(text: str) -> str | None:
    r"""Solve an inequality, or a chain of two, for the one variable in which it is linear: `2x \leq 12` →
    `x \leq 6`. Return None for other texts.
    """
    parts = re.split(rf"({structure.RELATION})", text)
    terms, signs = [parse_latex(part) for part in parts[::2]], parts[1::2]
    names = {name for term in terms if isinstance(term, sympy.Expr) for name in term.free_symbols}
    if len(terms) not in (2, 3) or not all(isinstance(term, sympy.Expr) for term in terms) or len(names) != 1:
        return None
    terms = [terms[0] - terms[1], sympy.S.Zero] if len(terms) == 2 else terms
    place = len(terms) - 2
    if any(term.free_symbols for term in terms[:place] + terms[place + 1 :]):
        return None
    [name] = names
    offset, *others = (_with_exact_decimals(terms[place]).subs(name, value) for value in (0, 1))
    factor = others[0] - offset
    if not factor.is_real or factor.is_zero is not False or not agree_at_points(terms[place], factor * name + offset):
        return None
    signs = signs if factor.is_positive else [structure.TURNED[sign] for sign in signs]
    solved = [sympy.latex(name if index == place else (term - offset) / factor) for index, term in enumerate(terms)]
    return " ".join(itertools.chain(*itertools.zip_longest(solved, signs, fillvalue="")))


def _with_exact_decimals(expression: sympy.Expr) -> sympy.Expr:
    """Return an expression with decimals as fractions: 0.1 is one tenth, not the nearest binary number."""
    return expression.xreplace({number: sympy.Rational(str(number)) for number in expression.atoms(sympy.Float)})


def _is_rational(node: sympy.Basic) -> bool:
    """Return whether a node of an expression makes a rational number of rational numbers: no roots, π or functions."""
    if isinstance(node, sympy.Pow):
        return bool(node.exp.is_Integer)
    if isinstance(node, sympy.factorial):
        return bool(node.args[0].is_Integer)
    return isinstance(node, sympy.Rational | sympy.Add | sympy.Mul)


def _is_zero(difference: sympy.Expr, digits: int, size: sympy.Expr) -> bool:
    """Return whether the difference of two constants of a given size is 0: exactly if it is rational, otherwise to
    `digits` decimal places, without those that rounding may cost.
    """
    # Parsed terms are not evaluated. Not `is_zero` or `is_rational` of others, which multiply out powers of roots.
    if all(_is_rational(node) for node in sympy.preorder_traversal(difference)):
        return bool(difference.doit() == 0)
    maxn = digits + int(sympy.log(size, 10).evalf(15))
    return bool(abs(difference.evalf(15, maxn=maxn)) < sympy.Float(10) ** (_LOST_DIGITS - digits))

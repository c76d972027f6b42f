"""Answers that are numbers, as exact fractions."""

import math
import re
from dataclasses import dataclass
from fractions import Fraction

REL_TOLERANCE = 1e-4
# A larger power of ten is no measured number, and would be costly to hold.
MAX_EXPONENT = 400

_INT = r"\d+"
_DECIMAL = r"(?:\d{1,3}(?:[,\s]\d{3})+|\d+)(?:\.\d*)?"
_POWER = r"(?:10\s*\^\s*(?:\{\s*([+-]?\s*\d+)\s*\}|([+-]?\d+)))"
_SIGN = re.compile(r"^\s*([+-]?)\s*")
_FRACTION = re.compile(
    rf"\\frac\s*\{{\s*(-?[\d.]+)\s*\}}\s*\{{\s*(-?[\d.]+)\s*\}}|({_INT}(?:\.\d+)?)\s*/\s*({_INT}(?:\.\d+)?)"
)
_MIXED = re.compile(
    rf"({_INT})\s*\\frac\s*\{{\s*({_INT})\s*\}}\s*\{{\s*({_INT})\s*\}}|({_INT})\s+({_INT})\s*/\s*({_INT})"
)
_PLAIN = re.compile(rf"({_DECIMAL})")
_SCIENTIFIC = re.compile(rf"({_DECIMAL})\s*(?:[eE]\s*([+-]?\d+)|(?:\\cdot|x)\s*{_POWER})|{_POWER}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """`rounded`: it is written with a decimal point or a power of ten; `scientific`: with the latter."""

    value: Fraction
    rounded: bool
    scientific: bool = False

    @property
    def is_integer(self) -> bool:
        """A count: a number such as 4.5e33 is an integer only by its size."""
        return self.value.denominator == 1 and not self.scientific


def parse_number(text: str) -> Number | None:
    r"""`1,234.5`, `-\frac{1}{2}`, `3/4`, `2 1/2`, `4.5 \cdot 10^{33}`, `4.5e33`; None for anything else."""
    if len(text) > 100:
        return None
    sign = _SIGN.match(text)
    body = text[sign.end() :].strip() if sign else text
    number = _unsigned(body)
    if number is None or sign is None or sign[1] != "-":
        return number
    return Number(value=-number.value, rounded=number.rounded, scientific=number.scientific)


def _unsigned(text: str) -> Number | None:
    try:
        if match := _PLAIN.fullmatch(text):
            return Number(value=_decimal(match[1]), rounded="." in text)
        if match := _FRACTION.fullmatch(text):
            top, bottom = (match[1], match[2]) if match[1] else (match[3], match[4])
            return Number(value=Fraction(top) / Fraction(bottom), rounded="." in text)
        if match := _MIXED.fullmatch(text):
            whole, top, bottom = (int(group) for group in match.groups() if group)
            return Number(value=whole + Fraction(top, bottom), rounded=False)
        return _scientific(text)
    except (ValueError, ZeroDivisionError):
        return None


def _scientific(text: str) -> Number | None:
    match = _SCIENTIFIC.fullmatch(text)
    if match is None:
        return None
    mantissa, *exponents = match.groups()
    exponent = int(next(e for e in exponents if e).replace(" ", ""))
    if abs(exponent) > MAX_EXPONENT:
        return None
    value = _decimal(mantissa) if mantissa else Fraction(1)
    return Number(value=value * Fraction(10) ** exponent, rounded=True, scientific=True)


def _decimal(text: str) -> Fraction:
    return Fraction(re.sub(r"[,\s]", "", text).removesuffix("."))


def are_close(a: Number, b: Number) -> bool:
    """Exact equality; within 1e-4 relative if one is a rounded decimal and neither an integer."""
    if a.value == b.value:
        return True
    if a.is_integer or b.is_integer or not (a.rounded or b.rounded):
        return False
    return math.isclose(a.value, b.value, rel_tol=REL_TOLERANCE)


def are_loosely_close(a: Number, b: Number, *, percent_factors: bool) -> bool:
    """Integers exactly, other pairs within 1e-4 relative; `percent_factors`: also a factor of 100 apart."""
    factors = (Fraction(1), Fraction(1, 100), Fraction(100)) if percent_factors else (Fraction(1),)
    values = [b.value * factor for factor in factors]
    if a.value.denominator == 1 and b.value.denominator == 1:
        return a.value in values
    return any(math.isclose(a.value, value, rel_tol=REL_TOLERANCE) for value in values)

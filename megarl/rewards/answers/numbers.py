"""Parse answers that are numbers into exact fractions, and compare such numbers."""

import math
import re
from dataclasses import dataclass
from fractions import Fraction

REL_TOLERANCE = 1e-4
# A number with a larger power of ten is not plausible as an answer, and would be costly to hold.
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
    """A number in an answer, and how it is written.

    rounded: with a decimal point or a power of ten.
    scientific: with a power of ten.
    """

    value: Fraction
    rounded: bool
    scientific: bool = False

    @property
    def is_integer(self) -> bool:
        """Return whether the number is written as an integer; 4.5e33 is not, although its value is an integer."""
        return self.value.denominator == 1 and not self.scientific


def parse_number(text: str) -> Number | None:
    r"""Parse `1,234.5`, `-\frac{1}{2}`, `3/4`, `2 1/2`, `4.5 \cdot 10^{33}` or `4.5e33`; return None otherwise."""
    sign = _SIGN.match(text)
    if len(text) > 100 or sign is None:
        return None
    body = text[sign.end() :].strip()
    is_scientific = False
    try:
        if match := _PLAIN.fullmatch(body):
            value = _decimal(match[1])
        elif match := _FRACTION.fullmatch(body):
            top, bottom = (match[1], match[2]) if match[1] else (match[3], match[4])
            value = Fraction(top) / Fraction(bottom)
        elif match := _MIXED.fullmatch(body):
            whole, numerator, denominator = (int(group) for group in match.groups() if group)
            value = whole + Fraction(numerator, denominator)
        elif match := _SCIENTIFIC.fullmatch(body):
            mantissa, *exponents = match.groups()
            exponent = int(next(e for e in exponents if e).replace(" ", ""))
            if abs(exponent) > MAX_EXPONENT:
                return None
            value = (_decimal(mantissa) if mantissa else Fraction(1)) * Fraction(10) ** exponent
            is_scientific = True
        else:
            return None
    except (ValueError, ZeroDivisionError):
        return None
    # A mixed number has no decimal point, so a point in the body means a decimal.
    rounded = is_scientific or "." in body
    return Number(value=-value if sign[1] == "-" else value, rounded=rounded, scientific=is_scientific)


def _decimal(text: str) -> Fraction:
    return Fraction(re.sub(r"[,\s]", "", text).removesuffix("."))


def are_close(a: Number, b: Number) -> bool:
    """Return whether two numbers are equal, or within 1e-4 relative if one is a rounded decimal and none an integer."""
    if a.value == b.value:
        return True
    if a.is_integer or b.is_integer or not (a.rounded or b.rounded):
        return False
    return math.isclose(a.value, b.value, rel_tol=REL_TOLERANCE)

"""Parse answers that are numbers into exact fractions, and compare such numbers."""

import math
import re
from dataclasses import dataclass
from fractions import Fraction

REL_TOLERANCE = 1e-4
# A number with a larger power of ten is not plausible as an answer, and would be costly to hold.
MAX_EXPONENT = 400

_INT = r"\d+"
# Marks of thousands, of one kind throughout: 1,234,567; 1_234_567; 1.234.567; the Indian 12,34,567. Others are joined
# by `join_digits`.
_GROUPED = (
    r"[1-9]\d{0,2}(?:(?:,\d{3})+|(?:_\d{3})+|(?=\.\d{3}\.)(?:\.\d{3})+(?!\.?\d))"
    r"|[1-9]\d?(?:,\d\d)+,\d{3}"
)
_DECIMAL = rf"(?:{_GROUPED}|\d+)(?:\.\d*)?"
_POWER = r"(?:10\s*\^\s*(?:\{\s*([+-]?\s*\d+)\s*\}|([+-]?\d+)))"
_SIGN = re.compile(r"^\s*([+-]?)\s*")
_FRACTION = re.compile(
    rf"\\frac\s*\{{\s*(-?[\d.]+)\s*\}}\s*\{{\s*(-?[\d.]+)\s*\}}|({_INT}(?:\.\d+)?)\s*/\s*({_INT}(?:\.\d+)?)"
)
_MIXED = re.compile(
    rf"({_INT})\s*\\frac\s*\{{\s*({_INT})\s*\}}\s*\{{\s*({_INT})\s*\}}|({_INT})\s+({_INT})\s*/\s*({_INT})"
)
_SPACED_GROUPS = re.compile(r"(?<![\w.,'^])[1-9]\d{0,2}(?:(?: \d{3})+|(?:'\d{3})+)(?!\d|[ ']\d|'| ?/)")
_MIXED_INSIDE = re.compile(
    rf"(?<![\w.,^}}])(?<!\d\s)([1-9]\d*)(?:\s*\\frac\s*\{{\s*({_INT})\s*\}}\s*\{{\s*({_INT})\s*\}}|\s+({_INT})\s*/\s*({_INT}))(?![\d/^.])"
)
# The digits under a bar, between dots, or in brackets after the point, repeat for ever; so do 333 before dots.
_REPEATING = re.compile(
    r"(?<![\d.,])(?<!\d )(\d+)\.(?:(\d*)\\(?:overline|bar)\s*(?:\{\s*(\d+)\s*\}|(\d))|()\((\d+)\)"
    r"|(\d*)\\dot\s*\{?\s*(\d)\}?(?:(\d*)\\dot\s*\{?\s*(\d)\}?)?|(\d*?)(?:(?P<digit>\d)(?P=digit){2,}|(?P<period>\d{2,}?)(?P=period)+)"
    r"\s*\\ldots)(?!\s*[\d.(])"
)
_PLAIN = re.compile(rf"({_DECIMAL})")
_SCIENTIFIC = re.compile(rf"({_DECIMAL})(?:(?:e|\s*E\s*)([+-]?\d+)|\s*(?:\\cdot|x)\s*{_POWER})|{_POWER}")


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
            if numerator >= denominator:
                return None
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
    return Fraction(re.sub(r"[,_]" if text.count(".") < 2 else r"\.", "", text).removesuffix("."))


def join_digits(text: str) -> str:
    r"""Join numbers of several parts in a text: `1 234` and `1'234` → `1234`, `3 \frac{1}{2}` → `\frac{7}{2}`, and a
    repeating decimal to its fraction, `0.\overline{3}` → `\frac{3}{9}`.

    Other numbers side by side stay as they are: `20 22` is not a number.
    """
    if not any(character.isdigit() for character in text):
        return text
    text = _SPACED_GROUPS.sub(lambda match: re.sub("[ ']", "", match[0]), text)
    return _MIXED_INSIDE.sub(_improper, _REPEATING.sub(_repeated, text))


def _improper(match: re.Match[str]) -> str:
    whole, top, bottom = (int(group[:MAX_EXPONENT]) for group in match.groups() if group)
    return rf"\frac{{{whole * bottom + top}}}{{{bottom}}}" if top < bottom else match[0]


def _repeated(match: re.Match[str]) -> str:
    whole, *parts = (group for group in match.groups() if group is not None)
    # The period of 0.1\dot{4}28\dot{5} is in three groups.
    fixed, period = parts[0], "".join(parts[1:])
    if len(match[0]) > MAX_EXPONENT:
        return match[0]
    top = int(whole + fixed + period) - int(whole + fixed)
    return rf"\frac{{{top}}}{{{'9' * len(period)}{'0' * len(fixed)}}}"


def are_close(a: Number, b: Number) -> bool:
    """Return whether two numbers are equal, or within 1e-4 relative if one is a rounded decimal and none an integer."""
    if a.value == b.value:
        return True
    if a.is_integer or b.is_integer or not (a.rounded or b.rounded):
        return False
    return math.isclose(a.value, b.value, rel_tol=REL_TOLERANCE)

"""Detect answers that are cheap to write but costly or unsafe to evaluate with sympy, such as 9^9^9."""

import math
import re

MAX_EXPONENT = 10_000
MAX_FACTORIAL = 1_000
MAX_DIGITS = 50
MAX_DEPTH = 20
COMPUTATION = "asks for a computation"

# Commands that leave the computation to the scorer: repeating the question is not an answer to it.
_WORK = re.compile(
    r"\\(?:int|iint|oint|sum|prod|lim|limsup|liminf|det|gcd|lcm|min|max|sup|inf|deg|operatorname)(?![a-zA-Z])"
    r"|\\frac\s*\{\s*d(?:[^{}]|\{[^{}]*\})*\}\s*\{\s*d\s*\\?[a-zA-Z]|\\partial|\\bmod|\\pmod|\\mod(?![a-zA-Z])|\bmod\b"
)
_EXPONENT = re.compile(r"([\])}|!]?)\s*\^\s*(?:\{([^{}]*)\}|(\d+|.))")
# Refused are 2^3^4 and, within the braces of an exponent, powers of anything but a name: e^{x^2} is safe, 9^{9^9} not.
# x^2y^2 is not a chain.
_CHAINED_POWER = re.compile(r"\^\s*(?:[\d.]+|[a-zA-Z])\s*\^")
# Algebra would drop the base of 2516_8, the prime of f'(x), the dots of 7… and the T of a transposed matrix, subtract
# within a date, and sort the letters of an angle.
_DROPPED = re.compile(
    r"\d\s*_|['\"?]|\d\s*\$\s*\d|(?<!\d)\d{4}-\d\d-\d\d(?!\d)|\\(?:angle|triangle|[lc]?dots|phantom|models)(?![a-zA-Z])|\^\s*(?:\{\s*T\s*\}|T(?![a-zA-Z]))"
)
# A number after a factor, with nothing but spaces between, which the parser would multiply. Nobody knows
# what `20 22` or `x 2` mean. A mixed fraction is one number here, as `spelling.canonical` writes it.
_LETTERS = (
    "alpha|beta|gamma|delta|epsilon|varepsilon|theta|lambda|mu|nu|rho|sigma|tau|varphi|phi|psi|omega|pi|Gamma|Delta"
    "|Omega|infty|rfloor|rceil|degree"
)
_BESIDE = re.compile(
    rf"(?:\d\.?\s|[)\]}}]|(?<![\\a-zA-Z])[a-zA-Z]+|\\(?:{_LETTERS})(?![a-zA-Z]))\s*\.?\d"
    r"|(?<![\^_])\d\s*\\frac\s*\{\s*\d+\s*\}\s*\{\s*\d+\s*\}"
)
# Where digits follow as an argument.
_TAKES_NUMBER = re.compile(
    r"\\(?:log|ln|lg|exp|(?:arc)?(?:sin|cos|tan)h?|cot|sec|csc)\s*(?:[_^]\s*(?:\{[^{}]*\}|\w)\s*)+|\\sqrt\s*\[[^\]]*\]"
    r"|\\begin\s*\{[a-z]+\}(?:\s*\{[lcr|\s]*\})?"
)
_NO_SMALL_SUM = re.compile(r"[\^!*]|\\cdot|\\frac|\d\s*\(|\d\s+\d|[a-zA-Z)]\s*\(")
_POWER_OF_NUMBER = re.compile(r"[\d)}\]!]\s*\^")
_FACTORIAL = re.compile(r"(\d*)\s*(\)|\]|\}|[a-zA-Z])?\s*!")
_BINOMIAL_NUMBER = re.compile(r"\d{4,}")


def refusal(text: str) -> str | None:
    """Return the reason why an answer must not be evaluated, or None if it may be evaluated."""
    if _DROPPED.search(text):
        return "has a sign that algebra would drop"
    if numbers_side_by_side(text):
        return "has a number beside another factor"
    return COMPUTATION if _WORK.search(text) else costly(text)


def numbers_side_by_side(text: str) -> bool:
    r"""Return whether a number follows another factor with only spaces between, as in `20 22` or `\frac{2 3}{7}`."""
    return _BESIDE.search(_TAKES_NUMBER.sub(r"\g<0>;", text)) is not None


def costly(text: str) -> str | None:
    """Return the reason why a text may take long to evaluate, or None if it does not.

    Limits on nesting, powers and factorials bound the size of the numbers that an evaluation can produce.
    """
    depth = deepest = 0
    for character in text:
        depth += (character in "({[") - (character in ")}]")
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH:
        return "nested too deeply"
    if _has_large_power(text):
        return "power too large"
    if _has_large_factorial(text):
        return "factorial too large"
    return None


def _has_large_power(text: str) -> bool:
    if "^" not in text:
        return re.search(rf"\d{{{4 * MAX_DIGITS},}}", text) is not None
    if re.search(rf"\d{{{MAX_DIGITS + 1},}}", text) or _CHAINED_POWER.search(text):
        return True
    for match in re.finditer(r"\^\s*\{", text):
        depth, end = 1, match.end()
        while end < len(text) and depth:
            depth += (text[end] == "{") - (text[end] == "}")
            end += 1
        # The closing brace does not belong to the power.
        if _POWER_OF_NUMBER.search(text[match.end() : end - (depth == 0)]):
            return True
    largest, stacked = 1, 1
    for bracket, braced, single in _EXPONENT.findall(text):
        size = math.prod(int(digits[:10]) or 1 for digits in re.findall(r"\d+", braced or single))
        # A power of a bracket may be the power of a power.
        largest, stacked = (largest, stacked * size) if bracket else (max(largest, size), stacked)
        if largest * stacked > MAX_EXPONENT:
            return True
    return False


def _has_large_factorial(text: str) -> bool:
    if r"\binom" in text and _BINOMIAL_NUMBER.search(text):
        return True
    if r"\Gamma" in text or re.search(r"!\s*[)}\]]*\s*!", text):
        return True
    for match in _FACTORIAL.finditer(text):
        digits, closing = match.groups()
        if closing and closing in ")]}":
            inside = _bracket_before(text, match.end(2) - 1)
            numbers = [int(number[:10]) for number in re.findall(r"\d+", inside)]
            # Only sums of small numbers and names.
            if sum(numbers) > MAX_FACTORIAL or _NO_SMALL_SUM.search(inside):
                return True
        elif digits and (len(digits) > 4 or int(digits) > MAX_FACTORIAL):
            return True
    return False


def _bracket_before(text: str, end: int) -> str:
    """Return what stands between the bracket that closes at `end` and the one that opens it."""
    depth, start = 0, end
    while start >= 0:
        depth += (text[start] in ")]}") - (text[start] in "([{")
        if depth == 0:
            return text[start + 1 : end]
        start -= 1
    return text[:end]

r"""One spelling of answers: Unicode, spacing, delimiters and wrappers go, the mathematics stays as it is."""

import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence

from megarl.rewards.answers.normalise import brace_fractions

_UNICODE: Mapping[int, str] = str.maketrans(
    {
        "−": "-",
        "–": "-",
        "×": r"\cdot ",
        "∙": r"\cdot ",
        "·": r"\cdot ",
        "⋅": r"\cdot ",
        "÷": "/",
        "⁄": "/",
        "π": r"\pi ",
        "∞": r"\infty ",
        "√": r"\sqrt ",
        "±": r"\pm ",
        "∓": r"\mp ",
        "≤": r"\leq ",
        "≥": r"\geq ",
        "≠": r"\neq ",
        "≈": r"\approx ",
        "∪": r"\cup ",
        "∩": r"\cap ",
        "∈": r"\in ",
        "∅": r"\emptyset ",
        "ℝ": r"\mathbb{R}",
        "θ": r"\theta ",
        "α": r"\alpha ",
        "β": r"\beta ",
        "λ": r"\lambda ",
        "°": r"^{\circ}",
        "،": ",",
        "、": ",",
        "。": ".",
        "′": "'",
        "⟨": r"\langle ",
        "⟩": r"\rangle ",
    }
)
_SUPERSCRIPT = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_WRAPPERS = r"text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mathsf|mbox|operatorname|emph|bm|boldsymbol"
_FUNCTIONS = r"arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|ln|log|exp"
_GREEK = r"pi|theta|alpha|beta|gamma|lambda|infty"
_SIZES = r"left|right|middle|[bB]igg?[lrm]?|displaystyle|textstyle|limits"

Step = Callable[[str], str]


def _sub(pattern: str, replacement: str) -> Step:
    compiled = re.compile(pattern)
    return lambda text: compiled.sub(replacement, text)


def _from_unicode(text: str) -> str:
    """ASCII digits of any script, and LaTeX for the mathematical signs."""
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda m: f"^{{{m[0].translate(_SUPERSCRIPT)}}}", text)
    text = unicodedata.normalize("NFKC", text.translate(_UNICODE)).translate(_UNICODE)
    return "".join(str(unicodedata.decimal(c)) if c.isdecimal() else c for c in text)


def _unwrap(text: str) -> str:
    r"""`\text{ cm}` → ` cm `, from the inside out."""
    pattern = re.compile(rf"\\(?:{_WRAPPERS})\s*\{{([^{{}}]*)\}}")
    while (unwrapped := pattern.sub(r" \1 ", text)) != text:
        text = unwrapped
    return text


def _strip_marks(text: str) -> str:
    """Spaces and the full stop, comma, colon or semicolon at either end."""
    return re.sub(r"(?<!\\)[.,:;\s]+$", "", re.sub(r"^[,:;\s]+", "", text))


def _strip_braces(text: str) -> str:
    """`{5}` → `5`, if the first brace closes at the end."""
    while re.fullmatch(r"\{[^{}]*\}", text):
        text = text[1:-1].strip()
    return text


_STEPS: Sequence[Step] = (
    _from_unicode,
    _sub(r"\\\$", "$"),
    _sub(r"(?<!\\)\\[()\[\]]", " "),
    _sub(r"\$(?!\s*-?[\d.]+(?:[,\d. ]|\\%|\s*(?:thousand|million|billion))*$)", " "),
    _sub(r"(?<!\\)\\[,;:!> ]|~|\\q?quad(?![a-zA-Z])|\\space(?![a-zA-Z])", " "),
    _sub(rf"\\(?:{_SIZES})(?![a-zA-Z])", ""),
    _unwrap,
    _sub(r"\{,\}", ","),
    _sub(r"\\[dtc]frac", r"\\frac"),
    _sub(r"\\%", "%"),
    _sub(
        r"\^\s*(?:\{\s*\\(?:circ|degree)\s*\}|\\circ(?![a-zA-Z]))|\\degree(?![a-zA-Z])|\\circ(?![a-zA-Z])", " degree "
    ),
    _sub(r"\\(?:times|ast|cdotp|bullet)(?![a-zA-Z])", r"\\cdot "),
    _sub(r"\*\*", "^"),
    _sub(r"\*", r"\\cdot "),
    _sub(r"\\(?:le|leqslant)(?![a-zA-Z])|<=", r"\\leq "),
    _sub(r"\\(?:ge|geqslant)(?![a-zA-Z])|>=", r"\\geq "),
    _sub(r"\\ne(?![a-zA-Z])|!=", r"\\neq "),
    _sub(r"\\lt(?![a-zA-Z])", "<"),
    _sub(r"\\gt(?![a-zA-Z])", ">"),
    _sub(r"\\lbrace(?![a-zA-Z])", r"\\{"),
    _sub(r"\\rbrace(?![a-zA-Z])", r"\\}"),
    _sub(r"\\langle(?![a-zA-Z])", "("),
    _sub(r"\\rangle(?![a-zA-Z])", ")"),
    _sub(r"\\[lr]vert(?![a-zA-Z])|\\vert(?![a-zA-Z])|\\mid(?![a-zA-Z])", "|"),
    _sub(r"\\varnothing(?![a-zA-Z])|\\\{\s*\\\}", r"\\emptyset"),
    _sub(r"(?<![\\a-zA-Z])(?:infinity|inf|oo)(?![a-zA-Z])|\\infinity", r"\\infty"),
    _sub(rf"(?<![\\a-zA-Z])({_FUNCTIONS})(?=\s*[(\d^_{{]|\s+[a-zA-Z\\])", r"\\\1 "),
    _sub(rf"(?<![\\a-zA-Z])({_GREEK})(?![a-zA-Z])", r"\\\1 "),
    _sub(r"(?<![\\a-zA-Z])sqrt", r"\\sqrt"),
    _sub(r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    _sub(r"\\sqrt\s*(\w)", r"\\sqrt{\1}"),
    brace_fractions,
    _sub(r"(?<![\d.])\.(?=\d)", "0."),
    _strip_marks,
    _strip_braces,
    _sub(r"\s+", " "),
)


def canonical(text: str) -> str:
    r"""`$\dfrac12\,\text{cm}$` → `\frac{1}{2} cm`, `x × ２` → `x \cdot 2`, `90°` → `90 degree`."""
    for step in _STEPS:
        text = step(text)
    return text.strip()


def compact(text: str) -> str:
    """Without spaces but those between digits, where they tell `2 3` from `23`, or that separate words."""
    return re.sub(r"(?<![\w])\s+|\s+(?![\w])", "", text)

"""Unify the spelling of answers: `canonical` keeps the mathematics, while `normalise` also drops units and words."""

import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TypeAlias

from megarl_answers.numbers import join_digits
from megarl_answers.units import UNIT_OF_LETTER

# Signs, and the command or character that each means.
_UNICODE: Mapping[int, str] = str.maketrans(
    {
        sign: f"{command} "
        for signs, command in re.findall(
            r"([^\s\\]+)(\\\S+)",
            r"×∙·⋅\cdot ⌊\lfloor ⌋\rfloor ⌈\lceil ⌉\rceil π\pi ∞\infty ±\pm ∓\mp ≤⩽≦≲\leq ≥⩾≧≳\geq ⇒⟹→\Rightarrow "
            r"∴\therefore ∨\lor ∖\setminus ≠\neq ≈\approx ∪\cup ∩\cap ∈\in ∅\emptyset ℝ\mathbb{R} ℤ\mathbb{Z} "
            r"ℕ\mathbb{N} ℚ\mathbb{Q} ℂ\mathbb{C} θ\theta α\alpha β\beta γ\gamma δ\delta λ\lambda ρ\rho σ\sigma "
            r"φ\phi ω\omega Δ\Delta ⟨\langle ⟩\rangle",
        )
        for sign in signs
    }
    | dict(zip("−–‐‑‘’′“”„«»÷⁄∶،、。", '----\'\'\'"""""//:,,.', strict=True))
    | dict.fromkeys("º°", r"^{\circ}")
)
_SUPERSCRIPT = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
# A number that only one spelling has.
_PLAIN = re.compile(r"-?[1-9]\d*(?:\.\d+)?", re.ASCII)
# They print nothing, but part what they stand between.
_INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u202a-\u202e\u2060\ufeff]")
_VULGAR_FRACTION = re.compile("[¼-¾⅐-⅞]")
_WRAPPERS = (
    r"text|textbf|textit|textrm|textnormal|textsf|texttt|mathrm|mathbf|mathit|mathsf|mathtt|mbox|operatorname|emph|bm"
    r"|boldsymbol|underline|boxed|fbox"
)
# Colours change nothing; what is coloured stays, in its braces.
_COLOURS = r"\\(?:(?:text)?color(?:box)?|fcolorbox\s*\{[^{}]*\})\s*\{[^{}]*\}"
# Emphasis of Markdown, and quotation marks, around the whole answer.
_EMPHASIS = re.compile(r"(\*{1,3}|__|_|`|\"|')(?=\S)((?:(?!\1).)+)(?<=\S)\1", re.DOTALL)
_FUNCTIONS = r"arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|ln|log|exp"
_GREEK = r"pi|theta|alpha|beta|gamma|lambda|infty"
_SIZES = r"left|right|middle|[bB]igg?[lrm]?|displaystyle|textstyle|limits|large|Large|LARGE|huge|Huge|bf|bfseries"
_UNWRAPPED = re.compile(rf"\\(?:{_WRAPPERS})\s*\{{((?:[^{{}}]|\{{[^{{}}]*\}})*)\}}")
# Upright, a single letter after a number, root or π is a unit's symbol, not a variable.
_UPRIGHT_UNIT = re.compile(
    rf"(?:(?<=[\d)}}])|(?<=\\pi))\s*\\(?:text|textrm|textnormal|mathrm|mbox)\s*\{{\s*([{''.join(UNIT_OF_LETTER)}])\s*\}}"
    r"(?!\s*[\^_/\d])"
)

# `\frac12` → `\frac{1}{2}`, `\frac{1}2` → `\frac{1}{2}`.
_ARGUMENT = rf"\s*([^\s{{\\]|\\(?:{_GREEK}|phi|rho|sigma|omega|mu)(?![a-zA-Z]))"
_FRACTIONS = (
    (rf"\\frac{_ARGUMENT}", r"\\frac{\1}"),
    (rf"(\\frac\{{(?:[^{{}}]|\{{[^{{}}]*\}})*\}}){_ARGUMENT}", r"\1{\2}"),
)


Replacement: TypeAlias = str | Callable[[re.Match[str]], str]


# `\hat{i}`, `\mathbf{j}`, `\hat{\imath}`, `\vec k`.
_UNIT_VECTOR = (
    r"\\(?:hat|vec|mathbf|boldsymbol|bm)\s*\{?\s*(?:\\(?:hat|mathbf|boldsymbol|mathrm|bm)\s*\{?\s*)?(?:\\([ij])math|([ijk]))"
    r"(?![a-zA-Z])\s*\}{0,2}"
)


def _components(vector: re.Match[str]) -> str:
    found: dict[str, str] = {}
    for sign, factor, *names in re.findall(rf"([+-]?)([^+\-=]*?){_UNIT_VECTOR}", vector[1]):
        name = "".join(names)
        if name in found:
            return vector[0]
        found[name] = f"{sign.strip('+')}{factor.strip() or '1'}"
    return f"({', '.join(found.get(name, '0') for name in ('ijk' if 'k' in found else 'ij'))})"


def _lines(system: re.Match[str]) -> str:
    return ", ".join(line.strip() for line in re.split(r"\\\\", system[2].replace("&", "")) if line.strip())


def _ends_of_interval(interval: re.Match[str]) -> str:
    opening, inside, closing = interval.groups()
    if (opening, closing) in (("[", "]"), ("]", "[")) and opening == "[":
        return interval[0]
    return f"{'(' if opening == ']' else '['}{inside}{')' if closing == '[' else ']'}"


def _of_commands(pattern: str) -> bool:
    r"""Return whether a pattern matches only texts with a backslash: each of its alternatives begins with one."""
    pattern = pattern.replace(r"\\", "\0")
    while (without := _GROUP.sub("", pattern)) != pattern:
        pattern = without
    return all(re.match(r"\0(?![?*])", alternative) for alternative in pattern.split("|"))


def _marked(*rows: tuple[str, Replacement]) -> tuple[tuple[re.Pattern[str], Replacement, bool], ...]:
    return tuple((re.compile(pattern), replacement, _of_commands(pattern)) for pattern, replacement in rows)


def _compiled(*rows: tuple[str, Replacement]) -> tuple[tuple[re.Pattern[str], Replacement], ...]:
    return tuple((re.compile(pattern), replacement) for pattern, replacement in rows)


# In a pattern: a set of characters, or a group without others in it.
_GROUP = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]|(?<!\\)\((?:\\.|[^()\[\\])*\)")
_ORDINAL = re.compile(r"\d+(?:st|nd|rd|th)")
# These separate the equations of a text.
_BETWEEN_EQUATIONS = re.compile(r"\\q?quad(?![a-zA-Z])|\\\\(?!\[)")
# Patterns and their replacements; the order is part of the definition of both spellings.
_DELIMITERS = _marked(
    (r"\.{3,}", r"\\ldots "),
    # Struck out in Markdown.
    (r"~~", r"\\sout "),
    # Spelled thus, these are marks of thousands wherever they stand; a comma alone may separate elements.
    (r"(?<=\d)(?:,\s*\\!\s*|\{,\})(?=\d{3}(?!\d))", ""),
    # A comma before one or two digits is a point.
    (r"(?<=\d)\{,\}(?=\d\d?(?!\d))", "."),
    (r"\\\$", "$"),
    # Commands that print a number of an equation, or say that a proof ends.
    (r"\\tag\*?\s*\{[^{} ]{0,8}\}|\\label\s*\{[^{}]*\}|\\(?:blacksquare|checkmark|qed|square)(?![a-zA-Z])", " "),
    (r"\{:\}|\\colon(?![a-zA-Z])", ":"),
    (r"\\(?:mathbf|mathds|Bbb|bf)\s*\{?\s*([RZNQC])(?![a-zA-Z])\s*\}?", r"\\mathbb{\1}"),
    (r"\\(vec|mathrm|mathbf|mathit|mathsf)\s+(\w)(?!\w)", r"\\\1{\2}"),
    # A sum of unit vectors, as a tuple.
    (rf"^\s*(?:[^=]*=\s*)?((?:\s*[+-]?[^+\-=]*?{_UNIT_VECTOR})+)\s*$", _components),
    # The lines of a system of equations.
    (r"\\begin\s*\{(cases|aligned|align\*?|gathered|split)\}(.*?)\\end\s*\{\1\}", _lines),
    # Open ends of intervals, as they are written in French.
    (r"([\[\]])([^\[\]()]*[,;][^\[\]()]*)([\[\]])", _ends_of_interval),
    (r"(?<!\\)\\[()\[\]]", " "),
    (r"\$(?!\s*-?[\d.]+(?:[,\d. ]|\\%|\s*(?:thousand|million|billion))*$)", " "),
    (r"(?<!\\)\\[,;:!> ]|~|\\space(?![a-zA-Z])", " "),
    # Two spaces, which do not mark thousands.
    (r"\\(?:q?quad|enspace|enskip)(?![a-zA-Z])|\\[hm]s(?:kip|pace\*?)\s*(?:\{[^{}]*\}|-?[\d.]+\s*[a-z]{2})", "  "),
    (r"\\(?:neg)?(?:thin|med|thick)space(?![a-zA-Z])|\\nobreakspace(?![a-zA-Z])", " "),
    # Outside of LaTeX, the root is of the whole number.
    (r"(?:√|(?<![\\a-zA-Z])sqrt)\s*(\d+(?:\.\d+)?)", r"\\sqrt{\1}"),
    ("√", r"\\sqrt "),
    (r"∛\s*(\d+|[a-zA-Z])", r"\\sqrt[3]{\1}"),
    (r"(?<=\d)\s*‰", r" \\cdot 10^{-3}"),
    # A bracket that is not printed, and a line that ends the answer.
    (r"\\(?:left|right)\s*\.|\\\\\s*$", " "),
    (rf"\\(?:{_SIZES})(?![a-zA-Z])", ""),
    (r"\\big(cup|cap)(?![a-zA-Z]|\s*_)", r"\\\1"),
    (_COLOURS, ""),
)
_SYMBOLS = _marked(
    (r"\{,\}", ","),
    (r"\\(?:[dtcs]|nice)frac", r"\\frac"),
    (r"\\[dt]?binom\s*(\d)\s*(\d)", r"\\binom{\1}{\2}"),
    (r"\{\}_\s*\{?(\w+)\}?\s*C_\s*\{?(\w+)\}?|(?<![\w\\])(\w+)\s+choose\s+(\w+)", r"\\binom{\1\3}{\2\4}"),
    (r"\\log\s*_\s*(?:\{\s*e\s*\}|e)(?![a-zA-Z])", r"\\ln "),
    (r"\\%", "%"),
    (r"\\mathbb\s*([A-Z])", r"\\mathbb{\1}"),
    (r"(?<!\()(?:\\p?|(?<=\d)\s+)mod(?![a-zA-Z])\s*(?:\{([^{}]*)\}|(\w+))", r" (mod \1\2)"),
    (r"(?<=[\dA-F])\s*\(?\s*(?:in\s+)?base[\s-]+(\w+)\s*\)?\s*$", r"_{\1}"),
    (r"(?<=\d)\s*(?:\^\s*\{?\s*)?(st|nd|rd|th)(?![a-zA-Z])(?:\s*\})?", r"\1"),
    (r"^\s*(?:minus|negative)\s+(?=\d)", "-"),
    (r"^\s*([a-zA-Z])\s*:\s*([a-zA-Z])\s*\\mapsto(?![a-zA-Z])", r"\1(\2)="),
    (r"\\(?:implies|(?:Long|long)?[Rr]ightarrow)(?![a-zA-Z])", r"\\to "),
    (
        r"\^\s*(?:\{\s*(?:\\(?:circ|degree)|o)\s*\}|\\circ(?![a-zA-Z]))|\\degree(?![a-zA-Z])|\\circ(?![a-zA-Z])",
        " degree ",
    ),
    (r"\\(?:times|ast|cdotp|bullet)(?![a-zA-Z])", r"\\cdot "),
    (r"\*\*", "^"),
    (r"\*", r"\\cdot "),
    (r"\\(?:le|leqslant|leqq)(?![a-zA-Z])|<=", r"\\leq "),
    (r"\\(?:ge|geqslant|geqq)(?![a-zA-Z])|>=", r"\\geq "),
    (r"\\ne(?![a-zA-Z])|!=", r"\\neq "),
    (r"\\lt(?![a-zA-Z])", "<"),
    (r"\\gt(?![a-zA-Z])", ">"),
    (r"\\backslash(?![a-zA-Z])", r"\\setminus "),
    (r"(?<=\\mathbb\{R\})\s*-\s*(?=\\\{)", r" \\setminus "),
    (r"all real(?: number)?s except\s+(?:for\s+)?(\S+)\s*$", r"\\mathbb{R} \\setminus \\{\1\\}"),
    (r"(?<![a-zA-Z])(?:the\s+)?square\s+root\s+of\s+(\d+|[a-z](?![a-z]))", r"\\sqrt{\1}"),
    (r"(?<![a-zA-Z])(?:the\s+)?cube\s+root\s+of\s+(\d+|[a-z](?![a-z]))", r"\\sqrt[3]{\1}"),
    # Between equations and bounds, these are words.
    (r"(?<=\d)\s*\\(?:lor|vee)(?=\s*\\?[a-zA-Z\d])", " or "),
    (r"(?<=\d)\s*(?:\\(?:land|wedge)|\\&)(?=\s*-?[a-zA-Z\d])", " and "),
    (r"\\lbrace(?![a-zA-Z])", r"\\{"),
    (r"\\rbrace(?![a-zA-Z])", r"\\}"),
    (r"\\langle(?![a-zA-Z])", "("),
    (r"\\rangle(?![a-zA-Z])", ")"),
    (r"\\[lr]vert(?![a-zA-Z])|\\vert(?![a-zA-Z])|\\mid(?![a-zA-Z])", "|"),
    (r"\\varnothing(?![a-zA-Z])|\\\{\s*\\\}", r"\\emptyset"),
    (r"(?<![\\a-zA-Z])(?:infinity|inf|oo)(?![a-zA-Z])|\\infinity", r"\\infty"),
    (rf"(?<![\\a-zA-Z])({_FUNCTIONS})(?=\s*[(\d^_{{]|\s+[a-zA-Z\\])", r"\\\1 "),
    (rf"(?<![\\a-zA-Z])({_GREEK})(?![a-zA-Z])", r"\\\1 "),
    (r"(?<![\\a-zA-Z])sqrt", r"\\sqrt"),
    (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"\\sqrt\s*(\[\w+\])?\s*(\w)", r"\\sqrt\1{\2}"),
    *_FRACTIONS,
    # Braces around digits part nothing: 20{}22 is 2022.
    (r"^\{(\d+)\}(?=[\d{])", r"\1"),
    (r"(?<=\d)(?<![\^_]\d)\{(\d*)\}", r"\1"),
    (r"\\(?:dots[bcimo]?|cdots)(?![a-zA-Z])", r"\\ldots "),
    (r"(?<![\d.])\.(?=\d|\\(?:overline|bar|dot)(?![a-zA-Z]))", "0."),
    # Punctuation around an answer.
    (r"^[,:;=\s]+", ""),
    (r"(?<!\\)[.,:;\s]+$", ""),
)
_BEFORE_UNIT = _compiled(
    (r"\n", ""),
    (r"\.+\Z", ""),
    (r"\\!", ""),
    (r"\\ ", ""),
    (r"\\\\", r"\\"),
    (r"\\[td]frac", r"\\frac"),
    (r"\\left", ""),
    (r"\\right", ""),
)
_AFTER_UNIT = _compiled(
    *((re.escape(word), "") for word in (r"^{\circ}", r"^\circ", "$", r"\$", r"\text", r"x\in", r"\%", "%", r"\cdot")),
    ("and", ""),
    (r"\\mathbf", ""),
    (r"\\mbox\{[^{}]*\}", ""),
    (r" \.", " 0."),
    (r"\{\.", "{0."),
    (r"infinity|(?<!\\)inf(?!ty)", r"\\infty"),
)
_DECIMALS = _compiled((r"(\d+)\.0+(?!\d)", r"\1"), (r"^\.", "0."))
_AFTER_NAME = _compiled(
    (r"\\sqrt(\w)", r"\\sqrt{\1}"), (" ", ""), *_FRACTIONS, (r"^(-?\d+)/(-?\d+)$", r"\\frac{\1}{\2}")
)


@lru_cache(maxsize=4096)
def canonical(text: str) -> str:
    r"""Return an answer in one spelling of many equivalent ones, without changing its mathematics.

    Unicode signs become LaTeX; delimiters, sizes and text wrappers are removed: `$\dfrac12\,\text{cm}$` →
    `\frac{1}{2} cm`, `x × ２` → `x \cdot 2`, `90°` → `90 degree`, `1^{st}` → `1th`. Commas separate several
    equations. Numbers written in several parts become one: see `numbers.join_digits`.
    """
    if _PLAIN.fullmatch(text):
        return text
    if not text.isascii():
        text = _INVISIBLE.sub(" ", text).translate(_UNICODE)
    text = text.strip()
    while emphasised := _EMPHASIS.fullmatch(text):
        text = emphasised[2]
    if not text.isascii():
        text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda match: f"^{{{match[0].translate(_SUPERSCRIPT)}}}", text)
        text = re.sub("[₀-₉]+", lambda match: f"_{{{unicodedata.normalize('NFKC', match[0])}}}", text)
        text = _VULGAR_FRACTION.sub(_spelled_fraction, text)
        text = unicodedata.normalize("NFKC", text.translate(_UNICODE)).translate(_UNICODE)
        text = "".join(str(unicodedata.decimal(c)) if c.isdecimal() else c for c in text)
    if text.count("=") > 1 and r"\begin" not in text:
        text = _BETWEEN_EQUATIONS.sub(", ", text)
    text = _rewritten(text, _DELIMITERS)
    if "\\" in text:
        text = _UPRIGHT_UNIT.sub(lambda match: f" {UNIT_OF_LETTER[match[1]]} ", text)
    # Innermost first: `\text{ cm}` → ` cm `.
    while "\\" in text and (unwrapped := _UNWRAPPED.sub(r" \1 ", text)) != text:
        text = unwrapped
    text = _rewritten(text, _SYMBOLS)
    while re.fullmatch(r"\{[^{}]*\}", text):
        text = text[1:-1].strip()
    text = re.sub(r"\s+", " ", join_digits(text)).strip()
    return f"{text[:-2]}th" if _ORDINAL.fullmatch(text) else text


def _rewritten(text: str, rows: Sequence[tuple[re.Pattern[str], Replacement, bool]]) -> str:
    for pattern, replacement, is_command in rows:
        if (not is_command or "\\" in text) and pattern.search(text):
            text = pattern.sub(replacement, text)
    return text


def _spelled_fraction(sign: re.Match[str]) -> str:
    top, bottom = unicodedata.normalize("NFKC", sign[0]).split("⁄")
    return rf" \frac{{{top}}}{{{bottom}}} " if bottom else sign[0]


def compact(text: str) -> str:
    """Remove spaces, and braces around an exponent or index of one symbol: `x^{2} + 1` → `x^2+1`.

    Spaces between words, digits and points stay, so that `2 3` differs from `23`.
    """
    text = re.sub(r"([_^])\{\s*(\w|\\[a-zA-Z]+)\s*\}\s*", r"\1\2 ", text)
    return re.sub(r"(?<![\w.])\s+|\s+(?![\w.])", "", text)


# Accents within a word; a letter alone is a symbol: 10 Å is not 10 A.
_ACCENT = re.compile("(?<=[A-Za-z]{2})[\u0300-\u036f]+|(?<=[A-Za-z])[\u0300-\u036f]+(?=[A-Za-z])")


def without_accents(text: str) -> str:
    """Remove the accents of words, which many keyboards lack: `García` → `Garcia`."""
    return text if text.isascii() else _ACCENT.sub("", unicodedata.normalize("NFD", text))


def normalise(text: str) -> str:
    r"""Remove units, spaces, sizes and signs from an answer: `x=7.00 \text{ cm}` → `7`, `3/4` → `\frac{3}{4}`.

    The modes `doc` and `ref` compare answers as strings after this function.
    """
    text = text.strip()
    for pattern, replacement in _BEFORE_UNIT:
        text = pattern.sub(replacement, text)
    # `5 \text{ cm}` → `5`; an answer that is nothing but text stays.
    text = re.sub(r"\\text\s*\{[^{}]*\}$", "", text).strip() or text
    for pattern, replacement in _AFTER_UNIT:
        text = pattern.sub(replacement, text)
    if "i" not in text:
        text = text.replace("j", "i")
    for pattern, replacement in _DECIMALS:
        text = pattern.sub(replacement, text)
    # `x=5` → `5`: a name of at most two characters before the only equals sign.
    name, _, value = text.partition("=")
    if text.count("=") == 1 and len(name.strip()) <= 2:
        text = value
    for pattern, replacement in _AFTER_NAME:
        text = pattern.sub(replacement, text)
    return text


def is_equiv(answer: str | None, gold: str | None, *, none_equals_none: bool = False) -> bool:
    r"""Return whether two answers are equal strings after `normalise`. 0.5 equals 1/2, and `\text{ ` begins a unit."""
    if answer is None or gold is None:
        return none_equals_none and answer is gold
    normal = []
    for text in (answer, gold):
        before = text.split(r"\text{ ", 1)[0]
        normal.append(normalise(before if before.strip() else text))
    first, second = (r"\frac{1}{2}" if text == "0.5" else text for text in normal)
    return first == second

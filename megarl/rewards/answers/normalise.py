r"""Answers as plain strings: the textual normalisation of the modes `doc` and `ref`, and of strict comparison."""

import re
from collections.abc import Callable, Sequence

Step = Callable[[str], str]


def _delete(*texts: str) -> Step:
    def step(text: str) -> str:
        for unwanted in texts:
            text = text.replace(unwanted, "")
        return text

    return step


def _replace(pattern: str, replacement: str) -> Step:
    compiled = re.compile(pattern)
    return lambda text: compiled.sub(replacement, text)


def brace_fractions(text: str) -> str:
    r"""`\frac12` → `\frac{1}{2}`, `\frac{1}2` → `\frac{1}{2}`."""
    text = re.sub(r"\\frac\s*([^\s{\\])", r"\\frac{\1}", text)
    return re.sub(r"(\\frac\{[^{}]*\})\s*([^\s{\\])", r"\1{\2}", text)


def _drop_text_unit(text: str) -> str:
    r"""`5 \text{ cm}` → `5`; an answer that is nothing but text stays."""
    kept = re.sub(r"\\text\s*\{[^{}]*\}$", "", text).strip()
    return kept if kept and kept != text else text


def _imaginary(text: str) -> str:
    return text.replace("j", "i") if "j" in text and "i" not in text else text


def _drop_prefix(text: str) -> str:
    """`x=5` → `5`: a name of at most two characters before the only equals sign."""
    name, _, value = text.partition("=")
    return value if text.count("=") == 1 and len(name.strip()) <= 2 else text


# The order is part of the definition.
_STEPS: Sequence[Step] = (
    _delete("\n"),
    lambda text: text.rstrip("."),
    _delete(r"\!", r"\ "),
    _replace(r"\\\\", r"\\"),
    _replace(r"\\[td]frac", r"\\frac"),
    _delete(r"\left", r"\right"),
    _drop_text_unit,
    _delete(r"^{\circ}", r"^\circ", "$", r"\$", r"\text", r"x\in", r"\%", "%", r"\cdot", "and", r"\mathbf"),
    _replace(r"\\mbox\{[^{}]*\}", ""),
    _replace(r" \.", " 0."),
    _replace(r"\{\.", "{0."),
    _replace(r"infinity|(?<!\\)inf(?!ty)", r"\\infty"),
    _imaginary,
    _replace(r"(\d+)\.0+(?!\d)", r"\1"),
    _replace(r"^\.", "0."),
    _drop_prefix,
    _replace(r"\\sqrt(\w)", r"\\sqrt{\1}"),
    _delete(" "),
    brace_fractions,
    _replace(r"^(-?\d+)/(-?\d+)$", r"\\frac{\1}{\2}"),
)


def normalise(text: str) -> str:
    r"""Text with units, spaces, sizes and signs dropped: `x=7.00 \text{ cm}` → `7`, `3/4` → `\frac{3}{4}`."""
    text = text.strip()
    for step in _STEPS:
        text = step(text)
    return text


def is_equiv(answer: str | None, gold: str | None, *, none_equals_none: bool = False) -> bool:
    """Equality of normalised strings, also 0.5 = 1/2: for answers that have one way to be written."""
    if answer is None or gold is None:
        return none_equals_none and answer is gold
    return _strict(answer) == _strict(gold)


def _strict(text: str) -> str:
    r"""`normalise` with everything from `\text{ ` on taken for a unit."""
    before = text.split(r"\text{ ", 1)[0]
    normal = normalise(before if before.strip() else text)
    return r"\frac{1}{2}" if normal == "0.5" else normal

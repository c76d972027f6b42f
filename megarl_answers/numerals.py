"""Read numbers that are spelled in words, such as `thirty-six` or `two and three quarters`."""

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction

from megarl_answers.units import SCALES

MAX_WORDS = 20
_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
_SMALL: Mapping[str, int] = {word: value for value, word in enumerate(_WORDS.split())} | {
    f"{word}ty": 10 * value
    for value, word in enumerate(["twen", "thir", "for", "fif", "six", "seven", "eigh", "nine"], 2)
}
_PARTS: Mapping[str, int] = {"half": 2, "halves": 2, "quarter": 4, "quarters": 4} | {
    f"{word}{s}": value
    for value, word in enumerate(["third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth"], 3)
    for s in ("", "s")
}
_POWERS = {word: scale for word, scale in SCALES.items() if scale % 10 == 0}
_FIRST = frozenset({*_SMALL, "a", "an", "half", "minus", "negative"})
_ORDINALS: Mapping[str, int] = {
    f"{word}th".replace("vet", "ft").replace("tyth", "tieth"): value for word, value in _SMALL.items()
} | {"first": 1, "second": 2, "third": 3, "eighth": 8, "ninth": 9}
_ORDINAL = re.compile(
    r"(?:the\s+)?(?:(\d+)(?:st|nd|rd|th)|([a-z]+ty)[\s-]+([a-z]+)|([a-z]+))(?:\s+place)?", re.IGNORECASE
)
_WORD = re.compile(r"(?:^|\s*-\s*|\s+)([a-zA-Z]+)(?![\w'])")


def spelled_number(text: str) -> tuple[str, str] | None:
    r"""Read the number in words at the start of a text: `thirty-six cats` → (`36`, ` cats`), `three quarters` →
    (`\frac{3}{4}`, ``). Return None if there is none. Ordinals do not count.
    """
    first = _WORD.match(text)
    if first is None or first[1].casefold() not in _FIRST:
        return None
    words, ends = [first[1].casefold()], [first.end()]
    while len(words) < MAX_WORDS and (match := _WORD.match(text, ends[-1])):
        words.append(match[1].casefold())
        ends.append(match.end())
    start = int(words[0] in ("minus", "negative"))
    whole, end = _whole_number(words, start)
    has_whole = end > start
    # `three quarters` has the number on top; `three and a half`, `half` and `a third` add a fraction.
    joined = has_whole and words[end : end + 1] == ["and"]
    top, after = whole, end
    if joined or not has_whole:
        top, after = _whole_number(words, end + joined)
        if after == end + joined:
            top, after = 1, after + (words[after : after + 1] in (["a"], ["an"]))
    part = words[after] if after < len(words) else ""
    value = Fraction(whole)
    if part in _PARTS:
        if part.endswith("s") is (top == 1) or not (after > start or part == "half"):
            return None
        value, end = (whole if joined else 0) + Fraction(top, _PARTS[part]), after + 1
    elif not has_whole:
        return None
    digits = str(value) if value.denominator == 1 else rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
    return "-" * start + digits, text[ends[end - 1] :]


def ordinal(text: str) -> int | None:
    """Read a text that is an ordinal number; return None for other texts."""
    match = _ORDINAL.fullmatch(text)
    if match is None or match[1]:
        return int(match[1]) if match else None
    tens, units = _SMALL.get((match[2] or "").casefold(), 0), _ORDINALS.get((match[3] or match[4]).casefold())
    return None if units is None or (tens == 0) == (match[2] is not None) else tens + units


def _whole_number(words: Sequence[str], start: int) -> tuple[int, int]:
    """Return the whole number that begins at a word, and where it ends: at `start` if there is none."""
    total, group, end = 0, -1, start
    for at in range(start, len(words)):
        word, following = words[at], words[at + 1] if at + 1 < len(words) else ""
        value, scale = _SMALL.get(word), _POWERS.get(word, 0)
        room = 1 if group < 0 else 100 if group and group % 100 == 0 else 10 if group >= 20 and group % 10 == 0 else 0
        if value is not None and (room == 1 or 0 < value < room):
            group = max(group, 0) + value
        elif scale == 100 and 0 < group < 100:
            group *= 100
        elif scale > 100 and end > start:
            total, group = total + max(group, 1) * scale, -1
        elif at == start and word in ("a", "an") and following in _POWERS:
            group = 1
        elif word == "and" and end > start and following in _SMALL and (total or group % 100 == 0):
            continue
        else:
            break
        end = at + 1
    return total + max(group, 0), end

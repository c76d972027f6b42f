"""Match texts with the shell's patterns (`*`, `?`, `[a-z]`), in which a backslash makes a character plain."""

import re
from collections.abc import Callable

# Longer texts are only matched with patterns that need no search.
_LONGEST = 4096
_EXTENDED = re.compile(r"(?<!\\)[?*+@!]\(")
_CLASSES = {
    "alpha": "a-zA-Z",
    "digit": "0-9",
    "alnum": "a-zA-Z0-9",
    "upper": "A-Z",
    "lower": "a-z",
    "space": r"\s",
    "blank": r" \t",
    "punct": r"!-/:-@\[-`{-~",
    "xdigit": "0-9A-Fa-f",
}


class PatternError(ValueError):
    """A pattern is of a kind that is not followed here."""


def quote(text: str) -> str:
    """Return the pattern that matches just this text."""
    return re.sub(r"([\\*?\[\]()+@!|])", r"\\\1", text)


def translate(pattern: str, *, lazy: bool = False) -> str:
    """Return a pattern as a regular expression of Python; `lazy` lets `*` take as little as it can."""
    if _EXTENDED.search(pattern):
        raise PatternError("an extended pattern such as @(a|b)")
    parts, index = [], 0
    while index < len(pattern):
        char = pattern[index]
        if char == "\\" and index + 1 < len(pattern):
            parts.append(re.escape(pattern[index + 1]))
            index += 2
            continue
        if char == "[" and (found := re.compile(r"\[([!^]?)(\]?(?:\[:\w+:\]|\\.|[^\]\\])*)\]").match(pattern, index)):
            parts.append(_bracket(found[1], found[2]))
            index = found.end()
            continue
        if char == "*":
            if not parts or parts[-1] not in (".*", ".*?"):
                parts.append(".*?" if lazy else ".*")
        else:
            parts.append("." if char == "?" else re.escape(char))
        index += 1
    return "".join(parts)


def _bracket(negated: str, members: str) -> str:
    def member(match: re.Match[str]) -> str:
        if match[1]:
            return _CLASSES.get(match[1], "")
        return re.escape(match[2] or match[0])

    body = re.sub(r"\[:(\w+):\]|\\(.)|[\[\]^&~|\\]", member, members)
    return f"[{'^' if negated else ''}{body}]"


def _search(pattern: str, text: str, *, lazy: bool = False) -> re.Pattern[str]:
    expression = translate(pattern, lazy=lazy)
    if len(text) > _LONGEST and expression.count(".*") > 1:
        raise PatternError(f"a pattern with several * on a text of more than {_LONGEST} characters")
    if expression.count(".*") > 8:
        raise PatternError("a pattern with more than 8 *")
    try:
        return re.compile(expression, re.DOTALL)
    except re.error:
        raise PatternError("a pattern with an unusual bracket") from None


def matches(pattern: str, text: str) -> bool:
    """Return whether a pattern matches the whole text."""
    return _search(pattern, text).fullmatch(text) is not None


def strip_start(pattern: str, text: str, *, longest: bool) -> str:
    """Return a text without the shortest or longest beginning that a pattern matches (`#`, `##`)."""
    found = _search(pattern, text, lazy=not longest).match(text)
    return text[found.end() :] if found else text


def strip_end(pattern: str, text: str, *, longest: bool) -> str:
    """Return a text without the shortest or longest end that a pattern matches (`%`, `%%`)."""
    if len(text) > _LONGEST:
        raise PatternError(f"a text of more than {_LONGEST} characters")
    expression = _search(pattern, text)
    starts = range(len(text) + 1) if longest else range(len(text), -1, -1)
    return next((text[:start] for start in starts if expression.fullmatch(text, start)), text)


def replace(pattern: str, text: str, by: str, *, where: str, check: Callable[[int], None]) -> str:
    """Return a text whose match of a pattern is replaced: the first, all (`/`), one at the start (`#`) or end (`%`).

    check: is called with the length that the result will have at most.
    """
    if not pattern and where in ("", "/"):
        return text
    if where == "%":
        kept = strip_end(pattern, text, longest=True)
        return kept + by if kept != text or matches(pattern, "") else text
    expression = _search(pattern, text)
    if where == "#":
        found = expression.match(text)
        return by + text[found.end() :] if found else text
    count = 0 if where == "/" else 1
    check(len(text) + len(by) * (sum(1 for _ in expression.finditer(text)) if where == "/" else 1))
    # Bash does not replace an empty match after another one.
    return re.compile(f"(?=.){expression.pattern}", re.DOTALL).sub(lambda _: by, text, count=count)

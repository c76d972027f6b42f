"""Parse the structure of answers: lists, brackets, matrices, plus-minus signs and intervals."""

import re
from dataclasses import dataclass

_OPENING, _CLOSING = "([{", ")]}"
_MATRIX = re.compile(r"\\begin\s*\{([pb]?matrix|smallmatrix|array)\}(?:\s*\{[lcr|\s]*\})?(.*)\\end\s*\{\1\}", re.DOTALL)
_NAME = r"(?:\\?[a-zA-Z]+(?:_\{?\w+\}?)?)"
RELATION = r"<|>|\\leq(?![a-zA-Z])|\\geq(?![a-zA-Z])"
_RELATION = rf"({RELATION})"
TURNED = {"<": ">", ">": "<", r"\leq": r"\geq", r"\geq": r"\leq"}
_ALL_BUT = re.compile(rf"({_NAME})\s*\\neq(?![a-zA-Z])\s*([^=<>,]+)")
_OF_REALS = re.compile(rf"^({_NAME})\s*\\in\s*\\mathbb\{{R\}}\s*,\s*(?=\1(?![a-zA-Z]))")
_AND = r"(?<![a-zA-Z\\])and(?![a-zA-Z])|\\land(?![a-zA-Z])|\\wedge(?![a-zA-Z])"
_RAY = re.compile(r"([(\[])(.*),(.*)([)\]])")
_ONE_SIDED = re.compile(rf"({_NAME})\s*{_RELATION}\s*([^<>=]+)")
_ONE_SIDED_BACK = re.compile(rf"([^<>=]+?)\s*{_RELATION}\s*({_NAME})")
_TWO_SIDED = re.compile(rf"([^<>=]+?)\s*{_RELATION}\s*({_NAME})\s*{_RELATION}\s*([^<>=]+)")
_MEMBER = re.compile(rf"({_NAME}|\({_NAME}(?:\s*,\s*{_NAME})+\))\s*\\in(?![a-zA-Z])\s*(.+)")
_SET_BUILDER = re.compile(rf"\\\{{\s*({_NAME})\s*(?:\\in\s*(?:\\mathbb\s*\{{?\s*R\s*\}}?|R))?\s*[|:]\s*(.+?)\s*\\\}}")
_LETTER = r"[^\W\d_]"
# A single letter is a variable, not a word for "and" or "or", unless it stands between numbers.
_LIST_SEPARATORS = (
    rf"[,;和或]|(?<!{_LETTER})(?<!\\)(?:and|or|или|et|und|oder|ou)(?!{_LETTER})|(?<=\d )[yoи](?= -?[\d\\])"
)
# Its commas separate nothing, unless it stands in brackets.
_THOUSANDS = r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?![\d,])"
_NOTHING = "(?!)"
_INFINITY = r"\infty"


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemGroup:
    r"""A tuple, set or list in an answer: items and brackets. Sets, and lists without brackets, are not `ordered`."""

    opening: str
    closing: str
    items: tuple[str, ...]

    @property
    def ordered(self) -> bool:
        return self.opening not in ("", r"\{")


def split_top(text: str, separators: str, *, whole: str = _NOTHING) -> list[str]:
    """Split a text where a regular expression matches outside of brackets, braces and LaTeX environments.

    separators: that expression. whole: what this one matches is not split.
    """
    parts, depth, start, position = [], 0, 0, 0
    pattern = re.compile(rf"(?P<whole>{whole})|\\begin\b|\\end\b|[([{{]|[)\]}}]|{separators}")
    while match := pattern.search(text, position):
        token, position = match[0], max(match.end(), match.start() + 1)
        if match["whole"]:
            continue
        if token in _OPENING or token == r"\begin":
            depth += 1
        elif token in _CLOSING or token == r"\end":
            depth -= 1
        elif depth == 0:
            parts.append(text[start : match.start()].strip())
            start = match.end()
    return [*parts, text[start:].strip()]


def parse_group(text: str) -> ItemGroup | None:
    r"""Parse a group such as `(1,2)`, `[0,1)`, `\{1,2\}`, `1, 2`, `1 and 2` or `x=1; y=2`.

    Without brackets, `12,000` is one number. Returns None if the text is a single item without brackets.
    """
    if text.startswith(r"\{") and text.endswith(r"\}") and _closes_at_end(text[1:-2] + text[-1]):
        opening, closing, inside = r"\{", r"\}", text[2:-2]
    elif len(text) > 1 and text[0] in "([" and text[-1] in ")]" and _closes_at_end(text):
        opening, closing, inside = text[0], text[-1], text[1:-1]
    else:
        opening, closing, inside = "", "", text
    whole = _NOTHING if opening else _THOUSANDS
    items = split_top(inside, _LIST_SEPARATORS, whole=whole)
    if not (items[0] and items[-1]):
        # A comma may stand at the end of a tuple, but no "or".
        items = split_top(inside.strip().removesuffix(","), _LIST_SEPARATORS, whole=whole)
        if not (items[0] and items[-1]):
            return None
    items = [item for item in items if item]
    if len(items) == 1 and opening not in ("(", r"\{"):
        return None
    return ItemGroup(opening=opening, closing=closing, items=tuple(items))


def parse_matrix(text: str) -> tuple[tuple[str, ...], ...] | None:
    """Parse a matrix in round or square brackets into rows; return None for other texts, also for a determinant."""
    outer = parse_group(text) if text.startswith("[") else None
    if outer is not None and all(item.startswith("[") for item in outer.items):
        rows = [parse_group(item) for item in outer.items]
        return tuple(row.items if row else (item[1:-1],) for row, item in zip(rows, outer.items, strict=True))
    match = _MATRIX.fullmatch(text.strip().removeprefix("(").removeprefix("[").removesuffix(")").removesuffix("]"))
    if match is None:
        return None
    lines = [row.strip() for row in re.split(r"\\\\(?:\[[^\]]*\])?|\\cr\b", match[2]) if row.strip()]
    return tuple(tuple(cell.strip() for cell in split_top(row.replace(r"\hline", ""), "&")) for row in lines)


def as_column(text: str) -> tuple[tuple[str, ...], ...] | None:
    """Parse a tuple of several elements as a matrix of one column; return None for other texts."""
    group = parse_group(text)
    if group is None or (group.opening, group.closing) != ("(", ")") or len(group.items) < 2:
        return None
    return tuple((item,) for item in group.items)


def expand_signs(text: str) -> tuple[str, str] | None:
    r"""Expand `a \pm b` to `a + b` and `a - b`; return None if the text has no plus-minus sign."""
    if r"\pm" not in text and r"\mp" not in text:
        return None
    plus = text.replace(r"\pm", "+").replace(r"\mp", "-")
    minus = text.replace(r"\pm", "-").replace(r"\mp", "+")
    # Drop a plus sign that nothing precedes.
    plus, minus = (re.sub(r"(^|[=(,{])\s*\+\s*", r"\1", side) for side in (plus, minus))
    return plus, minus


def as_interval(text: str) -> tuple[str, str] | None:
    r"""Parse `x > 3`, `1 \leq x < 2`, `x \in (3,\infty)` or `\{x | x > 3\}` into variable and interval.

    Returns None for other texts.
    """
    text = _OF_REALS.sub("", text)
    if len(parts := split_top(text, _AND)) == 2:
        found = [as_interval(part) for part in parts]
        return _intersection(found[0], found[1]) if found[0] and found[1] else None
    if match := _ALL_BUT.fullmatch(text):
        return match[1], rf"\mathbb{{R}} \setminus \{{{match[2].strip()}\}}"
    if match := _SET_BUILDER.fullmatch(text):
        members = as_interval(match[2])
        return members if members is not None and members[0] == match[1] else None
    if match := _MEMBER.fullmatch(text):
        return match[1], match[2]
    if match := _TWO_SIDED.fullmatch(text):
        low, first, name, second, high = match.groups()
        if (first in ("<", r"\leq")) != (second in ("<", r"\leq")):
            return None
        if first in (">", r"\geq"):
            low, first, second, high = high, second, first, low
        left, right = "[" if first.startswith("\\") else "(", "]" if second.startswith("\\") else ")"
        return name, f"{left}{low},{high}{right}"
    if match := _ONE_SIDED.fullmatch(text):
        name, relation, bound = match.groups()
    elif match := _ONE_SIDED_BACK.fullmatch(text):
        bound, back, name = match.groups()
        relation = TURNED[back]
    else:
        return None
    closed = relation.startswith("\\")
    if relation in (">", r"\geq"):
        return name, f"{'[' if closed else '('}{bound},{_INFINITY})"
    return name, f"(-{_INFINITY},{bound}{']' if closed else ')'}"


def _intersection(a: tuple[str, str], g: tuple[str, str]) -> tuple[str, str] | None:
    """Return what two rays in opposite directions have in common; None for other intervals."""
    rays = [_RAY.fullmatch(interval) for _, interval in (a, g)]
    ends = [(ray[2].lstrip("-"), ray[3]) for ray in rays if ray]
    if a[0] != g[0] or sorted(end.count(_INFINITY) for end in ends) != [1, 1]:
        return None
    low, high = rays if ends[0][1] == _INFINITY else rays[::-1]
    if low is None or high is None or low[3] != _INFINITY or high[2] != f"-{_INFINITY}":
        return None
    return a[0], f"{low[1]}{low[2]},{high[3]}{high[4]}"


def _closes_at_end(text: str) -> bool:
    """Return whether the bracket at a text's first character is closed by the text's last character."""
    depth = 0
    for index, character in enumerate(text):
        depth += (character in _OPENING) - (character in _CLOSING)
        if depth == 0:
            return index == len(text) - 1
    return False


def is_balanced(text: str) -> bool:
    """Return whether every bracket is closed. The closing bracket may be of another kind, as in `[0,1)`."""
    depth = 0
    for character in text:
        depth += (character in _OPENING) - (character in _CLOSING)
        if depth < 0:
            return False
    return depth == 0

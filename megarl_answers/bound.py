r"""Compare answers up to the names of bound variables: `\sum_{k=1}^n k` is `\sum_{i=1}^n i`, `\{t | t > 0\}` is
`\{x | x > 0\}`.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megarl_answers.options import AnswerOptions, Equality

_LETTER = r"(?P<letter>(?<![\\a-zA-Z])[a-zA-Z](?![a-zA-Z]))"
_UPPER = r"(?:\s*\^\s*(?:\{[^{}]*\}|\\[a-zA-Z]+|\w))?"
_DOMAIN = r"\\in\s*(?:\\mathbb\s*\{?\s*[NZQRC]\s*\}?|[NZQRC])(?:[_^]\s*(?:\{[^{}]*\}|.))*"
_END_OF_TERM, _END_OF_SIDE = "+-=,;<>", "=,;"
# These bind a letter, in a scope that begins after the match and ends at the signs. Without signs, the scope is the
# match. Limits are not in it.
_BINDERS: Mapping[re.Pattern[str], str] = {
    re.compile(pattern): ends
    for pattern, ends in (
        (rf"\\(?:sum|prod|bigcup|bigcap){_UPPER}\s*_\s*\{{\s*{_LETTER}[^{{}}]*\}}{_UPPER}", _END_OF_TERM),
        (rf"\\lim\s*_\s*\{{\s*{_LETTER}\s*\\(?:to|rightarrow)(?![a-zA-Z])[^{{}}]*\}}", _END_OF_TERM),
        (rf"(?<![\\a-zA-Z])[a-zA-Z]\s*\(\s*{_LETTER}\s*\)\s*=", _END_OF_SIDE),
        (
            rf"(?<=\\int)\s*_\s*(?:\{{[^{{}}]*\}}|\\[a-zA-Z]+|\w){_UPPER}(?P<scope>(?:(?!\\int).)*?(?<![\\a-zA-Z])d\s*"
            r"(?P<letter>[a-zA-Z])(?![a-zA-Z]))",
            "",
        ),
        (rf"(?P<scope>\\\{{\s*{_LETTER}\s*(?:{_DOMAIN}\s*)?[|:].*?\\\}})", ""),
        (rf"(?P<scope>\\\{{[^|:]*[|:]\s*{_LETTER}\s*{_DOMAIN}.*?\\\}})", ""),
        (rf"(?P<scope>^[^,]*,\s*(?:(?:where|for|with)\s+)?{_LETTER}\s*{_DOMAIN}\s*$)", ""),
    )
}
# Commands and words are not letters; neighbouring letters are factors.
_TOKEN = re.compile(r"\\[a-zA-Z]+|(?<![a-zA-Z])(?:and|or|if|for|where|with|is|not|odd|even|prime)(?![a-zA-Z])|[a-zA-Z]")
# In `e` and `i` are constants, and `d` stands before what is integrated over.
_FRESH = "wvuzyxtsrqpnmlkjhgfcba"


@dataclass(frozen=True, slots=True)
class Binding:
    """A letter that a text binds, where it is declared, and the part of the text in which it has this meaning."""

    letter: str
    declared: int
    start: int
    end: int

    def places(self, text: str) -> list[int]:
        """Return the positions of the letter in its scope and declaration."""
        found = [each.start() for each in _TOKEN.finditer(text, self.start, self.end) if each[0] == self.letter]
        return sorted({*found, self.declared})


def same_renamed(
    answer: str, gold: str, compare: Callable[[str, str], Equality], options: AnswerOptions
) -> Equality | None:
    """Compare with the same fresh letters for what both answers bind, in order, if they bind different letters."""
    found = [_bindings(text) for text in (answer, gold)]
    letters = [[binding.letter for binding in bindings] for bindings in found]
    if letters[0] == letters[1] or len(letters[0]) != len(letters[1]):
        return None
    used = set(_TOKEN.findall(answer + gold))
    fresh = [letter for letter in _FRESH if letter not in used][: len(letters[0])]
    if len(fresh) < len(letters[0]):
        return None
    renamed = []
    for text, bindings in zip((answer, gold), found, strict=True):
        # The inner ones first.
        for binding, letter in reversed(list(zip(bindings, fresh, strict=True))):
            for place in binding.places(text):
                text = text[:place] + letter + text[place + 1 :]
        renamed.append(text)
    return compare(*renamed)


def _bindings(text: str) -> list[Binding]:
    """Return what a text binds, in its order. A letter that does not stand again in its scope is not bound."""
    found: dict[int, Binding] = {}
    for pattern, ends in _BINDERS.items():
        for match in pattern.finditer(text):
            start, end = match.span("scope") if not ends else (match.end(), _end_of_scope(text, match.end(), ends))
            binding = Binding(match["letter"], match.start("letter"), start, end)
            places = binding.places(text)
            declared = {each.start() for each in _TOKEN.finditer(text, *match.span()) if each[0] == binding.letter}
            # A limit that names the letter means another one, so that the letter is not free to be renamed.
            if len(places) > 1 and declared <= set(places):
                found.setdefault(binding.declared, binding)
    return [found[declared] for declared in sorted(found)]


def _end_of_scope(text: str, start: int, ends: str) -> int:
    """Return where a scope ends: at a sign of `ends` outside of brackets, or where its own bracket closes."""
    depth = 0
    for position in range(start, len(text)):
        depth += (text[position] in "([{") - (text[position] in ")]}")
        if depth < 0 or (depth == 0 and text[position] in ends and text[start:position].strip()):
            return position
    return len(text)

"""Keep texts that UTF-8 cannot hold out of what a run reads and writes, and show what is hidden in texts.

A Python text may contain a surrogate, half of a character that UTF-16 writes as two. JSON makes one of an escape such
as `\\ud83d` alone, which is what remains of an emoji that was cut in two.
"""

import re
import unicodedata
from collections.abc import Mapping, Sequence

_SURROGATE = re.compile("[\ud800-\udfff]")
# Deeper values than this come from a mistake, and neither JSON nor Python's own functions take any depth.
_MAX_DEPTH = 64
# Unicode's categories of controls (C0 and C1), format characters (such as those that turn the direction of writing, or
# have no width), surrogates, and separators of lines and paragraphs.
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
# The zero-width joiner and non-joiner, without which emoji and several scripts fall apart.
_JOINERS = "\u200c\u200d"


class Shown(dict[int, str]):
    r"""A table for `str.translate` by which each hidden character becomes an escape such as `\x1b` or `\u202e`.

    Its entries, if it is made with some, are exceptions.
    """

    def __missing__(self, code: int) -> str:
        character = chr(code)
        if unicodedata.category(character) in _HIDDEN and character not in _JOINERS:
            character = character.encode("unicode_escape").decode()
        self[code] = character
        return character


_LINE, _LINES = Shown(), Shown({ord("\n"): "\n", ord("\t"): "\t"})


def visible(text: str, *, keep_lines: bool = False) -> str:
    r"""Return a text that stays within its line and has no effect on a terminal; what is hidden in it shows.

    keep_lines: whether line feeds and tabs stay as they are.

    >>> print(visible("red \x1b[31m, then\n a line"))
    red \x1b[31m, then\n a line
    """
    return text if text.isascii() and text.isprintable() else text.translate(_LINES if keep_lines else _LINE)


def find_surrogate(value: object, place: str) -> str | None:
    """Describe a text within a JSON value that UTF-8 cannot hold, the first one, keys included; None if there is none.

    place: the name of the value in the description, such as `prompt` or `data.system_prompt`.
    """
    # The last of these is looked at next; a stack takes any depth.
    waiting = [(place, value)]
    while waiting:
        name, item = waiting.pop()
        if isinstance(item, str):
            # isascii() reads a flag, and most texts of most files are ASCII.
            if not item.isascii() and (found := _SURROGATE.search(item)):
                return (
                    f"{name} has {found[0]!a} at position {found.start()}, half of a character (as of an emoji "
                    "cut in two), which UTF-8 cannot hold"
                )
        elif isinstance(item, Mapping):
            within = f"{name}." if name else ""
            waiting += [(f"{within}{key}", part) for key, part in reversed(list(item.items()))]
            waiting += [(f"a key of {name}" if name else "a key", key) for key in item]
        elif isinstance(item, list | tuple):
            waiting += reversed([(f"{name}[{i}]", part) for i, part in enumerate(item)])
    return None


def readable(text: str) -> str:
    """Return a text that UTF-8 can hold: two halves of a character become that character, a lone one becomes U+FFFD.

    >>> readable("I am \\ud83d\\ude00, he is \\ud83d") == "I am \\U0001f600, he is \\ufffd"
    True
    """
    if text.isascii() or not _SURROGATE.search(text):
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def plain(value: object, *, depth: int = 0) -> object:
    """Return a value as one that can always be written: JSON's types alone, with texts and keys that UTF-8 can hold.

    Arrays become lists, anything else that JSON does not know its text, and what is nested more than 64 deep "…".

    >>> plain({"\\ud83d": (1, {2})})
    {'�': [1, '{2}']}
    """
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return readable(value)
    if depth == _MAX_DEPTH:
        return "…"
    if isinstance(value, Mapping):
        return {readable(str(key)): plain(item, depth=depth + 1) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [plain(item, depth=depth + 1) for item in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist(), depth=depth + 1)
    return readable(str(value))

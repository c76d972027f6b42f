"""Keep texts that UTF-8 cannot hold out of what a run reads, and mend those that come up while it runs.

A Python text may contain a surrogate, half of a character that UTF-16 writes as two. JSON makes one of an escape such
as `\\ud83d` alone, which is what remains of an emoji that was cut in two.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

_SURROGATE = re.compile("[\ud800-\udfff]")
# Deeper values than this come from a mistake, and neither JSON nor Python's own functions take any depth.
_MAX_DEPTH = 64


def find_surrogate(value: Any, place: str) -> str | None:
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


def plain(value: Any, *, depth: int = 0) -> Any:
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

"""Parse lists and objects that files hold as text, in JSON or as Python prints them.

Tables such as CSV have no columns of lists, so that their writers make texts of them.
"""

import ast
import json
import re
from collections.abc import Mapping

from megarl.errors import DataError
from megarl.host.unicode import find_surrogate

# The text of a structure begins with one of these, and so does a JSON text of such a text.
_OPENING = re.compile(r'\ufeff?\s*(?:[\[{"]|\(\s*\{|array\()')
# How numpy prints an array of turns, without commas, and with its own name around it: nothing can read that back.
_PRINTED_TURNS = re.compile(
    r"""\s*(?:array\()?\s*\[\s*\{\s*["'](?:role|content|from|value)["']\s*:.*\}\s*\](?:,\s*dtype=object\))?\s*""",
    re.DOTALL,
)
# Turns whose quotes are still those of a CSV field or of a text within a text, and turns of which the end is missing:
# programs of tables cut long cells.
_OPENING_OF_TURNS = re.compile(r"""\ufeff?\s*\[\s*\{\s*\\*["']{1,2}(?:role|content|from|value)\\*["']{1,2}\s*:""")
_ESCAPED_TURNS = re.compile(r"""\ufeff?\s*\[\s*\{\s*(?:\\+["']|["']{2})(?:role|content|from|value)(?:\\|["']{2})""")
_END_OF_TURNS = re.compile(r"\}\s*\]")
_REWRITE = "write a list of {role, content}, or JSON of one"
_SPEAKERS, _TEXTS = frozenset({"role", "from"}), frozenset({"content", "value"})


def read_structure(value: object, place: str) -> object:
    """Return what a text stands for that is JSON, or Python's notation, of anything; any other value as it is.

    Raises DataError, which names the text's `place`, if it stands for a text that UTF-8 cannot hold.
    """
    found = value
    # A text of a text comes from writing the same rows twice.
    while isinstance(found, str) and (_OPENING.match(found) or found.strip() in ("null", "None")):
        found = found.removeprefix("\ufeff")
        try:
            found = json.loads(found)
        except (ValueError, RecursionError):
            try:
                found = ast.literal_eval(found.strip())
            except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
                return value
    if found is not value and (problem := find_surrogate(found, place)):
        raise DataError(f"{problem}; complete or remove it")
    return value if isinstance(found, str) else found


def read_turns(value: object, place: str) -> object:
    """Return the turns that a text stands for: `read_structure` of a list, of which each item has a speaker.

    Any other text is returned as it is: it may begin like a list, or be data that a prompt is about. Raises DataError,
    which names the `place`, for turns that cannot be read back.
    """
    if not isinstance(value, str) or not _OPENING.match(value):
        return value
    if _holds_turns(found := read_structure(value, place)):
        return found
    if isinstance(found, str) and _PRINTED_TURNS.fullmatch(value):
        raise DataError(
            f"{place} is {value!r:.80}, which looks like turns as numpy or pandas print them and cannot be read back; "
            f"{_REWRITE}"
        )
    if isinstance(found, str) and _ESCAPED_TURNS.match(value):
        raise DataError(
            f"{place} is {value!r:.80}, turns whose quotes are escaped once too often; write JSON of a list of "
            "{role, content} as it is"
        )
    if isinstance(found, str) and _is_cut(value):
        raise DataError(
            f"{place} is {value!r:.80}, turns of which the end is missing after {len(value)} characters, as programs "
            f"of tables cut long cells; {_REWRITE}"
        )
    parts = found.values() if isinstance(found, Mapping) else found if isinstance(found, list | tuple) else ()
    if any(isinstance(part, list | tuple) and _holds_turns(part) for part in parts):
        raise DataError(f"{place} is {value!r:.80}, a text of turns within a {type(found).__name__}; {_REWRITE}")
    return value


def _is_cut(text: str) -> bool:
    """Return whether a text begins as turns do and ends within one of their texts."""
    if not _OPENING_OF_TURNS.match(text) or _END_OF_TURNS.search(text):
        return False
    try:
        ast.parse(text.removeprefix("\ufeff").strip(), mode="eval")
    except SyntaxError as error:
        return error.msg.startswith("unterminated string")
    except (ValueError, MemoryError, RecursionError):
        return False
    return False


def require_text(content: str, place: str) -> None:
    """Raise DataError, which names the `place`, for a turn's text that stands for turns, or for a list of parts, as
    OpenAI has them.

    A part is an object that names its type, and has a value of that name.
    """
    if read_turns(content, place) is not content:
        raise DataError(f"{place} is {content!r:.80}, turns written as the text of a turn; {_REWRITE}")
    parts = read_structure(content, place) if content.startswith("[") else None
    if isinstance(parts, list) and parts and all(isinstance(p, Mapping) and str(p.get("type")) in p for p in parts):
        raise DataError(
            f"{place} is {content!r:.80}, a list of parts written as text, expected the words of the turn; write the "
            "text of its parts"
        )


def _holds_turns(value: object) -> bool:
    """Return whether a value is a turn or a list of turns, in OpenAI's form or ShareGPT's; some may lack their text."""
    turns = value if isinstance(value, list | tuple) else [value]
    keys = [{*turn} if isinstance(turn, Mapping) else set() for turn in turns]
    return all(_SPEAKERS & each for each in keys) and any(_TEXTS & each for each in keys)

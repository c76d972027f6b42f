"""Suggest the configuration key that a user probably meant by an unknown key."""

from collections.abc import Sequence
from difflib import SequenceMatcher

# Minimum similarity, in letters or in words, of a suggestion in the same section (beside) and in others (elsewhere).
_LETTERS_BESIDE, _LETTERS_ELSEWHERE = 0.6, 0.8
_WORDS_ELSEWHERE = 0.5
# Bonus of a key in the section where the unknown one was given, and of a key below the same first section.
_BESIDE, _NEARBY = 0.5, 0.25
# Words that do not say what a key is about.
_FILLERS = frozenset({"is", "max", "min", "num", "of", "per", "size", "use"})
# Minimum length of an abbreviation that is recognised as the beginning of a word.
_MIN_BEGINNING = 3


def suggest_keys(key: str, path: str, known: Sequence[str]) -> list[str]:
    """Return known keys with exactly this name, or else with the most similar name, preferring the same section.

    Args:
        path: the section in which `key` was given; "" is the root.
        known: all dotted keys.
    """
    if places := [dotted for dotted in known if _name(dotted) == key]:
        return places
    scores = {dotted: score for dotted in known if (score := _score(key, path, dotted))}
    if not scores:
        return []
    best = max(scores, key=lambda dotted: (scores[dotted], _name(dotted)))
    return [dotted for dotted in scores if scores[dotted] == scores[best] and _name(dotted) == _name(best)]


def _name(dotted: str) -> str:
    return dotted.rpartition(".")[2]


def _score(key: str, path: str, dotted: str) -> float:
    """Return how similar a known key is to an unknown one, or 0 if it is too different to suggest."""
    section, _, name = dotted.rpartition(".")
    # The share (0 to 1) of letters in common and in order, ignoring filler words.
    letters = SequenceMatcher(None, "_".join(_telling(key)), "_".join(_telling(name))).ratio()
    words = _words(key, name)
    if section == path:
        return letters + words + _BESIDE if letters >= _LETTERS_BESIDE or words else 0.0
    if letters < _LETTERS_ELSEWHERE and words < _WORDS_ELSEWHERE:
        return 0.0
    return letters + words + _NEARBY * (section.partition(".")[0] == path.partition(".")[0])


def _words(a: str, b: str) -> float:
    """Return the share of words that two names have in common, where plurals and abbreviations count as equal."""
    words_a, words_b = _telling(a), _telling(b)
    pairs = (
        [sorted((word.removesuffix("s"), other.removesuffix("s")), key=len) for other in words_b] for word in words_a
    )
    common = sum(any(a == b or (len(a) >= _MIN_BEGINNING and b.startswith(a)) for a, b in each) for each in pairs)
    return common / (len(words_a) + len(words_b) - common)


def _telling(name: str) -> list[str]:
    words = name.split("_")
    return [word for word in words if word not in _FILLERS] or words

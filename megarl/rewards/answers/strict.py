"""Answers that have one way to be written: equal as strings, or as exact numbers."""

import re

from megarl.rewards.answers.canonical import canonical, compact
from megarl.rewards.answers.numbers import parse_number
from megarl.rewards.answers.units import split_unit

_NAME_OF_VALUE = re.compile(r"^\\?[a-zA-Z]{1,2}\s*=(?=[^=]+$)")
_NUMBER_IN_BRACKETS = re.compile(r"^\(\s*(-?[\d.,]+)\s*\)$")


def same_string(answer: str, gold: str) -> bool:
    """Whether both are spelled alike, but for spacing, wrappers, `x=`, zeros and units: `(073)`, `73.0`, `73`."""
    (a, unit_a), (g, unit_g) = (split_unit(_plain(text)) for text in (answer, gold))
    if unit_a and unit_g and unit_a != unit_g:
        return False
    numbers = parse_number(a), parse_number(g)
    if numbers[0] is not None and numbers[1] is not None:
        return numbers[0].value == numbers[1].value
    return bool(a) and compact(a) == compact(g)


def _plain(text: str) -> str:
    return _NUMBER_IN_BRACKETS.sub(r"\1", _NAME_OF_VALUE.sub("", canonical(text)).strip())

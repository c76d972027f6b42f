"""Read what a ground truth stands for: the answers that a scorer accepts, in whichever type a file holds them."""

import ast
import json
import re
from contextlib import suppress
from decimal import Decimal
from typing import Any

import numpy as np

from megarl.errors import DataError

# Scorers whose ground truths are answers. Others read structures of their own, such as tests of a program.
_OF_ANSWERS = re.compile(
    r"math(?:/last_number|_verify)?|strict|letters|answer_line|luffy/\d|openai/gsm8k|megarl/(?:sums|calculator)"
)
_FLOAT = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]\d\d+)?")
_FIELDS = ("value", "target", "answer", "ground_truth")


def truths_of(scorer: str, ground_truth: str) -> list[str]:
    """Return the answers that a scorer accepts for a ground truth; DataError if it stands for none.

    >>> truths_of("math", '["72"]'), truths_of("strict", "72.0"), truths_of("math", "0.10000000149011612")
    (['72'], ['72.0', '72'], ['0.10000000149011612', '0.1'])
    """
    if not _OF_ANSWERS.fullmatch(scorer):
        return [ground_truth]
    if "\0" in ground_truth:
        raise DataError(f"ground truth {ground_truth[:60]!r}: got a NUL character, expected text; remove it")
    found: Any = ground_truth
    if ground_truth.startswith(("[", "{")):
        with suppress(ValueError, RecursionError):
            found = json.loads(ground_truth)
        # As Python writes a list of texts.
        if isinstance(found, str) and "'" in found:
            with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
                literal = ast.literal_eval(found)
                found = literal if isinstance(literal, list | dict) else found
    if isinstance(found, dict):
        if len(found) != 1 or not found.keys() & set(_FIELDS):
            raise DataError(f"ground truth {ground_truth[:60]!r}: expected an answer, or one of {', '.join(_FIELDS)}")
        (found,) = found.values()
        if found is None:
            raise DataError(f"ground truth {ground_truth[:60]!r}: got null, expected an answer")
    # Of numbers, two or more are an interval or a vector.
    if isinstance(found, list) and found and (len(found) == 1 or all(isinstance(each, str) for each in found)):
        if not all(isinstance(each, str | int | float) for each in found):
            raise DataError(f"ground truth {ground_truth[:60]!r}: expected a list of accepted answers")
        return [answer for each in found for answer in _written(each if isinstance(each, str) else json.dumps(each))]
    if isinstance(found, list):
        found = ground_truth if ground_truth.startswith("[") else json.dumps(found)
    return _written(found if isinstance(found, str) else json.dumps(found))


def _written(answer: str) -> list[str]:
    """Return the ways to write an answer: numbers without the digits that only their type has, `true` as `True` too."""
    if answer in ("true", "false"):
        return [answer, answer.capitalize()]
    if not _FLOAT.fullmatch(answer):
        return [answer]
    if "e" in answer:
        return [format(Decimal(answer), "f")] if abs(Decimal(answer).adjusted()) < 400 else [answer]
    number = float(answer)
    # So many digits may have come from a number of 32 bits, or be meant.
    if len(answer) > 12 and abs(number) < 1e38 and repr(float(np.float32(number))) == answer:
        return [answer, format(Decimal(str(np.float32(number))), "f")]
    return [answer, answer[:-2]] if answer.endswith(".0") else [answer]

"""Read the answers that a scorer accepts from a ground truth, in whichever type a file holds it."""

import ast
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from typing import Protocol

import numpy as np

from megarl.data.answer_span import final_answer
from megarl.errors import DataError
from megarl_answers import MODES, last_boxed
from megarl_answers.statement import plain_spelling

_FLOAT = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
# The mark of the answer in a worked solution, and words that announce it.
_MARKED = re.compile(r"####|</answer>")
_STRAY = re.compile(
    rf"{_MARKED.pattern}|<\|\w+\|>|</?(?:s|br|b|i|p|em|strong|span|div|code)\b[^<>]*>|&#?\w+;|\\n\s*$"
    r"|(?<!\\)\bboxed\b"
)
_ANNOUNCED = re.compile(
    r"\bans(?:wer)?\b(?:\s+to\b[^.:=\n]*?)?[*_\s]*(?:\bis\b|[:=])[\s:*_]*(.*?)(?:\*\*)?"
    r"(?=,?\s+(?:since|because)\b|[.*\s]*(?:\n|$)|\.\s)",
    re.IGNORECASE,
)
_MINUS = re.compile(r"^-\s+(?=\d)")
_TEXT = re.compile(r"\\text\w*\{([^{}]*)\}")
_SPACE = r"[\xa0\u2000-\u200f\u2028-\u202f\u205f-\u2064\u3000\ufeff]"
_WORDS, _DIGITS = r"[a-zA-Z][a-zA-Z \-]*", r"[-+]?\d[\d.,]*"
# Spellings of a number, or of a letter, that no reader of mathematics knows, and what is expected instead.
_UNREADABLE: Mapping[str, tuple[str, str]] = {
    "base": (r"[-+]?0[xXoObB][0-9a-fA-F]+", "a number to the base 10, or with its base: 48_{16}"),
    "raised": (r"[⁰¹²³⁴-⁹₀-₉]+", "digits that stand on the line"),
    "gap": (
        rf"(?!\d{{1,3}}(?:{_SPACE}\d{{3}})+$)\d+(?:{_SPACE}+\d+)+",
        "no space within a number but one before each three digits",
    ),
    "sign": (r".*\d\s*(?<![\^{])[-+−–]", "a sign before the number"),
    "about": (r"(?i:about|around|approx(?:imately|\.)?|roughly|nearly|almost|circa|ca\.)\s.*", "one value"),
    "dozen": (r"[\w\s-]+\b(?:dozen|gross)s?", "a number in digits"),
    "either": (rf"{_DIGITS}\s+or\s+{_WORDS}|{_WORDS}\s+or\s+{_DIGITS}", "one spelling, or a list of texts"),
    "comma": (r"[-+]?\d{1,3}(?:\.\d{3})+,\d+", "a decimal point"),
    "kanji": (r"\d+分[の之]\d+", "a fraction in signs, such as 1/2"),
    "cyrillic": (r"[\u0400-\u04ff]", "a letter of the Latin alphabet"),
    "box": (r".*\\f?box(?:ed)?\s*\{[^{}]*", "a box that is closed"),
    # Up to XXXIX they number quadrants, statements and figures.
    "roman": (
        r"(?=[MDCLXVI]{3})(?=.*[MDCL])M{0,3}(?:CM|CD|D?C{0,3})(?:XC|XL|L?X{0,3})(?:IX|IV|V?I{0,3})",
        "a number in digits, or the scorer short_answer for texts",
    ),
}
_ANY_UNREADABLE = re.compile("|".join(f"(?P<{name}>{form})" for name, (form, _) in _UNREADABLE.items()), re.DOTALL)
# A full stop that ends a sentence, and spaces.
_END = re.compile(r"(?<![.\s])\.?\s*$")
# Longer texts are no numbers.
MOST_CHARS = 80
_FIELDS = ("value", "target", "answer", "ground_truth")


class TruthReader(Protocol):
    """A function that returns the texts that a scorer compares responses with; any one of them is right.

    label: the ground truth in the type that the data has, None if only its text is known. Raises DataError if a ground
    truth stands for no answer.
    """

    def __call__(self, ground_truth: str, label: object = None, /) -> Sequence[str]: ...

    def __hash__(self) -> int: ...


def as_it_stands(ground_truth: str, label: object = None) -> Sequence[str]:
    """Return the text of a ground truth, for scorers that read a structure of their own, such as tests of a program."""
    return [ground_truth]


def any_answer(ground_truth: str, label: object = None) -> Sequence[str]:
    """Return each answer of a list, in JSON or Python's notation, or the one answer in another ground truth.

    >>> any_answer('["a", 5]'), any_answer("72.0"), any_answer('{"target": ["a", "b"]}'), any_answer("6*7=42\\n#### 42")
    (['a', '5'], ['72.0', '72'], ['a', 'b'], ['42'])
    >>> any_answer("6*7=42.\\nThe answer is 42, since 7*6=42."), any_answer(r"So it is $\\boxed{B}$.")
    (['42'], ['B'])
    """
    found = _structure(ground_truth)
    # Search-R1 has other fields beside it.
    found = found["target"] if isinstance(found, dict) and "target" in found else _value(found, ground_truth)
    if isinstance(found, list) and not found:
        raise _unread(ground_truth, "an answer, or a list of accepted answers")
    found = found if isinstance(found, list) else [found]
    return [_MINUS.sub("-", _TEXT.sub(r"\1", each)) for each in _each(found, ground_truth)]


def any_mathematics(ground_truth: str, label: object = None) -> Sequence[str]:
    """Return the answers as `any_answer` does, but the text `[1, 2]` is an interval or a vector.

    A list of several numbers may be meant as that, or as alternatives, so that it is refused.
    """
    found = _value(_structure(ground_truth), ground_truth)
    found = found if isinstance(found, list) else [found]
    if len(found) == 1 or not all(isinstance(each, int | float | list) for each in found):
        read = _each(found, ground_truth)
        for text in read:
            if not text.isdecimal() and len(text) <= MOST_CHARS and (form := _ANY_UNREADABLE.fullmatch(text.strip())):
                raise _unread(ground_truth, _UNREADABLE[str(form.lastgroup)][1])
        return [*read, *filter(None, map(plain_spelling, read))]
    if isinstance(label, list | dict) and not any(isinstance(each, list) for each in found):
        texts = json.dumps([str(each) for each in found])
        raise _unread(ground_truth, f"texts if any one of them is right, such as {texts}, or one text for all")
    return [ground_truth if ground_truth.startswith("[") else json.dumps(found)]


def without_stop(text: str) -> str:
    """Return a text without spaces around it, and without the full stop that ends it."""
    return _END.sub("", text).lstrip()


def _structure(ground_truth: str) -> object:
    """Return the list or object that a text writes in JSON or Python's notation, the text itself if it writes none."""
    if "\0" in ground_truth:
        raise DataError(f"ground truth {ground_truth[:60]!r}: got a NUL character, expected text; remove it")
    found: object = ground_truth
    if ground_truth.startswith(("[", "{")):
        with suppress(ValueError, RecursionError):
            return json.loads(ground_truth)
        if "'" in ground_truth:
            with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
                found = ast.literal_eval(ground_truth)
    return found if isinstance(found, list | dict) else ground_truth


def _value(found: object, ground_truth: str) -> object:
    if not isinstance(found, dict) or "ground_truth" in found:
        return found["ground_truth"] if isinstance(found, dict) else found
    if len(found) != 1 or not found.keys() & set(_FIELDS):
        raise _unread(ground_truth, f"an answer, or one of {', '.join(_FIELDS)}")
    (value,) = found.values()
    return value


def _each(found: Sequence[object], ground_truth: str) -> list[str]:
    if not all(isinstance(each, str | int | float) for each in found):
        raise _unread(ground_truth, "an answer, or a list of accepted answers")
    texts = [each if isinstance(each, str) else json.dumps(each) for each in found]
    stated = [stated_in(text) or text for text in texts]
    if any(map(_STRAY.search, stated)):
        raise _unread(ground_truth, "the answer without marks")
    if len(stated) == 1 and "\n" in stated[0].strip() and "\\" not in stated[0]:
        raise _unread(ground_truth, "the answer alone, in a box, or after #### or `The answer is`")
    return [text for answer in stated for text in _written(answer)]


def stated_in(text: str) -> str | None:
    """Return the answer that a worked solution or a sentence states; None if it does not say where its answer is."""
    if _MARKED.search(text):
        answer = final_answer(text)
    elif not (answer := last_boxed(text, MODES["fix"]) if "\\" in text else None):
        stated = {found for found in _ANNOUNCED.findall(text) if found}
        if len(stated) > 1:
            raise _unread(text, "one answer")
        answer = stated.pop() if stated else None
    return (stated_in(answer) or answer) if answer else None


def _unread(ground_truth: str, expected: str) -> DataError:
    return DataError(f"ground truth {ground_truth[:60]!r}: expected {expected}; correct it, or see data.label_key")


def _written(answer: str) -> list[str]:
    """Return the ways to write an answer: numbers without the digits that only their type has, `true` as `True` too."""
    if answer in ("true", "false"):
        return [answer, answer.capitalize()]
    if answer.isalpha() or answer.isdecimal():
        return [answer]
    if (plain := without_stop(answer) or answer) != answer:
        return _written(plain)
    if not _FLOAT.fullmatch(answer):
        return [answer]
    if "e" in answer.lower():
        return [answer, format(Decimal(answer), "f")] if abs(Decimal(answer).adjusted()) < 400 else [answer]
    number = float(answer)
    # This many digits may have come from a number of 32 bits, or be meant.
    if len(answer) > 12 and abs(number) < 1e38 and repr(float(np.float32(number))) == answer:
        return [answer, format(Decimal(str(np.float32(number))), "f")]
    return [answer, whole] if (whole := re.sub(r"\.0+$", "", answer)) != answer else [answer]

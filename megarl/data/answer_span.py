"""Which tokens of a response spell its final answer, for credit that must not reward copying the answer of a hint."""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np

from megarl.types import BoolArray

Decode: TypeAlias = Callable[[Sequence[int]], str]

_BOXED = re.compile(r"\\boxed\s*\{")
_OPENING, _CLOSING = "<answer>", "</answer>"
_MARK = "####"

# Answers stand at the end: their tokens are looked for here first, which spares decoding whole responses.
_TAIL_TOKENS = 256
_MAX_SPLITS = 8


def answer_mask(token_ids: Sequence[int], decode: Decode) -> BoolArray:
    r"""[R] bool: tokens with a character inside the last \boxed{…} or <answer>…</answer>, or after the last ####.

    `decode` turns ids into the text that scorers read. A brace or a tag that is not closed reaches to the end.
    """
    ids = list(token_ids)
    text = decode(ids)
    mask = np.zeros(len(ids), dtype=np.bool_)
    spans = [_trimmed(text, start, end) for start, end in _spans(text) if text[start:end].strip()]
    split = _clean_split(ids, text, decode) if spans else 0
    head_chars = len(decode(ids[:split]))
    for start, end in spans:
        first, before = (split, head_chars) if start >= head_chars else (0, 0)

        def num_chars(i: int, first: int = first, before: int = before) -> int:
            """Characters of the text of the first i tokens."""
            return before + len(decode(ids[first:i]))

        places = range(first, len(ids) + 1)
        # From the token after which the text is longer than `start` to the one that completes `end`.
        begin = first + bisect_right(places, start, key=num_chars) - 1
        stop = first + bisect_left(places, end, key=num_chars)
        mask[begin:stop] = True
    return mask


def _clean_split(ids: list[int], text: str, decode: Decode) -> int:
    """A place near the end at which the text is that of the tokens before and that of those after it, or 0."""
    last = max(len(ids) - _TAIL_TOKENS, 0)
    places = range(last, max(last - _MAX_SPLITS, 0), -1)
    return next((i for i in places if decode(ids[:i]) + decode(ids[i:]) == text), 0)


def _spans(text: str) -> Iterator[tuple[int, int]]:
    """[start, end) in characters of each kind of final answer that the text has."""
    if boxes := list(_BOXED.finditer(text)):
        yield boxes[-1].end(), _closing_brace(text, boxes[-1].end())
    if _OPENING in text:
        start = text.rindex(_OPENING) + len(_OPENING)
        closing = text.find(_CLOSING, start)
        yield start, len(text) if closing < 0 else closing
    if _MARK in text:
        yield text.rindex(_MARK) + len(_MARK), len(text)


def _trimmed(text: str, start: int, end: int) -> tuple[int, int]:
    """The span without the spaces around it."""
    inside = text[start:end]
    return end - len(inside.lstrip()), start + len(inside.rstrip())


def _closing_brace(text: str, start: int) -> int:
    depth = 1
    for i in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return i
    return len(text)

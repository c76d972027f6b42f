"""The tokens that spell a response's final answer, for credit that must not reward copying the answer of a hint."""

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
    r"""Mark the tokens of the final answer.

    Args:
        decode: turns token ids into the text that scorers read.

    Returns:
        [R] bool: tokens with a character inside the last \boxed{…} or <answer>…</answer>, or after the last ####. A
        brace or a tag that is not closed reaches to the end.
    """
    ids = list(token_ids)
    text = decode(ids)
    mask = np.zeros(len(ids), dtype=np.bool_)
    spans = [(start, end) for start, end in _spans(text) if start < end]
    split = 0
    if spans:
        # A place near the end at which the text is that of the tokens before and that of those after it, or 0.
        last = max(len(ids) - _TAIL_TOKENS, 0)
        places = range(last, max(last - _MAX_SPLITS, 0), -1)
        split = next((i for i in places if decode(ids[:i]) + decode(ids[i:]) == text), 0)
    head_chars = len(decode(ids[:split]))
    for start, end in spans:
        first, before = (split, head_chars) if start >= head_chars else (0, 0)

        def num_chars(i: int, first: int = first, before: int = before) -> int:
            """Count the characters that the first i tokens spell."""
            return before + len(decode(ids[first:i]))

        places = range(first, len(ids) + 1)
        # From the token after which the text is longer than `start` to the one that completes `end`.
        begin = first + bisect_right(places, start, key=num_chars) - 1
        stop = first + bisect_left(places, end, key=num_chars)
        mask[begin:stop] = True
    return mask


def _spans(text: str) -> Iterator[tuple[int, int]]:
    """Find [start, end) in characters of each kind of final answer in the text, without the spaces around it."""
    found = []
    if boxes := list(_BOXED.finditer(text)):
        start = end = boxes[-1].end()
        depth = 1
        while end < len(text) and (depth := depth + {"{": 1, "}": -1}.get(text[end], 0)):
            end += 1
        found.append((start, end))
    if _OPENING in text:
        start = text.rindex(_OPENING) + len(_OPENING)
        closing = text.find(_CLOSING, start)
        found.append((start, len(text) if closing < 0 else closing))
    if _MARK in text:
        found.append((text.rindex(_MARK) + len(_MARK), len(text)))
    for start, end in found:
        inside = text[start:end]
        yield end - len(inside.lstrip()), start + len(inside.rstrip())

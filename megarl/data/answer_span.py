"""Find the tokens of a response's final answer, whose advantages CPO can be told not to change.

CPO changes a token's advantage by how much a hint in the prompt changes the token's log-prob. If the hint contains the
answer, the answer's tokens can simply be copied, and this change says nothing about the reasoning.
"""

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

# Answers stand at the end, so their tokens are searched for in a tail first, which avoids decoding whole responses.
_TAIL_TOKENS = 256
_MAX_SPLITS = 8


def answer_mask(token_ids: Sequence[int], decode: Decode) -> BoolArray:
    r"""Return a mask of the tokens that belong to the final answer of a response.

    Args:
        decode: turns token ids into the text that scorers read.

    Returns:
        [R] bool: tokens with a character inside the last \boxed{…} or <answer>…</answer>, or after the last ####. An
        unclosed brace or tag extends to the end.
    """
    ids = list(token_ids)
    text = decode(ids)
    mask = np.zeros(len(ids), dtype=np.bool_)
    spans = [(start, end) for start, end in _spans(text) if start < end]
    split = 0
    if spans:
        # A position near the end at which the tokens can be split and decoded separately to the same text, or 0.
        last = max(len(ids) - _TAIL_TOKENS, 0)
        places = range(last, max(last - _MAX_SPLITS, 0), -1)
        split = next((i for i in places if decode(ids[:i]) + decode(ids[i:]) == text), 0)
    head_chars = len(decode(ids[:split]))
    for start, end in spans:
        first, before = (split, head_chars) if start >= head_chars else (0, 0)

        def num_chars(i: int, first: int = first, before: int = before) -> int:
            """Count the characters of the text of the first i tokens."""
            return before + len(decode(ids[first:i]))

        places = range(first, len(ids) + 1)
        # The answer's tokens run from the one that reaches beyond character `start` to the one that completes `end`.
        begin = first + bisect_right(places, start, key=num_chars) - 1
        stop = first + bisect_left(places, end, key=num_chars)
        mask[begin:stop] = True
    return mask


def final_answer(text: str) -> str | None:
    r"""Return the final answer in a response: the last \boxed{…}, <answer>…</answer> or #### …; None without one."""
    spans = [(end, start) for start, end in _spans(text) if start < end]
    return text[max(spans)[1] : max(spans)[0]] if spans else None


def _spans(text: str) -> Iterator[tuple[int, int]]:
    """Yield the character range [start, end) of each kind of final answer in the text, without surrounding spaces."""
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

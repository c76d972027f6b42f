"""Register scorers by name, and define those for simple forms of answers, as `<answer>…</answer>`."""

import contextlib
import json
import re
import string
import unicodedata
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from megarl.errors import DataError
from megarl.registry import Registry
from megarl.types import Reward

# The key of `Reward.details` that is 1 if no answer could be parsed, which is counted separately from wrong answers.
PARSE_FAILED = "parse_failed"


class Scorer(Protocol):
    """A function that judges one response, from 0 (wrong) to 1 (right).

    A scorer accepts any text, and raises DataError for a malformed ground truth. Its caller limits its time.
    """

    def __call__(self, response: str, ground_truth: str, extra_info: Mapping[str, Any]) -> Reward: ...


SCORERS: Registry[Scorer] = Registry("data source", key="data_source")
FormatCheck = Callable[[str], bool]
FORMATS: Registry[FormatCheck] = Registry("response format", key="format")

_TAG = re.compile(r"</?(?:think|answer)>")
_THINK = ("<think>", "</think>")
_ANSWER = ("<answer>", "</answer>")
_MARK = "#### "
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_MARKS = re.escape(string.punctuation)
# Not within a number, before it, or a percent sign after it: -5, 3.5 and 1/2 are not 5, 35 and 12.
_PUNCTUATION = re.compile(rf"(?<=\d)[{_MARKS}]+(?=\d)|(?<![^\s(])[-.<>]+(?=[\d.])|(?<=\d)%|([{_MARKS}])")
LAST_ANSWER = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL)


def reward_of(correct: bool, *, parse_failed: bool) -> Reward:
    """Return the reward 1 (correct) or 0 (wrong), and record in its details whether the answer could be parsed."""
    return Reward(score=float(correct), correct=correct, details={PARSE_FAILED: float(parse_failed)})


def has_format(response: str, *, tags: tuple[str, ...], ends_well: FormatCheck, opened: bool = False) -> bool:
    """Return whether a response starts with the first of `tags`, has exactly these tags in this order, and ends well.

    `ends_well` is called with the text after `</think>`. `opened`: the prompt ends with the first tag, which the
    response must then not repeat.
    """
    text = (tags[0] if opened else "") + response.strip()
    if not text.startswith(tags[0]) or tuple(_TAG.findall(text)) != tags:
        return False
    return ends_well(text.rpartition("</think>")[2].strip())


_FORMATS: Mapping[str, tuple[tuple[str, ...], FormatCheck]] = {
    "think": (_THINK, bool),
    "think_boxed": (_THINK, lambda text: "}" in text.partition(r"\boxed{")[2]),
    "think_answer": (
        _THINK + _ANSWER,
        lambda text: re.fullmatch(r"<answer>\s*\S.*</answer>", text, re.DOTALL) is not None,
    ),
}


def score_format(response: str, ground_truth: str, extra_info: Mapping[str, Any], *, check: FormatCheck) -> Reward:
    """Score 1 if the response passes the format check, else 0; the ground truth is ignored."""
    well_formed = check(response)
    return reward_of(well_formed, parse_failed=not well_formed)


for _name, (_tags, _ends_well) in _FORMATS.items():
    FORMATS.register(_name)(partial(has_format, tags=_tags, ends_well=_ends_well))
    FORMATS.register(f"{_name}/opened")(partial(has_format, tags=_tags, ends_well=_ends_well, opened=True))
for _name in FORMATS:
    _scorer: Scorer = partial(score_format, check=FORMATS.get(_name))
    SCORERS.register(f"format/{_name}")(_scorer)


def accepted_answers(ground_truth: str) -> list[str]:
    """Return the answers that a ground truth of `short_answer` accepts; raise DataError if it has none."""
    accepted: Any = ground_truth
    if ground_truth[:1] in ("[", "{"):
        with contextlib.suppress(ValueError):
            accepted = json.loads(ground_truth)
    accepted = accepted.get("target") if isinstance(accepted, dict) else accepted
    accepted = accepted if isinstance(accepted, list) else [accepted]
    if not accepted or not all(isinstance(answer, str | int | float) for answer in accepted):
        raise DataError(f"ground truth is {ground_truth!r:.120}, expected an answer, or JSON with a list of answers")
    return [str(answer) for answer in accepted]


@SCORERS.register("short_answer")
def score_short_answer(response: str, ground_truth: str, extra_info: Mapping[str, Any]) -> Reward:
    """Score 1 if the last `<answer>…</answer>` equals one of the accepted answers, as Search-R1 compares them, else 0.

    Case, punctuation, articles (a, an, the), repeated spaces and Unicode's forms of a character do not count, but signs
    and points of numbers do, and whatever else a letter alone would be left without.
    `ground_truth` is one answer, or JSON: a list of answers, or {"target": such a list}.
    """
    accepted = accepted_answers(ground_truth)

    answers = LAST_ANSWER.findall(response)
    correct = bool(answers) and any(_same_words(answers[-1], answer) for answer in accepted)
    return reward_of(correct, parse_failed=not answers)


def _same_words(answer: str, accepted: str) -> bool:
    """Compare answers without case, punctuation and articles or, where these leave at most a letter, with them."""

    def words(text: str) -> str:
        plain = _PUNCTUATION.sub(lambda mark: "" if mark[1] else mark[0], _THOUSANDS.sub("", text))
        return " ".join(re.sub(r"\b(?:a|an|the)\b", " ", plain).split())

    left, right = _one_form(answer), _one_form(accepted)
    if re.fullmatch(r"[^\W\d]?", words(right)):
        # C++, C# and C differ, as do the grade A and no answer at all.
        left, right = (text.strip(" .,;:!?\"'()*") or text.strip() for text in (left, right))
        return left == right
    return words(left) == words(right)


def _one_form(text: str) -> str:
    """Return a text in lower case and Unicode's composed form, with ASCII digits and without full-width characters."""
    if text.isascii():
        return text.lower()
    forms = (
        str(unicodedata.decimal(c))
        if c.isdecimal()
        else c
        # These mean something else in line: 10², ½.
        if unicodedata.decomposition(c).startswith(("<super>", "<sub>", "<fraction>"))
        else unicodedata.normalize("NFKC", c)
        for c in text
    )
    return unicodedata.normalize("NFC", "".join(forms).lower())


@SCORERS.register("megarl/sums", "megarl/calculator")
def score_sums(response: str, ground_truth: str, extra_info: Mapping[str, Any]) -> Reward:
    """Score 1 if the response ends in `#### ` and the ground truth, and has `####` nowhere else; otherwise 0."""
    before, mark, number = response.rpartition(_MARK)
    well_formed = bool(mark) and _MARK.strip() not in before and re.fullmatch("[0-9]+", number) is not None
    return reward_of(well_formed and number == ground_truth, parse_failed=not well_formed)

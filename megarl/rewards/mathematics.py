"""Score final answers to mathematical questions: compare them by meaning, as strings, or by math-verify."""

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial

from megarl.errors import DataError
from megarl.rewards.scorers import IN_BOX, SCORERS, Scorer, reward_of
from megarl.rewards.truths import any_mathematics
from megarl.types import Reward
from megarl_answers import (
    MAX_ANSWER_CHARS,
    MODES,
    AnswerOptions,
    Equality,
    after_thoughts,
    compare_answers,
    extract_answer,
    is_equiv,
    last_boxed,
    same_string,
)
from megarl_answers.guard import costly, refusal
from megarl_answers.spelling import canonical
from megarl_answers.structure import is_balanced

# math-verify warns that nothing limits its time, but here the caller does.
logging.getLogger("math_verify").setLevel(logging.ERROR)

ANSWER_LINE_CHARS = 300
ANSWER_LINE = re.compile(r"answer\s*(?:\*\*|__)?\s*:\s*(?:(?:\*\*|__)\s+)?([^\n]+)", re.IGNORECASE)
# Numbers, names and words, but not LaTeX commands.
_TOKEN = re.compile(r"\d+|(?<![a-zA-Z\\])[a-zA-Z]+")
# math-verify takes them for a mixed fraction, and adds them.
_TWO_NUMBERS = re.compile(r"\d\s+\d")

AnswerComparison = Callable[[str, str, AnswerOptions], Equality]


def gold_answer(ground_truth: str) -> str:
    """Return a ground truth without spaces around it; raise DataError if it is empty or too long for an answer."""
    gold = ground_truth.strip()
    if not gold or len(gold) > MAX_ANSWER_CHARS:
        raise DataError(
            f"ground truth {gold[:60]!r} has {len(gold)} characters, expected an answer of 1 to {MAX_ANSWER_CHARS}"
        )
    return gold


def compare_strings(answer: str, gold: str, options: AnswerOptions) -> Equality:
    """Compare answers as strings: after `normalise` in the modes `doc` and `ref`, by `same_string` in mode `fix`."""
    if options.textual:
        return Equality.of(is_equiv(answer, gold, none_equals_none=options.none_equals_none))
    return Equality.of(same_string(answer, gold))


def compare_either(answer: str, gold: str, options: AnswerOptions) -> Equality:
    """Compare answers as strings, and by meaning if the strings differ."""
    same = compare_strings(answer, gold, options)
    return same if same is Equality.EQUAL else compare_answers(answer, gold, options)


def compare_with_second_opinion(answer: str, gold: str, options: AnswerOptions) -> Equality:
    """Compare answers by meaning, and ask math-verify where that cannot read one; what it can read, it decides alone.

    It counts only if it reads all of both texts. Nothing that `guard` refuses is passed on: no computation left to the
    reader, no number that takes long.
    """
    # Here and below: it imports sympy, which only judging needs.
    from math_verify import LatexExtractionConfig, parse, verify

    verdict = compare_answers(answer, gold, options)
    if verdict is not Equality.UNPARSED or options.textual or not (is_balanced(answer) and is_balanced(gold)):
        return verdict
    if any(refusal(canonical(text)) for text in (answer, gold)):
        return verdict
    readings = [
        parse(rf"\boxed{{{text}}}", (LatexExtractionConfig(),), parsing_timeout=None) for text in (gold, answer)
    ]
    for text, reading in zip((gold, answer), readings, strict=True):
        # It may have read a part of the text only: all numbers and names must be in what it read.
        read = set(_TOKEN.findall(str(reading[0]))) if reading else set()
        if not read or not set(_TOKEN.findall(text)) <= read:
            return verdict
    return Equality.EQUAL if verify(*readings, timeout_seconds=None) else verdict


def reward_of_answer(answer: str | None, gold: str, compare: AnswerComparison, options: AnswerOptions) -> Reward:
    """Compare an extracted answer with the gold answer. A missing answer, or one over 512 characters, counts as
    unparsed.
    """
    if answer is None or not answer.strip() or len(answer) > MAX_ANSWER_CHARS:
        return reward_of(False, parse_failed=True)
    verdict = compare(answer, gold, options)
    return reward_of(verdict is Equality.EQUAL, parse_failed=verdict is Equality.UNPARSED)


def score_answer(
    response: str,
    ground_truth: str,
    extra_info: Mapping[str, object],
    *,
    compare: AnswerComparison,
    options: AnswerOptions,
) -> Reward:
    """Score 1 if the answer that the response states equals the ground truth, else 0."""
    return reward_of_answer(extract_answer(response, options), gold_answer(ground_truth), compare, options)


def score_answer_line(response: str, ground_truth: str, extra_info: Mapping[str, object]) -> Reward:
    """Score 1 if the last `Answer: …` in the last 300 characters is spelled like the ground truth, otherwise 0."""
    found = ANSWER_LINE.findall(response[-ANSWER_LINE_CHARS:])
    answer = found[-1] if found else None
    if answer and answer.count("**") == 1:  # It closes the emphasis of the whole line.
        answer = answer.replace("**", "")
    boxed = last_boxed(answer, MODES["fix"]) if answer else None
    return reward_of_answer(boxed or answer, gold_answer(ground_truth), compare_strings, MODES["fix"])


@lru_cache(maxsize=8192)
def _parse_gold(gold: str) -> tuple[object, ...]:
    from math_verify import LatexExtractionConfig, parse

    parsed = tuple(parse(rf"\boxed{{{gold}}}", (LatexExtractionConfig(),), parsing_timeout=None))
    if not parsed:
        raise DataError(f"ground truth {gold[:60]!r}: math-verify finds no answer in it; score it as scorer=math")
    return parsed


def score_math_verify(response: str, ground_truth: str, extra_info: Mapping[str, object]) -> Reward:
    """Score 1 if math-verify 0.9 finds the answer equal to the ground truth, else 0.

    math-verify reads the last box, or without a box the last 512 characters. Texts that are costly to evaluate score 0,
    and so do numbers side by side, which math-verify adds.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    gold = _parse_gold(gold_answer(ground_truth))
    text = after_thoughts(response)
    boxed = last_boxed(text, MODES["fix"])
    text = text[-MAX_ANSWER_CHARS:] if boxed is None else rf"\boxed{{{boxed}}}"
    refused = boxed is not None and (len(boxed) > MAX_ANSWER_CHARS or _TWO_NUMBERS.search(canonical(boxed)))
    if refused or costly(text.replace("**", "^")):
        return reward_of(False, parse_failed=True)
    parsed = parse(text, (LatexExtractionConfig(), ExprExtractionConfig()), parsing_timeout=None)
    if any(isinstance(each, str) and _TWO_NUMBERS.search(canonical(each)) for each in parsed):
        return reward_of(False, parse_failed=True)
    correct = bool(parsed) and verify(list(gold), parsed, timeout_seconds=None)
    return reward_of(correct, parse_failed=not parsed)


for _mode, _options in MODES.items():
    _suffix = "" if _mode == "fix" else f"@{_mode}"
    for _name, _compare in (("math", compare_with_second_opinion), ("strict", compare_strings)):
        _scorer: Scorer = partial(score_answer, compare=_compare, options=_options)
        SCORERS.register(f"{_name}{_suffix}", **IN_BOX)(_scorer)
_scorer = partial(score_answer, compare=compare_with_second_opinion, options=replace(MODES["fix"], last_number=True))
SCORERS.register("math/last_number", **IN_BOX)(_scorer)
SCORERS.register("answer_line", truths=any_mathematics, states="Answer: {}".format, after_thoughts=True)(
    score_answer_line
)
SCORERS.register("math_verify", **IN_BOX)(score_math_verify)

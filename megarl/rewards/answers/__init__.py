"""Answers in free text: where they stand, how they are spelled, and when two of them are equal."""

from megarl.rewards.answers.equality import compare_answers, math_equal
from megarl.rewards.answers.extract import extract_answer, last_boxed
from megarl.rewards.answers.normalise import is_equiv, normalise
from megarl.rewards.answers.options import MAX_ANSWER_CHARS, MODES, AnswerOptions, Mode
from megarl.rewards.answers.strict import same_string
from megarl.rewards.answers.verdict import Verdict

__all__ = [
    "MAX_ANSWER_CHARS",
    "MODES",
    "AnswerOptions",
    "Mode",
    "Verdict",
    "compare_answers",
    "extract_answer",
    "is_equiv",
    "last_boxed",
    "math_equal",
    "normalise",
    "same_string",
]

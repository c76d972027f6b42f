"""Find answers to mathematical questions in free text, unify their spelling, and decide whether two are equal."""

from megarl_answers.equality import compare_answers, same_string
from megarl_answers.extract import extract_answer, last_boxed
from megarl_answers.options import MAX_ANSWER_CHARS, MODES, AnswerOptions, Equality, Mode
from megarl_answers.spelling import is_equiv, normalise, without_accents
from megarl_answers.thoughts import after_thoughts

__all__ = [
    "MAX_ANSWER_CHARS",
    "MODES",
    "AnswerOptions",
    "Equality",
    "Mode",
    "after_thoughts",
    "compare_answers",
    "extract_answer",
    "is_equiv",
    "last_boxed",
    "normalise",
    "same_string",
    "without_accents",
]

"""Score letters of choices: find the letter that an answer states, and refuse answers that state two or deny it."""

import re
import unicodedata
from collections.abc import Mapping
from functools import partial
from typing import Any

from megarl.errors import DataError
from megarl.rewards.mathematics import ANSWER_LINE, ANSWER_LINE_CHARS, reward_of_answer
from megarl.rewards.scorers import IN_BOX, SCORERS, Scorer
from megarl.types import Reward
from megarl_answers import MODES, AnswerOptions, Equality, extract_answer, normalise
from megarl_answers.words import CHANGING, DENYING

_LETTER = re.compile(r"[A-Za-z]")
_WRAPPER = re.compile(
    r"\\(?:text|textbf|mathrm|mathbf|mbox|boxed|underline|textsf|textit|emph)\b"
    r"|\\(?:text)?color(?:box)?\s*\{[^{}]*\}|\\(?:[,;:! ]|q?quad\b)|[*${}\"`“”\u200b-\u200f\u2060\ufeff]|(?<!~)~(?!~)"
)
_BEFORE = (
    r"[\s(\['.:>]*(?:(?:so|thus|hence|therefore|definitely|clearly|surely)\b,?\s*)*(?:i\s+(?:would\s+|will\s+)?"
    r"(?:choose|chose|pick|select|say)\s+|(?:it|that)(?:\s+is|\s+must\s+be|'s)\s+)?(?:(?:the|final|correct|right|best|my)\s+)*(?:(?:answer|option|choice)\s*(?:is\b|:|=)?\s*:?\s*\W?)?"
)
# The article, with a word for a quantity or several words: "A lot of them", "A red car"; "A photon" is a choice and its
# text.
_ARTICLE = (
    r"A\s+(?:(?:lot|few|little|bit|couple|number|pair|handful|dozen|great|good|single)\b"
    r"|(?!is\b|because\b|since\b|as\b|and\b|or\b|not\b|but\b)[a-z]+\s+[a-z])"
)
# But not the words "a" and "I". After the letter, what closes it: B), B. or B: stand before the text of the choice.
_STATED = re.compile(
    rf"(?i:{_BEFORE})[\s(\[]*(?!a\s+\w|I\s+[a-z]|{_ARTICLE})([A-Za-z])(?![\w'^])\s*(\)\s*[.:]?|[.:\]](?=\s|$)|)\s*"
)
_LONE = r"(?<![\w'])(?:[B-HJ-Z]|A(?!\s+[a-z])|I(?!\s+[a-z])|[b-hj-z])(?![\w'])"
# Nothing but letters of choices, and what joins them.
_LETTERS_ALONE = re.compile(rf"(?:{_LONE}|A|\b(?:and|or|also)\b|[\W_])+")
_JOINED = re.compile(
    r"[\W_]*(?:\b(?:or|and|but|is|isn't|are|aren't|was|wasn't|be|can|cannot|can't|could|would|should|seems|with|then|if"
    r"|to)\b|\\(?:lor|land|vee|wedge|to|rightarrow))"
)
# These confirm the letter: "B, not D", "B is correct", "B because C is false".
_CONFIRMED = re.compile(
    r"\W*(?:(?:because|since|as)\b.*|(?:and\s+)?not\s+\W?[A-Z]\W?(?:\s+(?:or|nor)\s+\W?[A-Z]\W?)*"
    r"|is\s+(?:the\s+)?(?:correct|right)(?:\s+(?:answer|option|choice))?)[\W_]*"
)
_WORD = re.compile(r"[(\s,;:-]*([^\W\d_]{2,})")
_VERDICT = re.compile(
    rf"\W*(?:no|false|wrong|incorrect)\b\W+{_LONE}\W*"
    r"|\W*(?:wrong|incorrect|not\b.*|never|excluded|eliminated|impossible|ruled out)\W*",
    re.IGNORECASE,
)


def compare_letters(answer: str, gold: str, options: AnswerOptions) -> Equality:
    """Compare multiple-choice letters, each standing alone or before the text of its choice.

    An answer with a second letter, or with words that deny the first one, states none. The modes `doc` and `ref` use
    the first letter of any word.
    """
    if options.textual:
        letter = _LETTER.search(normalise(answer))
        return Equality.UNPARSED if letter is None else Equality.of(letter[0].upper() == gold.upper())
    stated = stated_letter(answer)
    return Equality.UNPARSED if stated is None else Equality.of(stated == gold.upper())


def stated_letter(answer: str) -> str | None:
    """Return the letter of the one choice that an answer states, None if it states none, several or denies one."""
    text = unicodedata.normalize("NFKC", _WRAPPER.sub(" ", answer)).strip().replace("’", "'")
    match = _STATED.match(text)
    if match is None:
        return None
    letter, closing, rest = match[1].upper(), match[2], text[match.end() :].strip()
    if not re.search(r"\w", rest):
        return letter if re.fullmatch(r"[\s).,;:\]]*", rest) else None
    if _CONFIRMED.fullmatch(rest):
        return letter
    others = set(re.findall(_LONE, rest)) - {letter}
    words = set(re.findall(r"[a-z]+(?:'t)?", rest.lower()))
    if _JOINED.match(rest) or (others and _LETTERS_ALONE.fullmatch(rest)) or _VERDICT.fullmatch(rest):
        return None
    # The text of a choice may be anything; without a sign before it, it must not deny the choice or name another.
    if not closing and (others or words & DENYING or not (first := _WORD.match(rest)) or first[1].lower() in CHANGING):
        return None
    return letter


def score_letters(response: str, ground_truth: str, extra_info: Mapping[str, Any], *, options: AnswerOptions) -> Reward:
    """Score 1 if the response states the letter of the right choice, else 0.

    Without a box and "the answer is", the last `Answer: B` counts. Raises DataError for a ground truth without a
    letter, or with several.
    """
    letters: list[str] = _LETTER.findall(ground_truth)
    if len(letters) != 1:
        raise DataError(f"ground truth {ground_truth[:60]!r}: expected one letter of a choice, such as 'B'")
    answer = extract_answer(response, options)
    if answer is None and (lines := ANSWER_LINE.findall(_WRAPPER.sub(" ", response[-ANSWER_LINE_CHARS:]))):
        answer = lines[-1]
    return reward_of_answer(answer, letters[0], compare_letters, options)


for _mode, _options in MODES.items():
    _scorer: Scorer = partial(score_letters, options=_options)
    SCORERS.register("letters" if _mode == "fix" else f"letters@{_mode}", **IN_BOX)(_scorer)

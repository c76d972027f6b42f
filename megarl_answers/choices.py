"""Read the letter of a choice: the one that an answer states, and refuse answers that state two or deny it."""

import re
import unicodedata
from collections.abc import Callable

from megarl_answers.options import AnswerOptions, Equality
from megarl_answers.words import CHANGING, DENYING

WRAPPER = re.compile(
    r"\\(?:text|textbf|mathrm|mathbf|mbox|boxed|underline|textsf|textit|emph)\b"
    r"|\\(?:text)?color(?:box)?\s*\{[^{}]*\}|\\(?:[,;:! ]|q?quad\b)|[*${}\"`“”\u200b-\u200f\u2060\ufeff]|(?<!~)~(?!~)"
)
_BEFORE = (
    r"[\s(\['.:<>]*(?:(?:so|thus|hence|therefore|definitely|clearly|surely)\b,?\s*)*(?:i(?:\s+would|\s+will|'d|'ll)?\s+"
    r"(?:choose|chose|pick|select|say|go\s+with)\s+|(?:it|that)(?:\s+is|\s+must\s+be|'s)\s+)?(?:(?:the|final|correct|right|best|my)\s+)*(?:(?:answer|option|choice)\s*(?:is\b|:|=)?\s*:?\s*\W?)?"
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
    r"|is\s+(?:the\s+)?(?:correct|right|best)(?:\s+(?:answer|option|choice))?)[\W_]*"
)
_WORD = re.compile(r"[(\s,;:—–-]*([^\W\d_]{2,})")
_VERDICT = re.compile(
    rf"\W*(?:no|false|wrong|incorrect)\b\W+{_LONE}\W*"
    r"|\W*(?:wrong|incorrect|not\b.*|never|excluded|eliminated|impossible|ruled out)\W*",
    re.IGNORECASE,
)


def stated_letter(answer: str) -> str | None:
    """Return the letter of the one choice that an answer states, None if it states none, several or denies one."""
    text = unicodedata.normalize("NFKC", WRAPPER.sub(" ", answer)).strip().replace("’", "'")
    match = _STATED.match(text)
    if match is None:
        return None
    letter, closing, rest = match[1].upper(), match[2], text[match.end() :].strip()
    if not re.search(r"\w", rest):
        return letter if re.fullmatch(r"[\s).,;:!\]>]*", rest) else None
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


_LONE_LETTER = re.compile(r"(?:(?i:option|choice|statement)\s+)?\(?([A-Z])\)?[.:)]?")
# A letter with a sign that parts it from the text of its choice, and a text that is a value.
_LETTER_AND_TEXT = re.compile(r"(?:\(([A-Z])\)|([A-Z])[.:)])\s*(.+)")
_VALUE = re.compile(r"-?[$€£]?\s*(?:[\d.]|\\(?:frac|sqrt|pi)(?![a-zA-Z])).*")


def same_choice(
    answer: str, gold: str, compare: Callable[[str, str], Equality], options: AnswerOptions
) -> Equality | None:
    """Compare a choice and its text, `(C) 5`, with the letter or the value alone."""
    found = [_LETTER_AND_TEXT.fullmatch(text) for text in (answer, gold)]
    if (found[0] is None) == (found[1] is None):
        return None
    (both, other), text = ((found[0], gold), answer) if found[0] else ((found[1], answer), gold)
    if lone := _LONE_LETTER.fullmatch(other):
        return Equality.of(stated_letter(text) == lone[1])
    is_value = both is not None and _VALUE.fullmatch(both[3]) and (both[1] or both[2]) not in other
    return compare(both[3], other) if both and is_value else None

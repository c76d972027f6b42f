"""Read the letter of a choice: the one that an answer states, and refuse answers that state two or deny it."""

import re
import unicodedata
from collections.abc import Callable

from megarl_answers.options import AnswerOptions, Equality
from megarl_answers.words import CHANGING, DENYING

WRAPPER = re.compile(
    r"\\(?:text|textbf|mathrm|mathbf|mbox|boxed|underline|textsf|textit|emph)\b"
    r"|\\(?:text)?color(?:box)?\s*\{[^{}]*\}|\\(?:[,;:! ]|q?quad\b)|[*${}\"`“”\u200b-\u200f\u2060\ufeff]|(?<!~)~(?!~)"
    r"|</?answer>|[✅✔☑\ufe0f]"
)
_BEFORE = (
    r"[\s(\['.:<>]*(?:(?:so|thus|hence|therefore|then|definitely|clearly|surely)\b,?\s*)*(?:i(?:'m|\s+am)\s+(?:\w+\s+)?"
    r"(?:confident|sure|certain)\s+(?:that\s+)?|(?:i|we)\s+(?:think|believe|conclude|find|see)\s+(?:that\s+)?)?"
    r"(?:(?:(?:i|we)(?:\s+(?:would|will|must|am)|'d|'ll|'m)?\s+)?(?:choose|chose|pick|select|go(?:ing)?\s+with)\s+|i(?:'d|\s+would)?\s+say\s+"
    r"|(?:it|that|this|which)(?:\s+(?:is|gives|means|leaves|makes)|\s+(?:must|should|has\s+to)\s+be|'s)\s+)?(?:(?:the|final|correct|right|best|only|my|our|most\s+(?:suitable|appropriate|accurate|fitting|likely))\s+)*"
    r"(?:(?:answer|option|choice|pick|statement|letter|one)\b(?:\s+(?:that|which)\s+(?!fails)[a-z]+s(?<!is|as)(?:\s+[a-z]+){0,3}?(?=\s+is\b))?\s*(?:(?:is|must\s+be|would\s+be|should\s+be)\b|:|=)?\s*:?\s*(?:(?:option|choice|letter)\s)?\W?){0,3}"
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
    r"|to|(?i:wait|sorry|actually))\b|\\(?:lor|land|vee|wedge|to|rightarrow))"
)
# These confirm the letter: "B, not D", "B is correct", "B because C is false".
_CONFIRMED = re.compile(
    r"\W*(?:(?:because|since|as)\b.*|(?:(?:and\s+)?not|rather\s+than|instead\s+of)\s+\W?[A-Z]\W?(?:\s+(?:or|nor)\s+\W?[A-Z]\W?)*"
    r"|is\s+(?:the\s+)?(?:(?:correct|right|best|only)\b\s*)?(?:(?:answer|option|choice|one)\b)?(?<=\w)"
    r"(?:,?\s+(?:because|since|as|which|that)\b(?!.*\b(?:not|fails?|wrong|false)\b).*|,\s+(?:an?|the)\b.*)?)[\W_]*"
)
_ASIDE = re.compile(r"^\((?=[^()]*[a-z]{2})(?![^()]*\b(?i:not?|or|if|but|never|wrong|false|maybe)\b)[^()]*\)(?=\W*$)")
_WORD = re.compile(r"[(\s,;:—–-]*([^\W\d_]{2,})")
_VERDICT = re.compile(
    rf"\W*(?:no|false|wrong|incorrect)\b\W+{_LONE}\W*"
    r"|\W*(?:wrong|incorrect|not\b.*|never|excluded|eliminated|impossible|ruled out)\W*",
    re.IGNORECASE,
)


def stated_letter(answer: str, *, in_text: bool = False) -> str | None:
    """Return the letter of the one choice that an answer states, None if it states none, several or denies one.

    in_text: it is a part of a text about other things, so that words must announce or confirm the letter.
    """
    text = " ".join(unicodedata.normalize("NFKC", WRAPPER.sub(" ", answer)).split()).replace("’", "'")
    match = _STATED.match(text)
    if match is None:
        return None
    letter, closing, rest = match[1].upper(), match[2], text[match.end() :].strip()
    rest = _ASIDE.sub("", rest)
    if closing == ":" and re.search(rf"{_LONE}:", rest):
        return None
    if _CONFIRMED.fullmatch(rest):
        return letter
    if in_text and not re.search(r"\w", text[: match.start(1)]):
        return None
    if not re.search(r"\w", rest):
        return letter if re.fullmatch(r"[\s).,;:!\]>]*", rest) else None
    others = set(re.findall(_LONE, rest)) - {letter}
    words = set(re.findall(r"[a-z]+(?:'t)?", rest.lower()))
    if _JOINED.match(rest) or (others and _LETTERS_ALONE.fullmatch(rest)) or _VERDICT.fullmatch(rest):
        return None
    if in_text and not closing:
        return None
    # The text of a choice may be anything; without a sign before it, it must not deny the choice or name another.
    if not closing and (others or words & DENYING or not (first := _WORD.match(rest)) or first[1].lower() in CHANGING):
        return None
    return letter


_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n+")
_ARROW = re.compile(r"→|⇒|\\(?:to|(?:Long|long)?[Rr]ightarrow|implies)(?![a-zA-Z])")
_CLAUSE = re.compile(r"[,;:—–]\s|\s-\s|(?=\b(?:so|hence|thus|therefore|which|meaning)\b)", re.IGNORECASE)
_BARE = re.compile(r"\W*(?:(?:option|choice|answer)\s+)?(?:\([a-z]\)|[a-z](?:[).:](?=\s|$)|\W*$))", re.IGNORECASE)
_OF_OTHERS = re.compile(r"\W*(?i:if|unless|suppos\w+|assum\w+|when|were|some|many|most|others)\b")
_DOUBT = re.compile(r"\?|\b(?i:wrong|incorrect|wait|actually|sorry|but|however|instead|mistaken?)\b")


def stated_choice(text: str) -> str | None:
    """Return the clause or line of a text that states a choice last, None if there is none, or it is doubted."""
    text = _ARROW.sub(" so ", WRAPPER.sub(" ", text[-1024:])).replace("’", "'")
    bare = {letter: line for line in text.split("\n") if _BARE.match(line) and (letter := stated_letter(line))}
    after = ""
    for sentence in reversed(_SENTENCE.split(text)):
        starts = [0, *(found.end() for found in _CLAUSE.finditer(sentence))]
        for start in reversed([] if _OF_OTHERS.match(sentence) else starts):
            if stated_letter(sentence[start : start + 256], in_text=True):
                return None if _DOUBT.search(after) else sentence[start:]
        after = f"{sentence} {after}"
    return next(iter(bare.values())) if len(bare) == 1 else None


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

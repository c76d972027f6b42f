"""Read the letter of a choice: the one that an answer states, and refuse answers that state two or deny it."""

import re
import unicodedata
from collections.abc import Callable

from megarl_answers.options import AnswerOptions, Equality
from megarl_answers.words import CHANGING, DENYING

WRAPPER = re.compile(
    r"\\(?:text|textbf|mathrm|mathbf|mbox|boxed|underline|textsf|textit|emph)\b"
    r"|\\(?:text)?color(?:box)?\s*\{[^{}]*\}|\\(?:[,;:! ]|q?quad\b)|[*${}\"`“”\u200b-\u200f\u2060\ufeff]|(?<!~)~(?!~)"
    r"|</?answer>|[✅✔✓☑\ufe0f]"
)
_SOME_LETTER = r"\W?[a-z]\W?"
# Adverbs, what introduces an opinion, verbs that choose or point to a choice, and names of it.
_BEFORE = (
    r"(?:[\s(\['.:<>#=]|-(?=[\s>]))*(?:(?:so|thus|hence|therefore|then|definitely|clearly|surely|certainly|obviously|only|actually|finally"
    r"|overall|now|but|sorry|correction|no(?=,)|by\s+(?:process\s+of\s+)?elimination|without\s+(?:an?y?\s+)?(?:doubt|question))\b"
    rf"[,:]?\s*)*(?:not\s+{_SOME_LETTER},?\s+but\s+|rather\s+than\s+{_SOME_LETTER}\s+)?"
    r"(?:i(?:'m|\s+am)\s+(?:\w+\s+)?(?:confident|sure|certain)\s+(?:that\s+)?|(?:there(?:'s|\s+is)\s+)?no\s+doubt\s+(?:that\s+)?"
    r"|(?:i|we)\s+(?:think|believe|conclude|find|see)\s+(?:that\s+)?)?"
    rf"(?:(?:let\s+me\s+|i(?:'ll|\s+will)?\s+)?(?:change|switch)(?:ed)?\s+(?:my\s+)?(?:answer|choice)?\s*(?:from\s+{_SOME_LETTER}\s+)?to\s+"
    r"|(?:let(?:'s|\s+us)\s+)?(?:(?:i|we|you)(?:\s+(?:would|will|must|should|am|now)|'d|'ll|'m)?\s+)?(?:choos(?:e|ing)|chose|pick(?:ing)?"
    r"|select(?:ing)?|mark(?:ing)?|settle\s+on|stick\s+with|opt\s+for|go(?:ing)?\s+(?:with|for)|conclude)\s*:?\s+"
    r"|(?:i|we)(?:'d|\s+would)?\s+(?:say|answer|mean|get)\s+|(?:(?:it|that|this|which)\s+)?leav(?:es|ing)\s+(?:us\s+with\s+|only\s+|just\s+)?"
    r"|(?:it|that|this|which)(?:\s+(?:is|gives|means|makes|matches|fits|corresponds\s+to|points\s+to|leads\s+to)"
    r"|\s+(?:must|should|has\s+to|can\s+only)\s+be|'s)\s+)?"
    r"(?:(?:the|final|correct|right|best|only|my|our|true|valid|consistent|first|second|third|fourth|last"
    r"|most\s+(?:suitable|appropriate|accurate|fitting|likely))\s+)*"
    r"(?:(?:answer|ans|option|choice|pick|statement|letter|one|result|solution|verdict|conclusion|match|closest|vote|final|correct"
    r"|what\s+we\s+(?:want|need))\b(?:\s+(?:that|which)\s+(?!fails)[a-z]+s(?<!as)(?:\s+[a-z]+){0,3}?(?=\s+is\b))?\s*"
    r"(?:(?:is|goes\s+to|(?:must|would|should|can\s+only)\s+be)\b|[:=-])?\s*:?\s*(?:(?:option|choice|letter)\s)?\W?){0,3}"
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
# These confirm the letter: "B, not D", "B is correct", "B fits best", "B, though C is tempting".
_CONFIRMED = re.compile(
    r"\W*(?:(?:because|since|as)\b.*|(?:(?:and\s+)?not|over|rather\s+than|instead\s+of)\s+\W?[A-Z]\W?(?:\s+(?:or|nor)\s+\W?[A-Z]\W?)*"
    r"|for\s+sure|no\s+doubt|without\s+(?:an?y?\s+)?(?:doubt|question)|it\s+is|(?:wins|works|fits|holds|remains|matches|applies)(?:\s+(?:best|here))?"
    r"|makes\s+(?:the\s+most\s+)?sense|satisfies\s+(?:all|every|both|each)\b[\w\s]*|is\s+(?:consistent\s+with|(?:best|better)\s+supported)\b[\w\s]*"
    r"|(?:here\b)?,?\s*(?:even\s+)?(?:though|although|while)\s+\W?[A-Z]\W?\s+(?:is|was|looks|seems)\s+(?:tempting|close|attractive|plausible|similar)"
    r"|is\s+(?:what|the\s+one)\s+we\s+(?:want|need)|is\s+better\s+than\s+[A-Z]|is\s+left"
    r"|(?:is|(?:must|has\s+to|would|should)\s+be|(?:seems|looks|appears)(?:\s+to\s+be)?)\s+(?:(?:clearly|obviously|definitely|therefore|thus|indeed)\s+)?"
    r"(?:the\s+)?(?:(?:correct|right|best|better|only|true|valid|it)\b\s*)*(?:(?:answer|option|choice|one|match|fit)\b)?(?<=\w)"
    r"(?:,?\s+(?:because|since|as|which|that)\b(?!.*\b(?:not|fails?|wrong|false)\b).*|,\s+(?:an?|the)\b.*|\s+(?:here|overall|to\s+me)\b)?)[\W_]*"
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
_CLAUSE = re.compile(r"[,;:—–]\s|\s-\s|(?=\b(?:so|hence|thus|therefore|which|meaning|leaves|leaving)\b)", re.IGNORECASE)
_BARE = re.compile(
    r"\W*(?:(?:option|choice|answer)\s+)?(?:\([a-z]\)|[a-z](?:[).:](?=\s|$)|\W*$)|(?-i:[A-HJ-Z])(?:\s+\(|[,—–]\s))",
    re.IGNORECASE,
)
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

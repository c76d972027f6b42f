"""Tell the words that name what a number counts from those that change or deny an answer."""

import re
from collections.abc import Mapping

from megarl_answers.options import Equality
from megarl_answers.units import MEASURES, NOT_UNITS, unit_of

# Words with a meaning: after a number or the letter of a choice they make another answer, several, or none.
_MEANINGS: Mapping[str, str] = {
    "deny": "both isnt arent wasnt doesnt dont wont cant "
    "not no nor never neither none nothing cannot can't wrong incorrect false bad invalid untrue mistaken "
    "isn't aren't wasn't doesn't don't won't unless except excluded excluding eliminated maybe perhaps possibly "
    "probably versus vs either instead rather unlikely impossible rejected unsure uncertain guess doubt",
    "join": "and or but then plus minus times over without if as also else",
    "link": "to by from for on at with than",
    "state": "is are was were be been has have had does do did can could would should may might will must equals makes "
    "gives leaves becomes remains",
    "change": "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred hundreds thousand "
    "thousands mil million millions billion billions trillion trillions dozen dozens score scores half halves third "
    "thirds quarter quarters fourth fourths fifth fifths sixth sixths seventh sevenths eighth eighths ninth ninths "
    "tenth tenths hundredth hundredths thousandth thousandths ones twos threes fours fives tens twice thrice double "
    "doubled doubles triple tripled squared cubed pair pairs less negative multiplied divided added subtracted "
    "increased decreased approximately about around almost nearly roughly so something pi yes always sometimes "
    "too most least maximum minimum up under short enough only past before after",
    # After a noun these say nothing new: 18 dollars each, 18 years old, 18 miles per hour, 18 apples in total.
    "go on": "per a an each every of in the all her his their total altogether overall old left away ago long tall "
    "high wide deep remaining apart together more remain remains",
    # Two of these may make one amount: 18 pounds and 5 ounces.
    "measure": "pound ounce gallon quart pint yard acre month decade dime nickel penny",
}
_WORDS = {meaning: frozenset(words.split()) for meaning, words in _MEANINGS.items()}
DENYING = _WORDS["deny"]
# These change an answer wherever they stand, also in a remark about it.
CHANGED = DENYING | _WORDS["change"] | {"or", "but", "if", "plus", "minus", "times", "mod", "modulo", "base"}
CHANGING = DENYING | _WORDS["join"] | _WORDS["link"] | _WORDS["state"] | _WORDS["change"]
_STATES = frozenset({"is", "are", "was", "were", "can", "will", "could"})
_PLURAL = re.compile(r"[a-z]{2,}(?<![sui])s")
_COMPARISON = re.compile(r"[a-z]{2,}er")
_MORE = re.compile(r"(.*?)\s+and\s+(?:\d+\s+)?([a-z]+)")
# Words that need no noun: `12 more than Bob`, `12 times as many`, `12 of them`, `12 is the answer`.
_NO_NOUN = re.compile(
    r"(?:more|fewer|less|[a-z]{2,}er)(?:\s+than(?P<other>(?:\s+[a-z']+)+))?|times(?:\s+as\s+[a-z]+)?"
    r"|of\s+(?:the|them|these|those|his|her|their|all)\b(?P<rest>[a-z\s]*)"
    r"|(?:is|was)\s+(?:(?:the|our|my|final|right|correct)\s+)*(?:answer|result|total|right|correct)"
)


def counted_unit(words: str) -> str | None:
    """Return the unit with which words begin that only name what the number before them counts, "" without a known unit
    and None for words that say anything else.

    They are adjectives and a plural noun or known unit, then words such as `each`, `per week` or `for her friends`, or
    another counted thing, as in `apples and 2 pears`; or a comparison, as `more than Bob`. Words that change the number
    or deny it, as `dozen`, `and a half` and `is wrong`, are not among them.
    """
    text = re.sub(r"\bthe \d+(?= [a-z]+)", "the", re.sub(r"[.,;:]+$", "", words.strip().casefold()))
    if len(text) > 2 and text[0] == "(" and text[-1] == ")":
        text = text[1:-1]
    if (more := _MORE.fullmatch(text)) and is_noun(more[2]):
        units = [unit_of(thing) for thing in ((more[1].split() or [""])[-1], more[2])]
        return None if any(u in MEASURES or u in _WORDS["measure"] for u in units) else counted_unit(more[1])
    if match := _NO_NOUN.fullmatch(text):
        others = set(((match["other"] or "") + (match["rest"] or "")).split())
        return None if others & CHANGING else ""
    found = text.split()
    # A share of a variable.
    if "of" in found[:-1] and len(found[-1]) == 1:
        return None
    if not found or not all(re.fullmatch("[a-z]+(?:'s)?", word) for word in found):
        return None
    # `in total` counts no inches.
    ends = range(0 if found[0] in NOT_UNITS else min(len(found), 5), 0, -1)
    known = next((end for end in ends if unit_of(" ".join(found[:end]))), 0)
    nouns = (index for index, word in enumerate(found, 1) if is_noun(word) and word not in NOT_UNITS)
    noun = known or next(nouns, 0)
    rest = found[noun:]
    stated = set(rest[:1]) & _STATES if noun and len(rest) > 1 else set()
    allowed = _WORDS["link"] | stated
    linked = next((index for index, word in enumerate(rest) if word in (*allowed, "in", "of")), len(rest))
    if (not known and set(found[:noun]) & CHANGING) or any(word in CHANGING - allowed for word in rest):
        return None
    # Up to a word that links the rest, all must be known.
    if any(not (word in _WORDS["go on"] or is_noun(word) or _COMPARISON.fullmatch(word)) for word in rest[:linked]):
        return None
    return " ".join(found[:known]) if noun or linked == len(rest) or rest[linked] in ("in", "of") else None


def is_noun(word: str) -> bool:
    """Return whether a word may be a noun in the plural, or is a unit."""
    return word not in CHANGING and (_PLURAL.fullmatch(word) is not None or unit_of(word) != "")


_ARTICLE = re.compile(
    r"^(?:(?:the|this|it)\s+(?:[a-z]+\s+){0,2}(?:is|are|was)\s+)?(?:(?:on|in|at)\s+(?=[a-z]+$))?(?:(?:an?|the)\s+)?(?=[a-z]{3})"
)
# After a verdict, the reason.
_REASON = re.compile(r"^(yes|no),\s(?!.*\b(?:not?|but|if|or|never)\b).*$")
_ONLY_WORDS = re.compile(r"[^\W\d_]+(?:[\s'-]+[^\W\d_]+)*")
# Words whose case does not matter, unlike that of commands, products of two variables, and units such as mHz.
_CASELESS = re.compile(
    r"(?<![\\a-zA-Z])(?:[A-Z]?[a-z]{2,}|[A-Z]{4,}|YES|DNE|[nN][oO]|[aApP][mM])(?![a-zA-Z])|[^\W\d_a-zA-Z]{2,}"
)
_CHOICE = re.compile(r"(?:(?i:option|choice|statement)\s+)?\(?([A-Z])\)?[.:)]?")
# As algebra reads it, `1 B` is B.
_NUMBER_AND_LETTER = re.compile(r"[\d.]+\s*[A-Z]|[A-Z]\s*[\d.]+")
# Words that are not taken for products of their letters, as are others of up to three.
_SHORT_WORDS = frozenset({"yes", "no"})
_SAME_WORDS = {
    re.compile(words): same
    for words, same in (
        (
            r"(?:there (?:is|are) )?no (?:real )?(?:solutions?|roots?)(?: exists?)?|(?:the )?empty set|none|无解",
            r"\emptyset",
        ),
        (r"(?:the set of )?(?:all|any|every) (?:the )?reals?(?: numbers?)?(?: x)?", r"\mathbb{R}"),
        (r"dne|undefined|(?:the |it |this )?(?:limit |value )?does not exist", "does not exist"),
        (r"infinite|(?:positive )?\\infty", r"\infty"),
    )
}


def same_words(answer: str, gold: str, _compare: object, _options: object) -> Equality | None:
    """Compare words (neither numbers nor products of variables) and letters of choices, ignoring case."""
    letters = [_CHOICE.fullmatch(text) for text in (answer, gold)]
    if letters[0] and letters[1]:
        return Equality.of(letters[0][1] == letters[1][1])
    if any(letters) and any(_NUMBER_AND_LETTER.fullmatch(text) for text in (answer, gold)):
        return Equality.DIFFERENT
    a, g = (_CASELESS.sub(lambda word: word[0].casefold(), " ".join(text.split())) for text in (answer, gold))
    a, g = (next((same for words, same in _SAME_WORDS.items() if words.fullmatch(text)), text) for text in (a, g))
    a, g = (_REASON.sub(r"\1", _ARTICLE.sub("", text)) for text in (a, g))
    is_text = [
        text in _SHORT_WORDS or (_ONLY_WORDS.fullmatch(text) is not None and (len(text) > 3 or not text.isascii()))
        for text in (a, g)
    ]
    if a == g and (any(is_text) or len(a) > 2):
        return Equality.EQUAL
    return Equality.DIFFERENT if any(is_text) and not any(re.search("[=<>,;]| and ", text) for text in (a, g)) else None

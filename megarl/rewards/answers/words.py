"""Tell the words that name what a number counts from those that change or deny an answer."""

import re
from collections.abc import Mapping

from megarl.rewards.answers.units import MEASURES, split_unit

# Words with a meaning: after a number or the letter of a choice they make another answer, several, or none.
_MEANINGS: Mapping[str, str] = {
    "deny": "both isnt arent wasnt doesnt dont wont cant "
    "not no nor never neither none nothing cannot can't wrong incorrect false bad invalid untrue mistaken "
    "isn't aren't wasn't doesn't don't won't unless except excluded excluding eliminated maybe perhaps possibly "
    "probably versus vs either instead rather unlikely impossible rejected unsure uncertain guess",
    "join": "and or but then than plus minus times over with without if as also else to by from for on at",
    "state": "is are was were be been has have had does do did can could would should may might will must equals makes "
    "gives leaves becomes remains",
    "change": "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred hundreds thousand "
    "thousands mil million millions billion billions trillion trillions dozen dozens score scores half halves third "
    "thirds quarter quarters fourth fourths fifth fifths sixth sixths seventh sevenths eighth eighths ninth ninths "
    "tenth tenths hundredth hundredths thousandth thousandths ones twos threes fours fives tens twice thrice double "
    "doubled doubles triple tripled squared cubed pair pairs less negative multiplied divided added subtracted "
    "increased decreased approximately about around almost nearly roughly so something pi yes always sometimes",
    # After a noun these say nothing new: 18 dollars each, 18 years old, 18 miles per hour, 18 apples in total.
    "go on": "per a an each every of in the all her his their total altogether overall old left away ago long tall "
    "high wide deep remaining apart together more",
    # Two of these may make one amount: 18 pounds and 5 ounces.
    "measure": "pound ounce gallon quart pint yard acre month decade dime nickel penny",
}
_WORDS = {meaning: frozenset(words.split()) for meaning, words in _MEANINGS.items()}
DENYING = _WORDS["deny"]
CHANGING = DENYING | _WORDS["join"] | _WORDS["state"] | _WORDS["change"]
_PLURAL = re.compile(r"[a-z]{2,}(?<![sui])s")
_MORE = re.compile(r"(.*?)\s+and\s+\d+\s+([a-z]+)")


def is_counted(words: str) -> bool:
    """Return whether words after a number only name what it counts: adjectives and a plural noun or known unit, then
    words such as `each` or `per week`, or another counted thing, as in `apples and 2 pears`.

    Words that change the number or deny it, as `dozen`, `and a half` and `is wrong`, do not.
    """
    text = re.sub(r"[.,;:]+$", "", words.strip().casefold())
    if len(text) > 2 and text[0] == "(" and text[-1] == ")":
        text = text[1:-1]
    if (more := _MORE.fullmatch(text)) and _noun(more[2]):
        units = [split_unit(f"1 {thing}").unit for thing in ((more[1].split() or [""])[-1], more[2])]
        return is_counted(more[1]) and not any(unit in MEASURES or unit in _WORDS["measure"] for unit in units)
    found = text.split()
    if not found or any(word in CHANGING or not re.fullmatch("[a-z]+", word) for word in found):
        return False
    noun = next((index for index, word in enumerate(found) if _noun(word)), None)
    return noun is not None and all(word in _WORDS["go on"] or _noun(word) for word in found[noun + 1 :])


def _noun(word: str) -> bool:
    return word not in CHANGING and (_PLURAL.fullmatch(word) is not None or split_unit(f"1 {word}").unit != "")
